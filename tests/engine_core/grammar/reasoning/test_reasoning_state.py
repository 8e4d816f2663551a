"""Where a stream is in its reasoning: from its outputs alone, against a walk over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.new_requests import new_request

from slipstream_core.grammar.reasoning.reasoning_state import NEVER, Allowed, ReasoningState
from slipstream_core.scheduler.reasoning_rows import ReasoningRows
from slipstream_core.scheduler.request_table import RequestTable
from slipstream_ipc.messages import ReasoningIds, ReasoningSequences

BEGIN, END, OTHER_END, CALL, BORDER, BLANK, A, B = range(8)
SINGLE = ReasoningIds(
    "start",
    begins=(BEGIN,),
    ends=(END, OTHER_END),
    calls=(CALL,),
    borders=(BORDER,),
    blanks=(BLANK,),
)
# as Kimi K3's: tags of tokens with text between, which is written in two ways
OPEN, CLOSE, SEP = 10, 11, 12
TAGS = ReasoningIds(
    "start",
    begins=(),
    ends=(),
    blanks=(BLANK,),
    sequences=ReasoningSequences(
        begins=((OPEN, A, SEP), (OPEN, 7, 8, SEP)),
        ends=((CLOSE, A, SEP), (CLOSE, 7, 8, SEP)),
        borders=((OPEN, B, SEP), (CLOSE, B, SEP)),
    ),
)
one = st.lists(st.sampled_from([BEGIN, END, CALL, BLANK, A, B]), min_size=1, max_size=4).map(tuple)
several = st.lists(one, max_size=3).map(tuple)
sequences = st.builds(
    ReasoningSequences, several, st.lists(one, min_size=1, max_size=3).map(tuple), several, several
)


@st.composite
def delimiters(draw: st.DrawFn) -> ReasoningIds:
    """Those of a format, or sequences that overlap in any way."""
    kind = draw(st.sampled_from(["single", "tags", "sequences", "both"]))
    if kind == "single":
        return SINGLE
    if kind == "tags":
        return TAGS
    found = draw(sequences)
    if kind == "both":
        return structs.replace(SINGLE, sequences=found)
    return ReasoningIds("start", begins=(), ends=(), blanks=(BLANK,), sequences=found)


class Delimiters(NamedTuple):
    """All of one kind, single ids as well."""

    begins: Any
    ends: Any
    calls: Any
    borders: Any
    triggers: Any
    blanks: Any


def delimiters_of(ids: ReasoningIds) -> Delimiters:
    more = ids.sequences
    names = ("begins", "ends", "calls", "borders", "triggers")
    every = ((*((each,) for each in getattr(ids, name)), *getattr(more, name)) for name in names)
    return Delimiters(*every, set(ids.blanks))  # type: ignore[misc]


def length_at_end(outputs: list[int], kind: Any) -> int:
    """Of the longest that stands at the end; 0: none does."""
    return max((len(each) for each in kind if [*each] == outputs[-len(each) :]), default=0)


def begins(part: list[int], found: Delimiters) -> bool:
    """Whether this is the beginning of a delimiter of reasoning, and no whole one."""
    every = (*found.begins, *found.ends)
    return any([*each[: len(part)]] == part and len(each) > len(part) for each in every)


def parts_behind_blanks(outputs: list[int], found: Delimiters) -> list[tuple[int, ...]]:
    """What the outputs are behind white space, some of which may be a delimiter's."""
    places = range(len(outputs) + 1)
    return [tuple(outputs[at:]) for at in places if found.blanks.issuperset(outputs[:at])]


def is_begun(part: tuple[int, ...], found: Delimiters) -> bool:
    """Whether this is the beginning of a delimiter that begins reasoning, and not all of it."""
    return any(each[: len(part)] == part and len(each) > len(part) for each in found.begins)


class Walk(NamedTuple):
    """Behind some outputs: the place, the tokens of reasoning left, where the grammar began, and
    where the open reasoning or the last delimiter did.
    """

    place: str
    left: int
    grammar_start: int | None
    begin: int
    free_from: int


