"""Log-probabilities of prompts, and more than 20 of them, by a real stack and a real model, against
transformers' own logits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.helpers.stacks import spareless_stack
from transformers import AutoModelForCausalLM

from slipstream import (
    AsyncStreams,
    BadRequestError,
    Client,
    SamplingParams,
    Stack,
    Streams,
)
from slipstream.demo_model import MODEL_PATH
from slipstream.outputs import PromptTokenLogprobs, TokenLogprobs
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.validation.sampling_params import MAX_LOGPROB_BYTES, MAX_STOP_CHARS
from slipstream_lab.models import tiny_models
from slipstream_lab.models.stand_in_tokenizer import stand_in_tokenizer

pytestmark = pytest.mark.process

TOLERANCE = 2e-4
IDS = np.random.default_rng(7).integers(300, 2000, 700).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    options = {"max_logprobs": -1, "max_num_batched_tokens": 96, "num_blocks": 200}
    with spareless_stack(**options) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


def expected(model: Any, token_ids: list[int]) -> npt.NDArray[np.float32]:
    """What follows each token: [len, vocab], natural logarithm."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    found: npt.NDArray[np.float32] = torch.log_softmax(logits.float(), -1).numpy()
    return found


def check_token(found: TokenLogprobs, token_id: int, k: int, truth: npt.NDArray[Any]) -> None:
    """One position's candidates against the truth of all tokens there."""
    assert next(iter(found.values())).token_id == token_id
    ids = np.array(list(found))
    assert ids.tolist() == [candidate.token_id for candidate in found.values()]
    values = np.array([candidate.logprob for candidate in found.values()])
    np.testing.assert_allclose(values, truth[ids], atol=TOLERANCE, rtol=0)
    ranks = np.array([candidate.rank for candidate in found.values()])
    # they may differ only where values are as good as equal
    ascending = np.sort(truth)
    assert (ranks > len(truth) - ascending.searchsorted(truth[ids] + TOLERANCE, "right")).all()
    assert (ranks <= len(truth) - ascending.searchsorted(truth[ids] - TOLERANCE)).all()
    assert np.sort(ranks)[:k].tolist() == list(range(1, k + 1))
    assert len(found) in (k, k + 1)


def check_prompt(model: Any, ids: list[int], k: int, found: PromptTokenLogprobs | None) -> None:
    assert found is not None
    assert len(found) == len(ids)
    assert found[0] is None
    truth = expected(model, ids)
    for position in range(1, len(ids)):
        entry = found[position]
        assert entry is not None
        check_token(entry, ids[position], k, truth[position - 1])


@pytest.mark.parametrize("num_tokens", [1, 2, 33, 97, 400])
def test_a_prompts_log_probabilities_are_transformers_own(
    client: Client, model: Any, num_tokens: int
) -> None:
    ids = IDS[:num_tokens]  # longer ones in chunks
    answer = client.generate(ids, temperature=0, max_tokens=3, prompt_logprobs=4)
    check_prompt(model, ids, 4, answer.prompt_logprobs)
    assert answer.logprobs is None


def test_they_are_none_unless_they_are_asked_for(client: Client) -> None:
    answer = client.generate(IDS[:9], temperature=0, max_tokens=2, logprobs=1)
    assert answer.prompt_logprobs is None


def test_what_is_cached_is_computed_again(client: Client, model: Any) -> None:
    ids = IDS[:200]
    first = client.generate(ids, temperature=0, max_tokens=4)
    again = client.generate(ids, temperature=0, max_tokens=4, prompt_logprobs=0)
    check_prompt(model, ids, 0, again.prompt_logprobs)
    assert again.token_ids == first.token_ids
    third = client.generate(ids, temperature=0, max_tokens=4)
    assert third.token_ids == first.token_ids


def test_in_a_batch_each_gets_its_own(client: Client, model: Any) -> None:
    asked: list[tuple[list[int], int | None]] = []
    for index in range(12):
        ids = IDS[index : index + 5 + 13 * (index % 9)]
        asked.append((ids, None if index % 4 == 3 else index % 6))
    params = [
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=k, logprobs=k) for _, k in asked
    ]
    answers = client.generate_many([ids for ids, _ in asked], params)
    for (ids, k), answer in zip(asked, answers, strict=True):
        if k is None:
            assert answer.prompt_logprobs is None
            continue
        check_prompt(model, ids, k, answer.prompt_logprobs)
        check_outputs(model, ids, answer.token_ids, k, answer.logprobs)


def check_outputs(
    model: Any, ids: list[int], outputs: list[int], k: int, found: list[TokenLogprobs] | None
) -> None:
    assert found is not None
    assert len(found) == len(outputs)
    truth = expected(model, ids + outputs)[len(ids) - 1 :]
    for entry, token_id, here in zip(found, outputs, truth, strict=False):
        check_token(entry, token_id, k, here)


