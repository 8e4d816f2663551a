"""Streams with grammars in a core: the same whatever runs beside them, and whatever dies."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from tests.helpers.admits import with_fields
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.grammar.trial_client import GrammarTrial
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, End, SamplingParams, StructuredOutputs, Withdraw

pytestmark = pytest.mark.process

END = 1  # the simulated model has no end of its own
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
MODEL = f"simulated:step_ms=0,prefill_us=0,tokenizer={MODEL_PATH},mode=chain"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["star", "planet"]},
        "mass": {"type": "integer", "minimum": 0, "maximum": 99999},
        "near": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["kind", "mass", "near"],
    "additionalProperties": False,
}
GRAMMARS = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex="([a-c]{2}-[0-9]{3};){8}"),
    StructuredOutputs(choice=("one thing", "another thing", "neither of these two")),
    StructuredOutputs(grammar='start: word{6}\nword: /[a-z]{2,9}/ " "'),
]
NOT_OVER_AT_ONCE = StructuredOutputs(regex="[a-z ]{200,}")
PROMPTS = [[n + 1, 5, 9 * n + 2, 7] for n in range(8)]


def ask(worker, n: int, max_tokens: int = 150, **fields):
    grammar = fields.pop("grammar", GRAMMARS[n % len(GRAMMARS)])
    params = SamplingParams(temperature=1.0, structured_outputs=grammar)
    fields = {"params": params, "seed": n, "stop_token_ids": (END,), **fields}
    return worker.admit(PROMPTS[n % len(PROMPTS)], max_tokens, **fields)


def answer_of(it) -> list[int]:
    """A stream's tokens up to its end, as its worker would cut them."""
    ids = it.token_ids
    return ids[: ids.index(END)] if END in ids else ids


def is_done(it) -> bool:
    return it.is_over or END in it.token_ids


def keeps_to_its_grammar(it) -> bool:
    text = TOKENIZER.decode(answer_of(it))
    grammar = it.admit.spec.params.structured_outputs
    if grammar.json is not None:
        value = json.loads(text)
        return value["kind"] in ("star", "planet") and len(value["near"]) in (2, 3, 4)
    if grammar.choice is not None:
        return text in grammar.choice
    return re.fullmatch(grammar.regex or "([a-z]{2,9} ){6}", text) is not None


@pytest.fixture
def alone(make_core):
    """The answer to a registration that nothing runs beside and nothing disturbs."""

    def run(admit: Admit) -> list[int]:
        box = make_core(model=MODEL)
        worker = box.worker()
        it = worker.send_admit(with_fields(admit, output_ids=b"", was_accepted=False))
        box.until(lambda: is_done(it))
        assert it.fault is None
        return answer_of(it)

    return run


def test_a_batch_changes_nobodys_answer(make_core, alone) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    plain = [worker.admit(prompt, 100) for prompt in PROMPTS[:4]]
    held = [ask(worker, n) for n in range(8)]
    box.until(lambda: all(is_done(it) for it in held) and all(it.is_over for it in plain))
    for it in held:
        assert keeps_to_its_grammar(it)
        assert answer_of(it) == alone(it.admit)
    assert max(box.runner.num_in_flight) == 2  # one step ahead all the same


def test_after_its_end_a_stream_says_nothing_else(make_core) -> None:
    box = make_core(model=MODEL)
    it = ask(box.worker(), 2, max_tokens=60)
    box.until(lambda: it.is_over)
    assert set(it.token_ids[it.token_ids.index(END) :]) == {END}


def test_preemption_changes_nobodys_answer(make_core, alone) -> None:
    box = make_core(model=MODEL, num_blocks=18, max_model_len=256, block_size=16)
    worker = box.worker()
    held = [ask(worker, n, max_tokens=100) for n in range(8)]
    box.until(lambda: all(it.is_over for it in held))
    assert box.core.scheduler.num_preemptions > 0
    for it in held:
        assert answer_of(it) == alone(it.admit)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 12])
def test_a_core_that_died_is_told_everything_again(make_core, alone, num_tokens) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [ask(worker, n) for n in range(4)]
    box.until(lambda: all(len(it.token_ids) >= num_tokens for it in held))
    box.kill()
    box.start()
    box.until(lambda: all(is_done(it) for it in held))
    for it in held:
        assert keeps_to_its_grammar(it)
        assert answer_of(it) == alone(it.admit)