def walked(ids: ReasoningIds, budget: int | None, has_grammar: bool, outputs: list[int]) -> Walk:
    """Looks at every output, and at all those before it."""
    found = delimiters_of(ids)
    place, begin, free_from, border_from = ids.start, 0, 0, 0
    left = NEVER if budget is None else budget
    if has_grammar and place in ("border", "content"):
        return Walk("grammar", left, 0, 0, 0)
    if place == "start" and not has_grammar:
        place = "border"
    for index in range(len(outputs)):
        num, behind = 0, index + 1
        last = partial(length_at_end, outputs[free_from:behind])
        undecided = outputs[border_from:behind]

        def are_blank(num: int, undecided: list[int] = undecided) -> bool:
            """Whether all but the last `num` are."""
            return found.blanks.issuperset(undecided[: len(undecided) - num])

        if place == "reasoning":
            if num := last(found.ends):
                place = "border"
                grammar_start = behind
            elif num := last(found.calls):
                place = "content"
                grammar_start = behind - num
            if num:
                left = max(left - max(behind - num - begin, 0), 0)
                if has_grammar:
                    return Walk("grammar", left, grammar_start, begin, behind)
        elif place == "start":
            parts = parts_behind_blanks(outputs[:behind], found)
            if whole := [part for part in parts if part in found.begins]:
                num, place = max(map(len, whole)), "reasoning"
            elif not any(
                behind - len(part) <= 8 and (not part or is_begun(part, found)) for part in parts
            ):
                return Walk("grammar", left, 0, 0, 0)
        elif place == "content":
            if num := last(found.borders):
                place = "border"
        elif (num := last(found.begins)) and are_blank(num):
            place = "reasoning"
        elif (num := last(found.borders)) or ((num := last(found.ends)) and are_blank(num)):
            place = "border"
        else:
            num = 0
            parts = range(len(undecided) + 1)
            if not any(
                are_blank(at) and (not at or begins(undecided[-at:], found)) for at in parts
            ):
                place = "content"
        if num:
            free_from = behind
            begin = behind if place == "reasoning" else begin
            border_from = behind if place == "border" else border_from
    return Walk(place, left, None, begin, free_from)


def allowed(at: Walk, index: int) -> Allowed:
    if at.place == "grammar":
        return Allowed.GRAMMAR
    if at.place == "reasoning" and index - at.begin >= at.left:
        return Allowed.END
    return Allowed.GRAMMAR_OR_REASONING if at.place == "start" else Allowed.ANY


histories = st.lists(st.sampled_from([*range(8), A, A, B]), max_size=30)
tag_histories = st.lists(
    st.sampled_from([OPEN, CLOSE, SEP, SEP, BLANK, A, A, B, 7, 8]), max_size=30
)
kinds: dict[str, Any] = {
    "ids": delimiters(),
    "start": st.sampled_from(["start", "border", "reasoning", "content"]),
    "budget": st.none() | st.integers(0, 6),
    "has_grammar": st.booleans(),
}


def of(ids: ReasoningIds, start: str, data: st.DataObject) -> tuple[ReasoningIds, list[int]]:
    outputs = data.draw(tag_histories if ids is TAGS else histories)
    return structs.replace(ids, start=start), outputs


@settings(max_examples=800)
@given(data=st.data(), **kinds)
def test_the_state_is_that_of_a_walk(
    ids: ReasoningIds, start: str, budget: int | None, has_grammar: bool, data: st.DataObject
) -> None:
    ids, outputs = of(ids, start, data)
    whole, one_by_one = (ReasoningState(ids, budget, has_grammar=has_grammar) for _ in range(2))
    for index in range(len(outputs) + 1):
        at = walked(ids, budget, has_grammar, outputs[:index])
        assert one_by_one.allowed_at(index) == allowed(at, index)
        assert one_by_one.grammar_start == at.grammar_start
        assert one_by_one.is_reasoning == (at.place == "reasoning")
        if one_by_one.allowed_at(index) is Allowed.END:
            assert one_by_one.next_end == next_end(ids, outputs[at.free_from : index])
        if one_by_one.allowed_at(index) is Allowed.GRAMMAR_OR_REASONING:
            found = delimiters_of(ids)
            assert one_by_one.num_held == index
            assert one_by_one.next_begins == {
                each[len(part)]
                for part in parts_behind_blanks(outputs[:index], found)
                for each in found.begins
                if len(each) > len(part) and each[: len(part)] == part
            }
        if index < len(outputs):
            one_by_one.take(outputs[index], index)
    whole.take_all(np.array(outputs, np.uint32))
    for name in ReasoningState.__slots__:
        if name not in ("_changed_at", "_calls"):  # the same where it matters, see below
            assert getattr(whole, name) == getattr(one_by_one, name)
    assert whole.masked_from == one_by_one.masked_from


def next_end(ids: ReasoningIds, recent: list[int]) -> int:
    """What goes on with an end of which the longest part has been written."""
    ends = delimiters_of(ids).ends
    for num in range(len(recent), -1, -1):
        for each in ends:
            if len(each) > num and [*each[:num]] == recent[len(recent) - num :]:
                return int(each[num])
    raise AssertionError


