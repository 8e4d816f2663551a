"""Offline batches against a real stack, whose model is simulated."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.helpers.patience import PATIENCE_S
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tqdm import tqdm

from slipstream import LLM, BadRequestError, ChatMessage, ClosedError, SamplingParams
from slipstream.stack.supervisor_process import StackError
from slipstream_ipc import messages

PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with LLM("simulated:step_ms=1") as llm:
        yield llm


def test_outputs_are_in_order_and_have_vllms_shape(llm):
    prompts = [f"prompt number {number}" for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 7) for number in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert len({output.request_id for output in outputs}) == 40
    for number, output in enumerate(outputs):
        (answer,) = output.outputs
        assert output.finished
        assert output.prompt_token_ids
        assert answer.index == 0
        assert len(answer.token_ids) == 1 + number % 7
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        assert answer.logprobs is None
    assert [output.outputs[0].text for output in llm.generate(prompts, params, False)] == [
        output.outputs[0].text for output in outputs
    ]


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7])])
def test_one_prompt_may_come_without_a_list(llm, ids):
    (output,) = llm.generate(ids, PARAMS, use_tqdm=False)
    assert output.prompt is None
    assert output.prompt_token_ids == [5, 6, 7]
    (one,) = llm.generate("a text", PARAMS, use_tqdm=False)
    (other,) = llm.generate(["a text"], PARAMS, use_tqdm=False)
    assert one.outputs == other.outputs
    assert llm.generate([], use_tqdm=False) == []


def test_prompts_may_be_what_vllm_calls_text_and_tokens_prompts(llm):
    plain = llm.generate(["a text", [5, 6, 7]], PARAMS, use_tqdm=False)
    named = llm.generate(
        [{"prompt": "a text"}, {"prompt_token_ids": [5, 6, 7]}], PARAMS, use_tqdm=False
    )
    assert [output.outputs for output in named] == [output.outputs for output in plain]
    assert [output.prompt for output in named] == ["a text", None]
    (alone,) = llm.generate({"prompt": "a text"}, PARAMS, use_tqdm=False)
    assert (alone.prompt, alone.outputs) == ("a text", plain[0].outputs)


def test_none_is_no_stop(llm):
    none = SamplingParams(temperature=0, max_tokens=8, stop=None, stop_token_ids=None)
    (plain,) = llm.generate("a text", PARAMS, use_tqdm=False)
    (output,) = llm.generate("a text", none, use_tqdm=False)
    assert output.outputs == plain.outputs
    assert len(llm._client.generate("a text", stop=None, max_tokens=3).token_ids) == 3


@pytest.mark.parametrize(
    "messages", [{"role": "user", "content": "x"}, "hello", ["hello"], [[]], [["hello"]], 5, None]
)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(BadRequestError) as caught:
        llm.chat(messages, PARAMS, use_tqdm=False)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("prompts", ["a text", b"a text", 5, None, {"prompt": "a text"}])
def test_many_prompts_are_a_list(llm, prompts):
    for ask in (llm._client.generate_many, llm._client.stream_many):
        with pytest.raises(BadRequestError) as caught:
            ask(prompts)
        assert caught.value.field == "prompts"


def test_texts_and_ids_may_be_mixed(llm):
    texts, ids = llm.generate(["a text", [5, 6, 7]], PARAMS, use_tqdm=False)
    assert (texts.prompt, ids.prompt) == ("a text", None)


def test_params_default_to_vllms(llm):
    (output,) = llm.generate("a text", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


def test_the_former_name_of_sampling_params_works_and_warns(llm):
    (named,) = llm.generate("a text", sampling_params=PARAMS, use_tqdm=False)
    with pytest.warns(DeprecationWarning, match="sampling_params") as warned:
        (former,) = llm.generate("a text", params=PARAMS, use_tqdm=False)
    assert former.outputs == named.outputs
    assert warned[0].filename == __file__
    turns = [{"role": "user", "content": "x"}]
    with pytest.warns(DeprecationWarning, match="sampling_params"):
        (answer,) = llm.chat(turns, params=PARAMS, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 8
    with pytest.raises(BadRequestError, match="sampling_params alone"):
        llm.generate("a text", PARAMS, params=PARAMS, use_tqdm=False)


def test_single_options_stand_for_sampling_params(llm):
    texts = llm.generate(["a", "b"], temperature=0, max_tokens=3, n=2, use_tqdm=False)
    assert [len(one.token_ids) for each in texts for one in each.outputs] == [3] * 4
    turns = [{"role": "user", "content": "x"}]
    (answer,) = llm.chat(turns, temperature=0, max_tokens=3, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 3
    with pytest.raises(BadRequestError, match="not both") as caught:
        llm.generate("a", PARAMS, max_tokens=3, use_tqdm=False)
    assert caught.value.field == "sampling_params"
    with pytest.raises(BadRequestError, match="max_token; did you mean max_tokens"):
        llm.generate("a", max_token=3, use_tqdm=False)


def test_chat_options_reach_the_template(llm):
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}]
    (plain,) = llm.chat(turns, PARAMS, use_tqdm=False)
    (going_on,) = llm.chat(
        turns, PARAMS, False, add_generation_prompt=False, continue_final_message=True
    )
    client = llm._client
    assert plain.prompt_token_ids == client.tokenize(turns)
    assert going_on.prompt_token_ids == client.tokenize(
        turns, add_generation_prompt=False, continue_final_message=True
    )
    assert going_on.prompt_token_ids != plain.prompt_token_ids
    assert client.generate(turns, PARAMS, add_generation_prompt=False).prompt_token_ids == (
        client.tokenize(turns, add_generation_prompt=False)
    )


def test_metrics_tell_when_what_happened(llm):
    before = time.time()
    (output,) = llm.generate("a text", PARAMS, use_tqdm=False)
    metrics = output.metrics
    assert before <= metrics.arrival_time <= metrics.first_token_time
    assert metrics.first_token_time <= metrics.finished_time <= time.time()


def test_cumulative_logprob_is_the_sum_of_the_tokens_own(llm):
    params = SamplingParams(max_tokens=8, seed=1, logprobs=2)
    (output,) = llm.generate("a text", params, use_tqdm=False)
    (answer,) = output.outputs
    own = [each[token] for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in own))
    (without,) = llm.generate("a text", PARAMS, use_tqdm=False)
    assert without.outputs[0].cumulative_logprob is None


def test_the_tokenizer_is_the_models(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("a text") == llm._client.tokenize("a text")
    assert tokenizer.decode([5, 6, 7]) == llm._client.detokenize([5, 6, 7])


def test_the_tokenizer_is_the_files_where_transformers_builds_another(tmp_path):
    """As the server's is: GPT-2's class knows of no single digits."""
    ids = {token: at for at, token in enumerate(["<|endoftext|>", *sorted(ByteLevel.alphabet())])}
    file = Tokenizer(models.BPE({**ids, "12": len(ids)}, [("1", "2")]))
    steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    file.pre_tokenizer = pre_tokenizers.Sequence(steps)
    file.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    llm = object.__new__(LLM)
    llm._client = SimpleNamespace(model=SimpleNamespace(path=str(tmp_path)))
    llm._download_dir, llm._trust_remote_code = None, False
    assert llm.get_tokenizer().encode("12") == [ids["1"], ids["2"]]


def test_the_bar_may_be_anothers(llm):
    made = []

    class Bar(tqdm):
        def __init__(self, *args, **options):
            made.append(options)
            super().__init__(*args, **options)

    llm.generate(["a", "b"], PARAMS, use_tqdm=Bar)
    assert [options["total"] for options in made] == [2]


def test_logprobs_and_stops_come_through(llm):
    (plain,) = llm.generate("a text", PARAMS, use_tqdm=False)
    stop = plain.outputs[0].text[3:5]
    params = SamplingParams(temperature=0, max_tokens=8, stop=stop, logprobs=2)
    (output,) = llm.generate("a text", params, use_tqdm=False)
    (answer,) = output.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert plain.outputs[0].text.startswith(answer.text)
    assert len(answer.logprobs) == len(answer.token_ids)


def test_chat_takes_one_conversation_or_many(llm):
    first = [{"role": "user", "content": "What is a list?"}]
    second = [ChatMessage("user", "What is a dict?")]
    (one,) = llm.chat(first, PARAMS, use_tqdm=False)
    both = llm.chat([first, second], PARAMS, use_tqdm=False)
    assert both[0].outputs == one.outputs
    assert both[0].prompt_token_ids != both[1].prompt_token_ids
    assert both[0].prompt is None


def test_progress_goes_to_standard_error(llm, capsys):
    llm.generate(["a", "b", "c"], PARAMS)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "output tok/s" in shown.err
    llm.generate(["a", "b", "c"], PARAMS, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (["good", [2**31]], PARAMS, "prompt_token_ids"),  # known before anything is sent
        (["good", "far " * 6000], PARAMS, "prompt"),  # known to the worker
        (["good"], messages.SamplingParams(top_p=7), "top_p"),
        (["good", "good"], [PARAMS], "sampling_params"),
        (["good"], messages.SamplingParams(stream_interval=0), "stream_interval"),
        (["good"], [{"max_tokens": 3}], "sampling_params"),
        (["good", 3.5], PARAMS, "prompt"),
        ("good", messages.SamplingParams(temperature=math.nan), "temperature"),
        (5, PARAMS, "prompts"),
        (None, PARAMS, "prompts"),
        ((text for text in ["good"]), PARAMS, "prompts"),
        ({"prompts": "good"}, PARAMS, "prompt"),
        ({"prompt": 5}, PARAMS, "prompt"),
        ({"prompt": "good", "multi_modal_data": {}}, PARAMS, "prompt"),
        ([{"prompt_token_ids": []}], PARAMS, "prompt"),
        ([{"prompt_token_ids": ["x"]}], PARAMS, "prompt_token_ids"),
    ],
)
def test_a_prompt_that_cannot_be_taken_raises(llm, prompts, params, field):
    with pytest.raises(BadRequestError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.field == field
    assert len(llm.generate("still there", PARAMS, use_tqdm=False)) == 1


def test_wrong_settings_raise_before_anything_starts():
    with pytest.raises(BadRequestError, match="block_size: got 0"):
        LLM("simulated:", block_size=0)


@pytest.mark.process
def test_a_stack_that_ends_under_a_batch_is_told_at_once(monkeypatch):
    with LLM("simulated:step_ms=20", max_restarts=0) as llm:
        # the client by itself would wait for longer than this test does
        [session] = llm._client._io._cluster._alone.links
        monkeypatch.setattr(session, "timeout_s", 10 * PATIENCE_S)

        def kill_once_it_works():
            with llm._stack.client() as client:
                next(client.stream("anybody there?"))
                os.kill(llm._stack.pids["worker"], signal.SIGKILL)

        killer = threading.Thread(target=kill_once_it_works, daemon=True)
        killer.start()
        begin = time.monotonic()
        with pytest.raises(StackError, match="the stack ended"):
            llm.generate(["anybody there?"] * 4, SamplingParams(max_tokens=2000), use_tqdm=False)
        assert time.monotonic() - begin < PATIENCE_S
        killer.join(PATIENCE_S)
        with pytest.raises(StackError):
            llm.generate("and now?", PARAMS, use_tqdm=False)
    with pytest.raises(ClosedError):
        llm.generate("closed", PARAMS, use_tqdm=False)


def test_the_start_is_shown_on_standard_error(capsys):
    with LLM("simulated:step_ms=1"):
        shown = capsys.readouterr()
    begin, end = shown.err.splitlines()
    assert (shown.out, begin) == ("", "starting simulated:step_ms=1 ...")
    assert end.startswith("started simulated:step_ms=1: ready after ")