def test_a_worker_that_died_is_nothing_to_a_grammar(make_core, alone) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    asked = [ask(worker, n) for n in range(4)]
    box.until(lambda: all(len(it.token_ids) >= 4 for it in asked))
    box.kill_worker(worker)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced)
    held = [fresh.streams[it.admit.stream_id] for it in asked]
    box.until(lambda: all(is_done(it) for it in held))
    for it in held:
        assert answer_of(it) == alone(it.admit)


def test_what_does_not_compile_is_refused_before_admission(make_core) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    bad = ask(worker, 0, grammar=StructuredOutputs(regex="(a"))
    good = ask(worker, 1)
    box.until(lambda: bad.is_over and is_done(good))
    assert bad.num_admitted == 0
    assert bad.fault.code == "bad_request"
    assert bad.fault.field == "structured_outputs"
    assert "structured_outputs.regex" in bad.fault.message
    assert "unclosed group" in bad.fault.message
    assert box.core.handler.num_streams == 1


def test_a_grammar_that_would_end_the_core_ends_its_own_request(make_core, alone) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    chain = "".join(f"a{i}: a{i + 1}\n" for i in range(4000)) + 'a4000: "x"'
    bad = [ask(worker, n, grammar=StructuredOutputs(grammar=f"start: a0\n{chain}")) for n in (0, 0)]
    good = ask(worker, 1)
    box.until(lambda: all(it.is_over for it in bad) and is_done(good))
    assert {it.fault.code for it in bad} == {"bad_request"}
    assert {it.fault.field for it in bad} == {"structured_outputs"}
    assert answer_of(good) == alone(good.admit)


def test_a_refusal_is_kept_for_the_other_answers_of_its_request(make_core, monkeypatch) -> None:
    asked = []
    ask_once = GrammarTrial.ask
    monkeypatch.setattr(
        GrammarTrial, "ask", lambda self, *it: [asked.append(it), ask_once(self, *it)][1]
    )
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [ask(worker, 0, grammar=StructuredOutputs(regex="(a")) for _ in range(4)]
    box.until(lambda: all(it.is_over for it in held))
    assert len(asked) == 1
    assert {it.fault.message for it in held} == {held[0].fault.message}


def test_a_model_without_a_tokenizer_refuses_grammars(make_core) -> None:
    box = make_core()
    it = ask(box.worker(), 0)
    box.until(lambda: it.is_over)
    assert it.fault.code == "bad_request"
    assert "not supported for this model" in it.fault.message


def test_a_stream_that_could_not_end_is_refused(make_core) -> None:
    box = make_core(model=MODEL)
    it = ask(box.worker(), 0, stop_token_ids=())
    box.until(lambda: it.is_over)
    assert (it.fault.code, it.fault.field) == ("bad_request", "structured_outputs")


def test_outputs_that_the_grammar_does_not_allow_end_the_stream(make_core) -> None:
    box = make_core(model=MODEL)
    outputs = pack_u32(TOKENIZER.encode("something else").ids)
    it = ask(box.worker(), 2, output_ids=outputs, was_accepted=True)
    box.until(lambda: it.is_over)
    assert it.fault.code == "diverged"
    assert "does not allow" in it.fault.message


def test_outputs_up_to_an_end_are_taken_as_they_are(make_core) -> None:
    box = make_core(model=MODEL)
    outputs = [*TOKENIZER.encode("one thing").ids, END]
    it = ask(box.worker(), 2, 20, output_ids=pack_u32(outputs), was_accepted=True)
    box.until(lambda: it.is_over)
    assert it.fault is None
    assert set(it.token_ids[len(outputs) :]) == {END}


def test_who_leaves_while_his_grammar_compiles_is_gone(make_core) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    left, stays = ask(worker, 0), ask(worker, 1)
    worker.send(Withdraw(left.admit.stream_id, End("abort", 0)))
    box.until(lambda: is_done(stays))
    assert left.num_admitted == 0
    assert box.core.handler.num_streams == 1


def test_the_same_again_while_it_compiles_is_one_stream_other_content_a_conflict(
    make_core, alone
) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    it = ask(worker, 1)
    worker.send(it.admit)
    box.until(lambda: is_done(it))
    assert answer_of(it) == alone(it.admit)
    other = ask(worker, 2)
    worker.send(with_fields(other.admit, seed=77))
    box.until(lambda: other.fault is not None)
    assert other.fault.code == "conflict"


