"""Where a stream is in its reasoning: from its outputs alone, against a walk over all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.reasoning import NEVER, Allowed, ReasoningState
from slipstream_core.scheduler.reasoning_rows import ReasoningRows
from slipstream_core.scheduler.request_table import NewRequest, RequestTable
from slipstream_ipc.messages import ReasoningIds

BEGIN, END, OTHER_END, CALL, BORDER, BLANK, A, B = range(8)
IDS = ReasoningIds(
    "start",
    begins=(BEGIN,),
    ends=(END, OTHER_END),
    calls=(CALL,),
    borders=(BORDER,),
    blanks=(BLANK,),
)


def walked(
    start: str, budget: int | None, has_grammar: bool, outputs: list[int]
) -> tuple[str, int, int | None]:
    """The place behind the outputs, the tokens of reasoning left, and where the grammar began."""
    place = start
    left = NEVER if budget is None else budget
    if has_grammar and place in ("border", "content"):
        return "grammar", left, 0
    for index, token_id in enumerate(outputs):
        match place, token_id:
            case "start" | "border", 0:
                place = "reasoning"
            case "start" | "border", _ if has_grammar:
                return "grammar", left, index
            case "start" | "border", 1 | 2 | 4 | 5:
                place = "border"
            case "start" | "border", _:
                place = "content"
            case "reasoning", 1 | 2:
                if has_grammar:
                    return "grammar", left, index + 1
                place = "border"
            case "reasoning", 3:
                if has_grammar:
                    return "grammar", left, index
                place = "content"
            case "reasoning", _:
                left -= 1
            case "content", 4:
                place = "border"
    return place, left, None


def allowed(place: str, left: int, has_grammar: bool) -> Allowed:
    if place == "grammar":
        return Allowed.GRAMMAR
    if place == "reasoning" and left <= 0:
        return Allowed.END
    if place == "start" and has_grammar:
        return Allowed.GRAMMAR_OR_REASONING
    return Allowed.ANY


histories = st.lists(st.sampled_from([*range(8), A, A, B]), max_size=30)
kinds: dict[str, Any] = {
    "start": st.sampled_from(["start", "border", "reasoning", "content"]),
    "budget": st.none() | st.integers(0, 6),
    "has_grammar": st.booleans(),
}


def state_of(start: str, budget: int | None, has_grammar: bool) -> ReasoningState:
    ids = ReasoningIds(start, IDS.begins, IDS.ends, IDS.calls, IDS.borders, IDS.blanks)  # type: ignore[arg-type]
    return ReasoningState(ids, budget, has_grammar=has_grammar)


@settings(max_examples=400)
@given(outputs=histories, **kinds)
def test_the_state_is_that_of_a_walk(
    start: str, budget: int | None, has_grammar: bool, outputs: list[int]
) -> None:
    whole, one_by_one = (state_of(start, budget, has_grammar) for _ in range(2))
    for index in range(len(outputs) + 1):
        place, left, grammar_start = walked(start, budget, has_grammar, outputs[:index])
        assert one_by_one.allowed_at(index) == allowed(place, left, has_grammar)
        assert one_by_one.grammar_start == grammar_start
        assert one_by_one.is_reasoning == (place == "reasoning")
        if index < len(outputs):
            one_by_one.take(outputs[index], index)
    whole.take_all(np.array(outputs, np.uint32))
    for name in ReasoningState.__slots__:
        if name not in ("_border_from", "_calls"):  # the same where it matters, see below
            assert getattr(whole, name) == getattr(one_by_one, name)
    assert whole.masked_from == one_by_one.masked_from


@settings(max_examples=400)
@given(outputs=histories, data=st.data(), **kinds)
def test_masks_are_foreseen_while_nothing_that_is_watched_comes(
    start: str, budget: int | None, has_grammar: bool, outputs: list[int], data: st.DataObject
) -> None:
    state = state_of(start, budget, has_grammar)
    state.take_all(np.array(outputs, np.uint32))
    masked_from, watches_all = state.masked_from, state.watches_all
    if watches_all:
        return
    for index in range(len(outputs), len(outputs) + 10):
        needs_mask = state.allowed_at(index) is not Allowed.ANY
        assert needs_mask == (index >= masked_from)
        state.take(A, index)


@given(outputs=histories, **kinds)
def test_what_is_not_watched_may_be_left_out(
    start: str, budget: int | None, has_grammar: bool, outputs: list[int]
) -> None:
    every, some = (state_of(start, budget, has_grammar) for _ in range(2))
    for index, token_id in enumerate(outputs):
        every.take(token_id, index)
        if some.watches_all or token_id in some.watched_ids:
            some.take(token_id, index)
        assert some.allowed_at(index + 1) == every.allowed_at(index + 1)
        assert some.masked_from == every.masked_from


class CountedCalls:
    """In place of a grammar of calls: each has `num` tokens."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._left = 0

    def begin(self, token_id: int) -> bool:
        assert token_id == CALL
        self._left = self._num
        return self.take(token_id)

    def take(self, token_id: int) -> bool:
        assert self._left > 0
        self._left -= 1
        return not self._left