@settings(max_examples=400)
@given(data=st.data(), **{**kinds, "budget": st.integers(0, 6)})
def test_a_budget_is_kept_where_ends_are_forced(
    ids: ReasoningIds, start: str, budget: int, has_grammar: bool, data: st.DataObject
) -> None:
    ids, drawn = of(ids, start, data)
    state = ReasoningState(ids, budget, has_grammar=has_grammar)
    outputs: list[int] = []
    num_reasoning = num_forced = 0
    for index, token_id in enumerate(drawn):
        was = state.is_reasoning
        is_forced = state.allowed_at(index) is Allowed.END
        outputs.append(state.next_end if is_forced else token_id)
        state.take(outputs[-1], index)
        num_forced = num_forced + 1 if is_forced else 0
        assert num_forced <= max(map(len, delimiters_of(ids).ends))
        if was and not state.is_reasoning:
            before = walked(ids, budget, has_grammar, outputs[:-1])
            left = walked(ids, budget, has_grammar, outputs).left
            num_reasoning += before.left - left
            assert num_reasoning <= budget
            if is_forced and before.left > left:
                longest = max(map(len, delimiters_of(ids).ends))
                assert num_reasoning > budget - longest  # what had begun as the end is none


@settings(max_examples=400)
@given(data=st.data(), **kinds)
def test_masks_are_foreseen_while_nothing_that_is_watched_comes(
    ids: ReasoningIds, start: str, budget: int | None, has_grammar: bool, data: st.DataObject
) -> None:
    ids, outputs = of(ids, start, data)
    state = ReasoningState(ids, budget, has_grammar=has_grammar)
    state.take_all(np.array(outputs, np.uint32))
    masked_from, watches_all = state.masked_from, state.watches_all
    if watches_all:
        needs_mask = state.allowed_at(len(outputs)) is not Allowed.ANY
        assert not needs_mask or len(outputs) >= masked_from
        return
    for index in range(len(outputs), len(outputs) + 10):
        needs_mask = state.allowed_at(index) is not Allowed.ANY
        assert needs_mask == (index >= masked_from)
        state.take(20, index)


@given(data=st.data(), **kinds)
def test_what_is_not_watched_may_be_left_out(
    ids: ReasoningIds, start: str, budget: int | None, has_grammar: bool, data: st.DataObject
) -> None:
    ids, outputs = of(ids, start, data)
    every, some = (ReasoningState(ids, budget, has_grammar=has_grammar) for _ in range(2))
    for index, token_id in enumerate(outputs):
        every.take(token_id, index)
        if some.watches_all or token_id in some.watched_ids:
            some.take(token_id, index)
        assert some.allowed_at(index + 1) == every.allowed_at(index + 1)
        assert some.masked_from == every.masked_from