def test_a_step_that_fails_ends_only_who_fails_alone(make_core, alone) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [ask(worker, n) for n in range(4)]
    box.until(lambda: all(len(it.token_ids) >= 3 for it in held))
    doomed = held[1]
    box.runner.fails = lambda ids: doomed.admit.stream_id in ids
    box.until(lambda: doomed.is_over and all(is_done(it) for it in held if it is not doomed))
    assert doomed.fault.code == "engine"
    for it in held:
        if it is not doomed:
            assert answer_of(it) == alone(it.admit)


def test_a_grammar_that_breaks_ends_its_stream_alone(make_core, alone, monkeypatch) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    broken = ask(worker, 3, grammar=NOT_OVER_AT_ONCE)
    held = [*(ask(worker, n) for n in range(3)), broken]
    # not for the others, whose grammars may take longer to compile than this answer to end
    box.until(lambda: len(broken.token_ids) >= 3)
    grammars = box.core.handler._manager._grammars
    state = grammars._rows[broken.row].matcher
    monkeypatch.setattr(state, "_matcher", None, raising=False)
    box.until(lambda: broken.is_over and all(is_done(it) for it in held if it is not broken))
    assert broken.fault.code == "engine"
    assert broken.fault.message.startswith("structured_outputs: ")
    for it in held[:3]:
        assert answer_of(it) == alone(it.admit)


def use_up_credit(box, worker, it, *, outputs: int = 3) -> None:
    """Until the core has tokens of a stream for which its worker has given no credit."""
    box.until(lambda: len(it.token_ids) >= outputs)
    worker.is_reading = False
    [session] = box.core.handler._acceptor.sessions
    box.until(lambda: not session.link.has_credit)
    for _ in range(3):
        box.step()
    assert len(history_of(box, it)) > len(it.token_ids)


def history_of(box, it) -> list[int]:
    begin = len(it.admit.prompt_ids) // 4
    tokens = box.core.tokens
    return tokens.read(it.row, begin, tokens.length(it.row)).tolist()


def break_grammar(box, it, monkeypatch) -> None:
    """The grammar of a stream breaks, whose end the core then has."""
    manager = box.core.handler._manager
    monkeypatch.setattr(manager._grammars._rows[it.row].matcher, "_matcher", None, raising=False)
    box.until(lambda: manager._streams.at(it.row).is_over)


def test_an_error_comes_behind_the_tokens_before_it(make_core, monkeypatch) -> None:
    """Also where the worker has no credit for them."""
    box = make_core(model=MODEL)
    worker = box.worker()
    it = ask(worker, 3, 200, grammar=NOT_OVER_AT_ONCE)
    use_up_credit(box, worker, it)
    break_grammar(box, it, monkeypatch)
    worker.is_reading = True
    box.until(lambda: it.is_over)
    assert it.token_ids == history_of(box, it)
    assert it.fault.message.startswith("structured_outputs: ")


def test_a_step_that_fails_ends_its_stream_behind_its_tokens(make_core) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 200)
    use_up_credit(box, worker, it)
    box.runner.fails = lambda ids: it.admit.stream_id in ids
    box.until(lambda: box.core.handler._manager._streams.at(it.row).is_over)
    worker.is_reading = True
    box.until(lambda: it.is_over)
    assert it.token_ids == history_of(box, it)
    assert it.fault.code == "engine"


def test_an_error_before_an_attach_comes_behind_the_tokens_after_it(make_core, monkeypatch) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    it = ask(worker, 3, 200, grammar=NOT_OVER_AT_ONCE)
    use_up_credit(box, worker, it, outputs=8)
    break_grammar(box, it, monkeypatch)
    it.token_ids = it.token_ids[:5]
    worker.hop.attach(time.monotonic())
    worker.is_reading = True
    box.until(lambda: it.is_over)
    assert it.token_ids == history_of(box, it)
    assert it.fault.message.startswith("structured_outputs: ")


def test_nothing_is_kept_of_streams_that_are_over(make_core) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [ask(worker, n) for n in range(4)]
    box.until(lambda: all(is_done(it) for it in held))
    for it in held:
        worker.forget(it)
    box.until(lambda: box.core.handler.num_streams == 0)
    assert len(box.core.handler._manager._grammars) == 0
    assert not np.any(box.core.scheduler._requests.may_need_mask)
    assert box.core.scheduler._requests._num_with_masks == 0


def test_no_grammar_no_library(make_core) -> None:
    import subprocess
    import sys

    code = "import sys, slipstream_core.main; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    box = make_core(model=MODEL)
    it = box.worker().admit(PROMPTS[0], 20)
    box.until(lambda: it.is_over)
    assert box.core.compiler._thread is None