def test_several_answers_share_their_prompts(client: Client, model: Any) -> None:
    ids = IDS[:20]
    answer = client.generate(ids, max_tokens=3, seed=1, n=3, prompt_logprobs=2)
    for each in answer.choices:
        check_prompt(model, ids, 2, each.prompt_logprobs)


def test_streams_that_are_read_together_have_them_too(
    stack: Stack, client: Client, model: Any
) -> None:
    asked = [(IDS[:9], 2, 2), (IDS[5:60], None, 1), (IDS[3:30], 1, 3)]
    params = [SamplingParams(max_tokens=3, seed=1, n=n, prompt_logprobs=k) for _, k, n in asked]
    prompts = [ids for ids, _, _ in asked]

    def check(streams: Streams | AsyncStreams) -> None:
        index = 0
        for ids, k, n in asked:
            for _ in range(n):
                found = streams.prompt_logprobs(index)
                if k is None:
                    assert found is None
                else:
                    check_prompt(model, ids, k, found)
                index += 1
        with pytest.raises(IndexError):
            streams.prompt_logprobs(index)

    streams = client.stream_many(prompts, params)
    seen = set()
    for index, _ in streams:
        if index in (0, 3) and index not in seen:  # first answers: there with the first delta
            assert streams.prompt_logprobs(index) is not None
        seen.add(index)
    assert seen == set(range(6))
    check(streams)

    async def main() -> None:
        async with stack.async_client() as one:
            found = one.stream_many(prompts, params)
            async for _ in found:
                pass
            check(found)

    asyncio.run(main())