class CountedCalls:
    """In place of a grammar of calls: each has `num` tokens behind what begins it."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._left = 0

    def begin(self, token_ids: Sequence[int]) -> bool:
        self.begun_with = tuple(token_ids)
        self._left = self._num
        return not self._left

    def take(self, token_id: int) -> bool:
        assert self._left > 0
        self._left -= 1
        return not self._left


TRIGGERS = ((CALL,), (OPEN, CALL, SEP), (OPEN, 7, 9, SEP))


def call_places(start: str, is_single: bool, num: int, outputs: list[int]) -> list[str]:
    """The place before each output, and behind the last."""
    place, left, has_called, free_from = "border" if start == "start" else start, 0, False, 0
    places = [place]
    for index, token_id in enumerate(outputs):
        may_call = not (is_single and has_called)
        recent = outputs[free_from : index + 1]
        is_trigger = any([*each] == recent[-len(each) :] for each in TRIGGERS)
        if place == "call":
            left -= 1
            free_from = index + 1
        elif is_trigger and (place != "reasoning" or token_id == CALL):
            place, left, free_from = (
                ("call", num, index + 1) if may_call else ("content", 0, index + 1)
            )
        elif place == "reasoning":
            place = "border" if token_id in (END, OTHER_END) else place
        elif place == "border" and token_id == BEGIN:
            place = "reasoning"
        elif token_id == BORDER:
            place = "border"
        elif place == "border" and token_id not in (BLANK, END, OTHER_END):
            place = "content"
        if token_id in (BEGIN, END, OTHER_END, BORDER) and place in ("border", "reasoning"):
            free_from = index + 1
        if place == "call" and not left:
            place, has_called = "border", True
        places.append(place)
    return places


@settings(max_examples=400)
@given(
    outputs=st.lists(st.sampled_from([*range(10), OPEN, CALL, SEP]), max_size=30),
    start=kinds["start"],
    is_single=st.booleans(),
    num=st.integers(0, 3),
)
@example(outputs=[OPEN, CALL, SEP, A, OPEN, 7, 9, SEP, A], start="content", is_single=False, num=1)
def test_calls_in_the_grammar_go_from_their_first_token_to_their_last(
    start: str, is_single: bool, num: int, outputs: list[int]
) -> None:
    ids = structs.replace(
        SINGLE,
        start=start,
        triggers=(CALL,),
        is_single=is_single,
        sequences=ReasoningSequences(triggers=TRIGGERS[1:]),
    )
    whole, one_by_one = (
        ReasoningState(ids, None, has_grammar=False, calls=CountedCalls(num)) for _ in range(2)
    )
    places = call_places(start, is_single, num, outputs)
    for index, place in enumerate(places):
        needed = Allowed.CALL if place == "call" else one_by_one.allowed_at(index)
        assert one_by_one.allowed_at(index) == needed
        assert (needed is Allowed.CALL) == (place == "call")
        assert (one_by_one.masked_from <= index) == (needed is not Allowed.ANY)
        if index < len(outputs):
            one_by_one.take(outputs[index], index)
            if places[index + 1] == "call" != place:
                begun = one_by_one.calls.begun_with
                assert [*begun] == outputs[index + 1 - len(begun) : index + 1]
                assert begun in TRIGGERS
    whole.take_all(np.array(outputs, np.uint32))
    assert whole.allowed_at(len(outputs)) == one_by_one.allowed_at(len(outputs))
    assert whole.masks_ids == one_by_one.masks_ids


@settings(max_examples=400)
@given(
    outputs=st.lists(
        st.sampled_from([OPEN, OPEN, CLOSE, SEP, SEP, CALL, A, B, 7, 8, 9]), max_size=40
    )
)
@example([OPEN, 7, 9, SEP, A, OPEN, 7, 8, SEP])
def test_there_is_one_call_where_what_would_make_another_is_not_sampled(outputs: list[int]) -> None:
    """Other tags may come, those that begin as a call does among them."""
    tags = structs.replace(TAGS.sequences, triggers=TRIGGERS[1:])
    ids = structs.replace(TAGS, start="content", is_single=True, sequences=tags)
    calls = CountedCalls(1)
    state = ReasoningState(ids, None, has_grammar=False, calls=calls)
    taken: list[int] = []
    for token_id in outputs:
        if state.allowed_at(len(taken)) is Allowed.NO_CALL:
            assert state.masks_ids
            assert taken[-1] == OPEN or taken[-2:] == [OPEN, 7]
            assert state.next_triggers == ({CALL} if taken[-1] == OPEN else {9})
            if token_id in state.next_triggers:
                continue
        state.take(token_id, len(taken))
        taken.append(token_id)
    text = "".join(map(chr, taken))
    assert sum(text.count("".join(map(chr, each))) for each in TRIGGERS[1:]) <= 1


def test_what_ends_reasoning_is_not_masked_in_it() -> None:
    state = ReasoningState(structs.replace(SINGLE, start="reasoning"), None, has_grammar=True)
    assert state.masks_ids
    assert state.masked_ids({END, A}) == {A}


def test_tokens_sampled_before_ids_were_masked_do_not_count() -> None:
    requests = RequestTable()
    state = ReasoningState(SINGLE, None, has_grammar=True)
    request = new_request(
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


@settings(max_examples=200)
@given(data=st.data(), budget=kinds["budget"], ids=delimiters(), start=kinds["start"])
def test_in_a_grammar_of_reasoning_too_only_a_spent_budget_is_another_mask(
    ids: ReasoningIds, start: str, budget: int | None, data: st.DataObject
) -> None:
    ids, outputs = of(ids, start, data)
    free = ReasoningState(ids, budget, has_grammar=False)
    whole, one_by_one = (
        ReasoningState(structs.replace(ids, in_grammar=True), budget, has_grammar=True)
        for _ in range(2)
    )
    for index in range(len(outputs) + 1):
        expected = free.allowed_at(index)
        at = Allowed.GRAMMAR if expected is Allowed.ANY else expected
        assert one_by_one.allowed_at(index) == at
        assert (one_by_one.grammar_start, one_by_one.masked_from) == (0, 0)
        assert not one_by_one.masks_ids
        if index < len(outputs):
            free.take(outputs[index], index)
            one_by_one.take(outputs[index], index)
    whole.take_all(np.array(outputs, np.uint32))
    assert whole.allowed_at(len(outputs)) == one_by_one.allowed_at(len(outputs))