def call_places(start: str, is_single: bool, num: int, outputs: list[int]) -> list[str]:
    """The place before each output, and behind the last."""
    place, left, has_called = "border" if start == "start" else start, 0, False
    places = [place]
    for token_id in outputs:
        may_call = not (is_single and has_called)
        if place == "call":
            left -= 1
        elif token_id == CALL and place == "reasoning" and not may_call:
            place = "content"
        elif token_id == CALL and may_call:
            place, left = "call", num - 1
        elif place == "reasoning":
            place = "border" if token_id in (END, OTHER_END) else place
        elif place == "border" and token_id == BEGIN:
            place = "reasoning"
        elif token_id == BORDER:
            place = "border"
        elif (place == "border" and token_id not in (BLANK, END, OTHER_END)) or token_id == CALL:
            place = "content"
        if place == "call" and not left:
            place, has_called = "border", True
        places.append(place)
    return places


@settings(max_examples=400)
@given(
    outputs=histories,
    start=kinds["start"],
    is_single=st.booleans(),
    num=st.integers(1, 4),
)
def test_calls_in_the_grammar_go_from_their_first_token_to_their_last(
    start: str, is_single: bool, num: int, outputs: list[int]
) -> None:
    ids = ReasoningIds(  # type: ignore[call-arg]
        start,  # type: ignore[arg-type]
        *(IDS.begins, IDS.ends, IDS.calls, IDS.borders, IDS.blanks),
        triggers=(CALL,),
        is_single=is_single,
    )
    whole, one_by_one = (
        ReasoningState(ids, None, has_grammar=False, calls=CountedCalls(num)) for _ in range(2)
    )
    places = call_places(start, is_single, num, outputs)
    for index, place in enumerate(places):
        needed = Allowed.CALL if place == "call" else Allowed.ANY
        assert one_by_one.allowed_at(index) == needed
        assert (one_by_one.masked_from <= index) == (place == "call")
        if index < len(outputs):
            one_by_one.take(outputs[index], index)
    whole.take_all(np.array(outputs, np.uint32))
    assert whole.allowed_at(len(outputs)) == one_by_one.allowed_at(len(outputs))
    assert whole.masks_ids == one_by_one.masks_ids


def test_what_ends_reasoning_is_not_masked_in_it() -> None:
    state = state_of("reasoning", None, True)
    assert state.masks_ids
    assert state.masked_ids({END, A}) == {A}


def test_tokens_sampled_before_ids_were_masked_do_not_count() -> None:
    requests = RequestTable()
    state = state_of("start", None, True)
    request = NewRequest(
        row=0,
        prompt_len=2,
        max_tokens=20,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        has_grammar=True,
        reasoning=state,
    )
    requests.add(request, known=2, limit=22, run_ahead=20)
    rows = ReasoningRows(requests)
    rows.add(0, state, (A,))
    assert rows.take(0, [BEGIN, B, A], 2) == 1
    assert rows.take(0, [B, B, END, A], 3) == 3
