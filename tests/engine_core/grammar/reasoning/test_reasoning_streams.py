"""Streams that reason, in a core: the same whatever runs beside them, and whatever dies."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.helpers.admits import admit_of, with_fields
from tests.helpers.core_box import CoreBox, Held
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.grammar.reasoning.reasoning_state import Allowed, ReasoningState
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Admit,
    ReasoningIds,
    ReasoningSequences,
    SamplingParams,
    StructuredOutputs,
)

pytestmark = pytest.mark.process

END = 1  # the simulated model has no end of its own
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
MODEL = f"simulated:step_ms=0,prefill_us=0,tokenizer={MODEL_PATH},mode=chain"
BEGIN, ENDS = 4, (3, 2)  # special ids, which are sampled only where a mask allows them
TEXT = 107  # an id that is sampled freely, too
BEGIN_TAG, END_TAG = (4, TEXT, 2), (3, TEXT, 2)
GRAMMAR = StructuredOutputs(regex="([a-c]{2}-[0-9]{3};){8}")
PROMPTS = [[n + 6, 5, 9 * n + 7, 7] for n in range(8)]
SHORT = "simulated:step_ms=0,prefill_us=0,vocab_size=12,mode=chain"  # all ids, often


def ids_of(start: str = "reasoning", **ids: Any) -> ReasoningIds:
    return ReasoningIds(start, **{"begins": (BEGIN,), "ends": ENDS, **ids})  # type: ignore[arg-type]


def tags_of(start: str = "reasoning", **tags: Any) -> ReasoningIds:
    """Delimiters of several ids."""
    tags = {"begins": (BEGIN_TAG,), "ends": (END_TAG,), **tags}
    return ids_of(start, begins=(), ends=(), sequences=ReasoningSequences(**tags))


both_delimiters = pytest.mark.parametrize("made", [ids_of, tags_of])


def find(ids: list[int], part: Sequence[int]) -> int:
    """Where this stands first; the length if nowhere."""
    places = range(len(ids) - len(part) + 1)
    return next((at for at in places if ids[at : at + len(part)] == [*part]), len(ids))


def end_of(it: Held) -> tuple[int, ...]:
    """What is written where its reasoning has to end."""
    assert it.admit.derived.reasoning is not None
    return it.admit.derived.reasoning.forced_end


def ask(worker: Any, n: int, max_tokens: int = 60, **fields: Any) -> Held:
    """budget, grammar, reasoning: as in its SamplingParams and its Admit."""
    params = SamplingParams(
        temperature=1.0,
        structured_outputs=fields.pop("grammar", None),
        thinking_token_budget=fields.pop("budget", None),
        presence_penalty=fields.pop("presence_penalty", 0.0),
    )
    held: Held = worker.admit(
        PROMPTS[n % len(PROMPTS)],
        max_tokens,
        **{"params": params, "seed": n, "stop_token_ids": (END,), "reasoning": ids_of(), **fields},
    )
    return held


def answer_of(it: Held) -> list[int]:
    ids = it.token_ids
    return ids[: ids.index(END)] if END in ids else ids


def is_done(it: Held) -> bool:
    return it.is_over or END in it.token_ids


def grammars_of(box: CoreBox) -> GrammarBitmasks:
    return box.core.handler._manager._grammars


@pytest.fixture
def alone(make_core: Callable[..., CoreBox]) -> Callable[[Admit], list[int]]:
    """The answer to a registration that nothing runs beside and nothing disturbs."""
    box = make_core(model=MODEL)
    worker = box.worker()

    def run(admit: Admit) -> list[int]:
        fresh = {"stream_id": secrets.token_bytes(16), "output_ids": b"", "was_accepted": False}
        it = worker.send_admit(with_fields(admit, **fresh))
        box.until(lambda: is_done(it))
        assert it.fault is None
        return answer_of(it)

    return run


def check(it: Held, free: list[int]) -> None:
    """Check an answer against `free`, that of the same request without budget and grammar."""
    answer, budget = answer_of(it), it.admit.spec.params.thinking_token_budget
    own_end, delimiter = find(free, end_of(it)), end_of(it)
    end = own_end if budget is None else min(own_end, budget)
    assert answer[:end] == free[:end]
    if end < len(answer) and end < own_end:
        forced = answer[end : end + len(delimiter)]
        assert forced == [*delimiter[: len(forced)]]
    if it.admit.spec.params.structured_outputs is not None:
        text = TOKENIZER.decode(answer[end + len(delimiter) :])
        assert re.fullmatch(GRAMMAR.regex, text), text


@both_delimiters
@pytest.mark.parametrize("budget", [0, 1, 2, 7, 58, 59, 60, 100])
def test_reasoning_ends_where_its_budget_is_spent(
    make_core: Any, alone: Any, budget: int, made: Any
) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    others = [worker.admit(PROMPTS[n], 80) for n in range(3)]
    held = [ask(worker, n, budget=budget, reasoning=made()) for n in range(4)]
    box.until(lambda: all(it.is_over for it in [*held, *others]))
    for it in held:
        free = alone(with_fields(it.admit, params=SamplingParams(temperature=1.0)))
        check(it, free)
        assert it.token_ids.count(end_of(it)[0]) == (budget < 60)
        assert answer_of(it) == alone(it.admit)
    assert max(box.runner.num_in_flight) == 2  # one step ahead all the same
    assert grammars_of(box).num_filled == 0


@both_delimiters
def test_free_reasoning_fills_no_mask_and_its_grammar_applies_behind_it(
    make_core: Any, alone: Any, made: Any
) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [ask(worker, n, 150, budget=40, grammar=GRAMMAR, reasoning=made()) for n in range(4)]
    box.until(lambda: any(len(it.token_ids) >= 20 for it in held))
    assert grammars_of(box).num_filled == 0
    box.until(lambda: all(map(is_done, held)))
    # one for each token of the answers, and those that were in flight behind their ends
    num_before = 40 + len(made().forced_end)
    num_masks = sum(len(answer_of(it)) - num_before for it in held)
    assert 0 <= grammars_of(box).num_filled - num_masks <= 4
    for it in held:
        free = alone(with_fields(it.admit, params=SamplingParams(temperature=1.0)))
        check(it, free)
        assert answer_of(it) == alone(it.admit)


@pytest.mark.parametrize(
    ("made", "presence_penalty"), [(ids_of, 0.0), (ids_of, 1.0), (tags_of, 1.0)]
)
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3, 9, 10, 11, 12, 15])
def test_a_successor_forces_the_same(
    make_core: Any,
    alone: Any,
    num_tokens: int,
    has_grammar: bool,
    presence_penalty: float,
    made: Any,
) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    options: dict[str, Any] = {"grammar": GRAMMAR} if has_grammar else {}
    options["reasoning"] = made()
    options["presence_penalty"] = presence_penalty
    held = [ask(worker, n, 150, budget=10, **options) for n in range(3)]
    box.until(lambda: all(len(it.token_ids) >= num_tokens for it in held))
    box.kill()
    box.start()
    box.until(lambda: all(map(is_done, held)))
    for it in held:
        assert answer_of(it) == alone(it.admit)


@both_delimiters
def test_preemption_changes_nothing(make_core: Any, alone: Any, made: Any) -> None:
    box = make_core(model=MODEL, num_blocks=14, max_model_len=128, block_size=16)
    worker = box.worker()
    held = [ask(worker, n, 100, budget=5 * n, grammar=GRAMMAR, reasoning=made()) for n in range(8)]
    box.until(lambda: all(map(is_done, held)))
    assert box.core.scheduler.num_preemptions > 0
    for it in held:
        assert answer_of(it) == alone(it.admit)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("prefix", [True, False])
def test_reasoning_that_ends_by_itself_is_followed_by_the_grammar(
    make_core: Any, alone: Any, prefix: bool, num: int
) -> None:
    """What ends reasoning comes while the next token is in flight, without a mask."""
    box = make_core(model=MODEL, enable_prefix_caching=prefix, block_size=4)
    worker = box.worker()
    free = [alone(worker_admit(n)) for n in range(4)]
    # each stream ends its reasoning with ids that it samples anyway
    found = [tuple(each[5 + n : 5 + n + num]) for n, each in enumerate(free)]
    ends = [tags_of(ends=(each,)) if num > 1 else ids_of(ends=each) for each in found]
    held = [ask(worker, n, 150, grammar=GRAMMAR, reasoning=ids) for n, ids in enumerate(ends)]
    box.until(lambda: all(map(is_done, held)))
    for it, each in zip(held, free, strict=True):
        behind = find(each, end_of(it)) + num
        assert it.token_ids[:behind] == each[:behind]
        text = TOKENIZER.decode(answer_of(it)[behind:])
        assert re.fullmatch(GRAMMAR.regex, text), text
        assert answer_of(it) == alone(it.admit)


def worker_admit(n: int) -> Admit:
    return admit_of(
        bytes([n + 1]) * 16,
        pack_u32(PROMPTS[n]),
        SamplingParams(temperature=1.0),
        (END,),
        n,
        60,
    )


@both_delimiters
def test_an_answer_in_a_grammar_may_reason_first(make_core: Any, alone: Any, made: Any) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [
        ask(worker, n, 150, budget=6, grammar=GRAMMAR, reasoning=made("start")) for n in range(40)
    ]
    num = len(made().forced_end)
    box.until(lambda: all(map(is_done, held)))
    began = [it.token_ids[0] == BEGIN for it in held]
    assert any(began)
    assert not all(began)
    for it in held:
        answer = answer_of(it)
        if answer[0] == BEGIN:
            assert num == 1 or answer[:num] == [*BEGIN_TAG]
            assert answer[num + 6 :][:num] == [*made().forced_end]
            answer = answer[6 + 2 * num :]
        assert re.fullmatch(GRAMMAR.regex, TOKENIZER.decode(answer))
    for it in held[:6]:
        assert answer_of(it) == alone(it.admit)


@pytest.mark.parametrize("start", ["start", "border", "reasoning", "content"])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_of_tags_is_of_the_whole_answer(make_core: Any, start: str, budget: int) -> None:
    """Where all ids are sampled often, those of the tags in any order."""
    tags = {"begins": ((4, 5),), "ends": ((2, 3, 2), (2, 4)), "borders": ((10, 11),)}
    reasoning = structs.replace(tags_of(start, **tags), borders=(5, 6, 7, 8, 9))
    box = make_core(model=SHORT)
    worker = box.worker()
    params = SamplingParams(temperature=1.0, thinking_token_budget=budget)

    def ask_all() -> list[Held]:
        asked = [[n, 11 - n, n] for n in range(12)]
        return [
            worker.admit(prompt, 100, params=params, seed=n, reasoning=reasoning)
            for n, prompt in enumerate(asked)
        ]

    held = ask_all()
    box.until(lambda: all(it.is_over for it in held))
    num_forced = 0
    for it in held:
        state = ReasoningState(reasoning, budget, has_grammar=False)
        for index, token_id in enumerate(it.token_ids):
            if state.allowed_at(index) is Allowed.END:
                assert token_id == state.next_end
                num_forced += 1
            state.take(token_id, index)
    assert num_forced
    box.kill()
    box.start()
    again = ask_all()
    box.until(lambda: all(it.is_over for it in again))
    assert [it.token_ids for it in again] == [it.token_ids for it in held]


@pytest.mark.parametrize("start", ["start", "border", "reasoning", "content"])
@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_is_of_the_whole_answer(
    make_core: Any, alone: Any, start: str, budget: int
) -> None:
    """Where all ids are sampled often, the delimiters too: reasoning begins again and again."""
    ids = ids_of(start, ends=(2, 3), borders=(5,), blanks=(6, 7))
    box = make_core(model=SHORT)
    worker = box.worker()
    prompts = [[n, 11 - n, n] for n in range(12)]
    params = SamplingParams(temperature=1.0, thinking_token_budget=budget)
    held = [
        worker.admit(prompt, 100, params=params, seed=n, reasoning=ids)
        for n, prompt in enumerate(prompts)
    ]
    box.until(lambda: all(it.is_over for it in held))
    for it in held:
        place, left = start, budget
        for token_id in it.token_ids:
            if place == "reasoning" and left == 0:
                assert token_id == 2
            if place == "reasoning":
                left -= token_id not in (2, 3)
                place = "border" if token_id in (2, 3) else place
            elif place in ("start", "border"):
                stays = token_id in (2, 3, 5, 6, 7)
                place = "reasoning" if token_id == BEGIN else "border" if stays else "content"
            elif token_id == 5:
                place = "border"
        assert left >= 0
    box.kill()
    box.start()
    again = [
        worker.admit(prompt, 100, params=params, seed=n, reasoning=ids)
        for n, prompt in enumerate(prompts)
    ]
    box.until(lambda: all(it.is_over for it in again))
    assert [it.token_ids for it in again] == [it.token_ids for it in held]


def test_what_begins_as_reasoning_may_be_the_grammars(make_core: Any, alone: Any) -> None:
    """Its first tokens are allowed by both; the answers take either way."""
    box = make_core(model=SHORT.replace("vocab_size=12", f"tokenizer={MODEL_PATH}"))
    worker = box.worker()
    first, second, third = (TOKENIZER.encode(each).ids[0] for each in "abc")
    grammar = StructuredOutputs(regex="a(a|b)[a-c]{20}")
    tags = {"begins": ((first, second, third),), "ends": ((3, third, second, 2),)}
    held = [
        ask(worker, n, 150, budget=n % 5, grammar=grammar, reasoning=tags_of("start", **tags))
        for n in range(240)
    ]
    box.until(lambda: all(map(is_done, held)))
    num_reasoning = 0
    for it in held:
        answer, budget = answer_of(it), it.admit.spec.params.thinking_token_budget
        assert budget is not None
        if answer[:3] == [first, second, third]:
            num_reasoning += 1
            end = find(answer, end_of(it))
            assert end - 3 == budget
            answer = answer[end + 4 :]
        assert re.fullmatch("a(a|b)[a-c]{20}", TOKENIZER.decode(answer))
    assert 0 < num_reasoning < len(held)
    for it in held[:10]:
        assert answer_of(it) == alone(it.admit)


def test_where_a_grammar_decides_no_end_is_masked_beside(make_core: Any, alone: Any) -> None:
    """Reasoning ends by itself while the plan in which its budget would be spent is in flight."""
    free = alone(worker_admit(0))
    end = next(at for at, each in enumerate(free) if at > 3 and each not in free[:at])
    box = make_core(model=MODEL)
    plans, launch = [], box.runner.launch

    def watched(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    box.runner.launch = watched
    ids = ids_of(ends=(free[end],))
    it = ask(box.worker(), 0, 150, budget=end + 1, grammar=GRAMMAR, reasoning=ids)
    box.until(lambda: is_done(it))
    assert it.token_ids[end] == free[end]
    assert any(len(plan.masked_rows) for plan in plans)
    assert not any(len(plan.masked_rows) and len(plan.grammar_rows) for plan in plans)


def test_nothing_is_kept_of_streams_that_are_over(make_core: Any) -> None:
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [ask(worker, n, budget=5, grammar=[None, GRAMMAR][n % 2]) for n in range(4)]
    box.until(lambda: all(map(is_done, held)))
    for it in held:
        worker.forget(it)
    box.until(lambda: box.core.handler.num_streams == 0)
    scheduler = box.core.scheduler
    assert len(grammars_of(box)) == 0
    assert len(scheduler._reasoning) == 0
    assert not scheduler._reasoning._watching_all
    assert not np.any(scheduler._requests.may_need_mask)
    assert scheduler._requests._num_with_masks == 0
    assert not scheduler._requests._stop_ids


def test_ids_outside_of_the_vocabulary_are_refused(make_core: Any) -> None:
    box = make_core(model=MODEL)
    it = ask(box.worker(), 0, budget=3, reasoning=ids_of(ends=(4096,)))
    box.until(lambda: it.is_over)
    assert it.fault.code == "bad_request"
    assert it.fault.field == "reasoning"


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("is_single", [False, True])
def test_a_call_is_in_the_grammar_from_the_token_that_begins_it(
    make_core: Any, alone: Any, is_single: bool, num: int
) -> None:
    free = alone(worker_admit(0))
    trigger = tuple(free[6 : 6 + num])
    text = TOKENIZER.decode(trigger)
    begin = " ".join(f"<[{each}]>" for each in trigger)
    grammar = StructuredOutputs(grammar=f"start: {begin} /[a-c]{{4}}[0-9]{{2}};/")
    if num == 1:
        ids = ids_of("content", triggers=trigger, is_single=is_single)
    else:
        ids = structs.replace(tags_of("content", triggers=(trigger,)), is_single=is_single)
    box = make_core(model=MODEL)
    worker = box.worker()
    held = [
        worker.send_admit(
            with_fields(
                worker_admit(n),
                params=SamplingParams(temperature=1.0, structured_outputs=grammar),
                reasoning=ids,
                max_tokens=200,
            )
        )
        for n in range(4)
    ]
    box.until(lambda: all(len(it.token_ids) >= 8 for it in held))
    box.kill()
    box.start()
    box.until(lambda: all(map(is_done, held)))
    num_masks = 0
    for n, it in enumerate(held):
        answer = answer_of(it)
        own = alone(with_fields(worker_admit(n), max_tokens=200))
        behind = find(own, trigger) + num
        assert answer[:behind] == own[:behind]
        at = num_calls = 0
        while find(answer[at:], trigger) < len(answer[at:]):
            num_calls += 1
            at += find(answer[at:], trigger) + num
            call = ""
            while at < len(answer) and len(call) < 7:
                call += TOKENIZER.decode([answer[at]])
                at, num_masks = at + 1, num_masks + 1
            assert at == len(answer) or re.fullmatch("[a-c]{4}[0-9]{2};", call), (text, call)
        assert is_single is False or num_calls <= 1
        assert answer == alone(it.admit)
    assert grammars_of(box).num_filled <= num_masks  # the core that died filled some, too