def test_after_preemption_nothing_is_lost_or_doubled(client: Client, model: Any) -> None:
    # 200 blocks of 16 tokens: not all of them fit at their longest
    prompts = [IDS[start : start + 330] for start in range(0, 300, 30)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    for ids, answer in zip(prompts, client.generate_many(prompts, params), strict=True):
        check_prompt(model, ids, 1, answer.prompt_logprobs)
        assert len(answer.token_ids) == 40


@pytest.mark.parametrize("k", [21, 63, 64, 300, -1])
def test_more_than_20(client: Client, model: Any, k: int) -> None:
    ids = IDS[:12]
    num = client.model.vocab_size if k < 0 else k
    answer = client.generate(ids, temperature=0, max_tokens=6, logprobs=k, prompt_logprobs=k)
    check_prompt(model, ids, num, answer.prompt_logprobs)
    check_outputs(model, ids, answer.token_ids, num, answer.logprobs)


def test_wide_and_narrow_run_together(client: Client, model: Any) -> None:
    wanted = [None, 3, -1, 0, 100, -1, 20, None, 70]
    params = [SamplingParams(temperature=0, max_tokens=40, logprobs=k) for k in wanted]
    prompts = [IDS[index : index + 9] for index in range(len(wanted))]
    answers = client.generate_many(prompts, params)
    for ids, k, answer in zip(prompts, wanted, answers, strict=True):
        if k is None:
            assert answer.logprobs is None
        else:
            num = client.model.vocab_size if k < 0 else k
            check_outputs(model, ids, answer.token_ids, num, answer.logprobs)


def test_they_are_there_with_the_first_delta(client: Client, model: Any) -> None:
    ids = IDS[:150]
    with client.stream(ids, temperature=0, max_tokens=4, prompt_logprobs=2) as stream:
        next(stream)
        check_prompt(model, ids, 2, stream.prompt_logprobs)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_what_would_take_too_much_memory_is_refused_by_name(field: str) -> None:
    model = "simulated:step_ms=0,prefill_us=0,vocab_size=32000"
    with spareless_stack(model, max_logprobs=-1) as stack, stack.client() as client:
        num = MAX_LOGPROB_BYTES // (8 * 32001)
        ids, too_many = IDS[: num + 1], IDS[: num + 2]
        most = 1 if field == "prompt_logprobs" else num
        answer = client.generate(ids, max_tokens=most, **{field: -1})
        assert answer.num_tokens == most  # their millions of candidates are not looked at
        for prompt in (too_many, " ".join(["and"] * 2 * num)):  # the client says so, or the server
            with pytest.raises(BadRequestError, match=field) as caught:
                client.generate(prompt, max_tokens=most + 1, **{field: -1})
            assert caught.value.fault.field == field


def test_what_a_stop_string_held_back_leaves_in_several_messages(
    client: Client, model: Any
) -> None:
    """All of it is released at the end, and is more than a message may have (16 MiB)."""
    ids = client.tokenize("a", add_special_tokens=False)
    num = 1 + MAX_MESSAGE_BYTES // (8 * (1 + model.config.vocab_size))
    assert num < MAX_STOP_CHARS
    with client.stream(
        IDS[:4],
        max_tokens=num,
        logprobs=-1,
        allowed_token_ids=ids[-1:],
        ignore_eos=True,
        stop=["a" * num + "b"],
    ) as deltas:
        parts = list(deltas)
    assert "".join(part.text for part in parts) == "a" * num
    assert sum(len(part.token_ids) for part in parts) == num
    assert sum(len(part.logprobs or ()) for part in parts) == num
    assert parts[-1].finish_reason == "length"


@pytest.mark.parametrize("role", ["core", "worker"])
def test_they_survive_the_death_of_a_process(
    stack: Stack, client: Client, model: Any, role: str
) -> None:
    ids = IDS[:600]
    options = {"temperature": 0, "max_tokens": 300, "ignore_eos": True, "prompt_logprobs": 3}
    whole = client.generate(ids, **options)
    with client.stream(ids, **options) as stream:
        kill(stack, role)  # while its prompt is computed, or soon after
        token_ids = [token_id for delta in stream for token_id in delta.token_ids]
        check_prompt(model, ids, 3, stream.prompt_logprobs)
    assert token_ids == whole.token_ids
    with client.stream(ids, **options) as stream:
        token_ids = next(stream).token_ids
        before = stream.prompt_logprobs
        kill(stack, role)
        for delta in stream:
            token_ids += delta.token_ids
        assert stream.prompt_logprobs == before
    assert token_ids == whole.token_ids
    check_prompt(model, ids, 3, before)


def kill(stack: Stack, role: str) -> None:
    """For real."""
    os.kill(stack.pids[role], signal.SIGKILL)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_the_server_says_how_many_there_may_be(field: str) -> None:
    with spareless_stack("simulated:step_ms=0") as stack, stack.client() as client:
        assert client.model.max_logprobs == 20
        for wanted in (21, -1):
            with pytest.raises(BadRequestError, match=f"{field}.*max_logprobs") as caught:
                client.generate("x", **{field: wanted})
            assert caught.value.fault.field == field
        assert client.generate("x", max_tokens=1, **{field: 20}).num_tokens == 1


@pytest.mark.parametrize("num", [3, 128], ids=["few", "more than are paged"])
def test_listed_ids_are_scored_as_by_the_model(client: Client, model: Any, num: int) -> None:
    """At each position, beside requests that ask for the likeliest ones, or for nothing."""
    listed = [5 * n for n in range(num)]
    prompts = [IDS[:40], IDS[:40], IDS[100:150], IDS[200:220]]
    params = [
        SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0, **more})
        for more in (
            {"logprob_token_ids": listed},
            {"logprobs": 4},
            {"logprob_token_ids": listed[::-1], "logprobs": num, "temperature": 1, "seed": 3},
            {},
        )
    ]
    scored, likeliest, drawn, plain = client.generate_many(
        [{"prompt_token_ids": prompt} for prompt in prompts], params
    )
    assert scored.token_ids == likeliest.token_ids
    assert plain.logprobs is None
    for prompt, answer, ids in ((prompts[0], scored, listed), (prompts[2], drawn, listed[::-1])):
        assert answer.logprobs is not None
        values = expected(model, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        for own, entry, of_position in zip(answer.token_ids, answer.logprobs, values, strict=True):
            assert list(entry) == [own, *(each for each in ids if each != own)]
            for token_id, candidate in entry.items():
                assert candidate.logprob == pytest.approx(of_position[token_id], abs=TOLERANCE)
            for place, token_id in enumerate(ids, 1):
                assert entry[token_id].rank == place


def test_a_model_with_recurrent_states_has_them_with_and_without_its_cache(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == "LFM2")
    tiny_models.save(tiny, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = np.random.default_rng(3).integers(3, tiny_models.VOCAB_SIZE, 40).tolist()
    options: dict[str, Any] = {
        "model": str(tmp_path),
        "tokenizer": str(stand_in_tokenizer(tmp_path, 300)),
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "device": "cpu",
        "threads": 1,
    }
    with spareless_stack(**options) as stack, stack.client() as client:
        first = client.generate(ids, temperature=0, max_tokens=6)
        scored = client.generate(ids, temperature=0, max_tokens=6, prompt_logprobs=2)
        cached = client.generate(ids, temperature=0, max_tokens=6, logprobs=2)
        several = client.generate(ids, max_tokens=6, seed=5, n=3, prompt_logprobs=1)
        alone = client.generate(ids, max_tokens=6, seed=5)
    assert first.token_ids == scored.token_ids == cached.token_ids
    assert (first.num_cached_tokens, cached.num_cached_tokens) == (0, 36)
    check_prompt(model, ids, 2, scored.prompt_logprobs)
    check_outputs(model, ids, cached.token_ids, 2, cached.logprobs)
    assert several.choices[0].token_ids == alone.token_ids
    for each in several.choices:
        check_prompt(model, ids, 1, each.prompt_logprobs)
