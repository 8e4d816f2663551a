"""One stream's output against an oracle that sees the whole text at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_ipc.history.text_log import START
from slipstream_ipc.messages import REPETITION_DETECTED, Fault
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.output.repetition import RepetitionDetector
from slipstream_worker.output.stop_strings import StopStrings
from slipstream_worker.output.stream_output import StopCriteria, StreamOutput

E_ACUTE = "é".encode()
PIECES = [
    b"",  # 0: the end-of-sequence id, special
    b"a",
    b"b",
    b"ab",
    b"ba",
    b" ",
    E_ACUTE[:1],  # 6: half a character
    E_ACUTE[1:],
    E_ACUTE,
    b"a" + E_ACUTE[:1],
    E_ACUTE[1:] + b"b",
    b"",  # 11: a token that decodes to nothing
    b"c",  # 12: used as a stop id of the request
]
EOS, NOTHING, NAMED_STOP = 0, 11, 12
FACTORY = TableDetokenizerFactory(TokenTable(mode="bytelevel", pieces=PIECES, special=[EOS]))


@dataclass(frozen=True)
class Case:
    token_ids: list[int]
    stops: list[str]
    include: bool
    min_tokens: int
    max_tokens: int
    cuts: list[int]
    sizes: tuple[int, int, int] | None = None  # of patterns, and how often they are repeated


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ids = draw(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=24))
    stops = draw(st.lists(st.text("abé ", min_size=1, max_size=4), max_size=3))
    min_tokens = draw(st.integers(0, 5))
    max_tokens = draw(st.integers(max(1, min_tokens), 30))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    sizes = st.tuples(st.just(1), st.integers(1, 3), st.integers(2, 3))
    detected = draw(st.one_of(st.none(), sizes))
    return Case(ids, stops, draw(st.booleans()), min_tokens, max_tokens, cuts, detected)


def make(case: Case, unit_tokens: int = 1000) -> StreamOutput:
    return StreamOutput(
        FACTORY.create([1], skip_special_tokens=True),
        StopStrings(case.stops, case.include) if case.stops else None,
        StopCriteria(
            stop_ids=frozenset({EOS, NAMED_STOP}),
            eos_ids=frozenset({EOS}),
            min_tokens=case.min_tokens,
            max_tokens=case.max_tokens,
            include_stop=case.include,
        ),
        unit_tokens,
        case.sizes and RepetitionDetector(*case.sizes, case.min_tokens),
    )


def repeats(ids: list[int], case: Case) -> bool:
    """Whether these tokens end with a pattern that is repeated often enough."""
    if case.sizes is None or len(ids) < case.min_tokens:
        return False
    low, high, count = case.sizes
    return any(
        size * count <= len(ids) and ids[-size * count :] == ids[-size:] * count
        for size in range(low, high + 1)
    )


def whole_text(ids: list[int], *, flushed: bool) -> str:
    data = b"".join(PIECES[i] for i in ids)
    text = data.decode("utf-8", "replace")
    # a dangling half character is the last byte 0xC3
    return text[:-1] if not flushed and data.endswith(E_ACUTE[:1]) else text


def oracle(case: Case) -> tuple[str, int, str | None, str | int | None]:
    """Text, tokens kept, reason, stop reason, by looking at every prefix."""
    before = ""
    for n in range(1, len(case.token_ids) + 1):
        ids = case.token_ids[:n]
        reason: str | None = None
        stop_reason: str | int | None = None
        if ids[-1] in (EOS, NAMED_STOP) and n > case.min_tokens:
            reason = "stop"
            stop_reason = None if ids[-1] == EOS else ids[-1]
            shown = ids if case.include else ids[:-1]
        else:
            reason = "length" if n >= case.max_tokens else None
            shown = ids
            if reason is None and repeats(ids, case):
                reason, stop_reason = "repetition", REPETITION_DETECTED
        text = whole_text(shown, flushed=reason is not None)
        if n > case.min_tokens:
            for end in range(len(before) + 1, len(text) + 1):
                matches = [s for s in case.stops if text[:end].endswith(s)]
                if matches:
                    stop = max(matches, key=len)
                    cut = end if case.include else end - len(stop)
                    return text[:cut], kept(case.token_ids[:n], cut), "stop", stop
        if reason is not None:
            return text, n, reason, stop_reason
        before = text
    return before, len(case.token_ids), None, None


def kept(ids: list[int], cut: int) -> int:
    """How many tokens have a share in the first `cut` characters, or end there without text."""
    best = 0
    for n in range(1, len(ids) + 1):
        begins_inside = len(whole_text(ids[: n - 1], flushed=False)) < cut
        data = b"".join(PIECES[i] for i in ids[:n])
        is_whole = not data.endswith(E_ACUTE[:1])
        if begins_inside or (is_whole and len(whole_text(ids[:n], flushed=False)) <= cut):
            best = n
    return best


@pytest.mark.quick
@settings(max_examples=1500, deadline=None)
@given(cases())
def test_output_equals_the_oracle_however_the_tokens_are_divided(case: Case) -> None:
    text, num_tokens, reason, stop_reason = oracle(case)
    output = make(case)
    bounds = [0, *case.cuts, len(case.token_ids)]
    for start, stop in pairwise(bounds):
        output.push(case.token_ids[start:stop])
        shown = output.log.text_between(output.log.find(0, 0), output.log.end)
        assert text.startswith(shown)
        if reason is not None:
            assert output.log.num_tokens <= num_tokens
    if reason is None:
        assert output.end is None
        output.finish("abort")
    assert output.end is not None
    shown = output.log.text_between(output.log.find(0, 0), output.log.end)
    if reason is None:
        assert shown == whole_text(case.token_ids, flushed=True)
        assert output.log.num_tokens == len(case.token_ids)
        return
    assert (shown, output.end.num_tokens) == (text, num_tokens)
    assert (output.end.reason, output.end.stop_reason) == (reason, stop_reason)
    assert output.log.num_tokens == num_tokens


@settings(max_examples=300, deadline=None)
@given(cases())
def test_units_do_not_depend_on_how_the_tokens_are_divided(case: Case) -> None:
    one_by_one, at_once = make(case), make(case)
    for token_id in case.token_ids:
        one_by_one.push([token_id])
    at_once.push(case.token_ids)
    positions = [
        (log.end, log.text_between(log.find(0, 0), log.end))
        for log in (one_by_one.log, at_once.log)
    ]
    assert positions[0] == positions[1]


@settings(deadline=None)
@given(cases(), st.integers(1, 4))
def test_no_unit_has_more_tokens_than_a_message_takes(case: Case, unit_tokens: int) -> None:
    whole, cut = make(case), make(case, unit_tokens)
    for output in (whole, cut):
        output.push(case.token_ids)
        output.finish("abort")
    assert cut.end == whole.end
    units = [cut.log.advance(START, 0, 0)]
    while units[-1] != cut.log.end:
        units.append(cut.log.advance(units[-1], 0, 0))
    assert all(b.num_tokens - a.num_tokens <= unit_tokens for a, b in pairwise([START, *units]))
    assert cut.log.text_between(START, units[-1]) == whole.log.text_between(START, whole.log.end)
    # what was a position is one still, and no token is readable before its text
    at = START
    while at != whole.log.end:
        at = whole.log.advance(at, 0, 0)
        assert cut.log.find(at.num_chars, at.num_tokens) is not None


def test_stop_string_over_three_tokens_leaks_no_ids_or_logprobs() -> None:
    case = Case([1, 2, 5, 2, 1], ["b b"], False, 0, 30, [])
    output = make(case)
    seen = []
    for token_id in case.token_ids:
        output.push([token_id])
        seen.append((output.log.num_tokens, output.log.end.num_chars))
    assert seen == [(1, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert output.end is not None
    assert (output.end.reason, output.end.stop_reason, output.end.num_tokens) == ("stop", "b b", 1)
    assert output.log.num_tokens == 1


@pytest.mark.parametrize("include", [False, True])
def test_eos_and_stop_string_in_the_same_step(include: bool) -> None:
    output = make(Case([1, 2, EOS], ["ab"], include, 0, 30, []))
    output.push([1, 2, EOS])
    assert output.end is not None
    assert output.end.stop_reason == "ab"


def test_length_cap_does_not_mask_an_earlier_stop() -> None:
    output = make(Case([], ["b"], False, 0, 2, []))
    output.push([1, 2])
    assert output.end is not None
    assert (output.end.reason, output.end.stop_reason) == ("stop", "b")


def test_eos_inside_several_tokens_of_one_step() -> None:
    output = make(Case([], [], False, 0, 30, []))
    assert output.push([1, EOS, 2, 2])
    assert output.log.num_tokens == 2
    assert output.end is not None
    assert (output.end.reason, output.end.num_tokens) == ("stop", 2)


def test_end_wins_over_eos_over_length_at_the_last_token() -> None:
    output = make(Case([], [], False, 0, 2, []))
    output.push([1, EOS])
    assert output.end is not None
    assert output.end.reason == "stop"


def test_what_is_held_back_is_flushed_before_an_abort() -> None:
    output = make(Case([], ["abb"], False, 0, 30, []))
    output.push([1, 2])
    assert output.log.end.num_chars == 0
    output.finish("abort")
    assert output.log.text_between(output.log.find(0, 0), output.log.end) == "ab"
    assert output.log.num_tokens == 2


def test_a_broken_off_stream_shows_no_more_than_was_released() -> None:
    output = make(Case([], ["abb"], False, 0, 30, []))
    output.push([5, 1, 2])
    output.end_with_error(Fault("engine", "test"))
    assert output.end is not None
    assert (output.end.reason, output.end.num_tokens) == ("error", 1)
    assert output.log.num_tokens == 1
