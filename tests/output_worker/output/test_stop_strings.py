"""Stop strings against an oracle that looks at every character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_worker.output.stop_strings import StopStrings

STOPS = st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=4)
CHUNKS = st.lists(st.text("abé", max_size=6), max_size=12)


def first_stop(text: str, stops: list[str], min_end: int) -> tuple[int, int] | None:
    """(start, end) of the match that wins, of those that end behind `min_end`."""
    for end in range(min_end + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def longest_beginning(text: str, stops: list[str]) -> str:
    """The longest end of `text` that begins a stop string without being all of it."""
    ends = [text[at:] for at in range(len(text) + 1)]
    return next(end for end in ends if any(s.startswith(end) and s != end for s in stops))


@settings(max_examples=1500, deadline=None)
@given(stops=STOPS, chunks=CHUNKS, num_inactive=st.integers(0, 4), include=st.booleans())
def test_any_text_in_any_chunks(
    stops: list[str], chunks: list[str], num_inactive: int, include: bool
) -> None:
    """At every moment: no leak, all that can leave has left, and the match is the oracle's."""
    matcher = StopStrings(stops, include)
    min_end = len("".join(chunks[:num_inactive]))
    match = first_stop("".join(chunks), stops, min_end)
    emitted = held = seen = ""
    for number, chunk in enumerate(chunks):
        seen += chunk
        emit, held, matched = matcher.feed(held, chunk, active=number >= num_inactive)
        emitted += emit
        if match is not None and match[1] <= len(seen):
            start, end = match
            assert matched == seen[start:end]
            assert emitted == (seen[:end] if include else seen[:start])
            assert held == ""
            return
        assert matched is None
        assert emitted + held == seen
        assert held == longest_beginning(seen, stops)
    assert match is None


def run(matcher: StopStrings, *chunks: str) -> tuple[list[str], str, str | None]:
    emitted, held = [], ""
    for chunk in chunks:
        emit, held, matched = matcher.feed(held, chunk)
        emitted.append(emit)
        if matched is not None:
            return emitted, held, matched
    return emitted, held, None


def test_stop_string_over_three_tokens_leaks_nothing() -> None:
    matcher = StopStrings(["</answer>"])
    assert run(matcher, "42 <", "/ans", "wer> more") == (["42 ", "", ""], "", "</answer>")


def test_false_beginning_is_let_go() -> None:
    matcher = StopStrings(["</answer>"])
    assert run(matcher, "a <", "b") == (["a ", "<b"], "", None)


def test_let_go_only_as_far_as_needed() -> None:
    assert run(StopStrings(["aab"]), "aa", "a") == (["", "a"], "aa", None)


def test_text_that_ends_leaves_its_beginning_in_held() -> None:
    assert run(StopStrings(["\n\nUser:"]), "bye\n") == (["bye"], "\n", None)


def test_earliest_end_wins() -> None:
    assert run(StopStrings(["abcd", "bc"]), "xabcd") == (["xa"], "", "bc")


def test_longest_wins_of_one_end() -> None:
    assert run(StopStrings(["c", "bc", "abc"]), "xabc") == (["x"], "", "abc")


def test_order_of_the_stops_does_not_matter() -> None:
    assert run(StopStrings(["END", "STOP"]), "a STOP END") == (["a "], "", "STOP")


def test_include_stop_str_in_output_ends_behind_it() -> None:
    matcher = StopStrings(["STOP"], include_stop_str_in_output=True)
    assert run(matcher, "a ST", "OP b") == (["a ", "STOP"], "", "STOP")


def test_match_under_min_tokens_is_text() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.feed("", "a STOP b", active=False) == ("a STOP b", "", None)
    assert matcher.feed("", "STOP", active=False) == ("STOP", "", None)
    assert matcher.feed("", " c") == (" c", "", None)


def test_match_that_begins_under_min_tokens_counts() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.feed("", "a ST", active=False) == ("a ", "ST", None)
    assert matcher.feed("ST", "OP b") == ("", "", "STOP")


def test_match_that_overlaps_one_under_min_tokens_counts() -> None:
    matcher = StopStrings(["aa"])
    assert matcher.feed("", "aa", active=False) == ("a", "a", None)
    assert matcher.feed("a", "a") == ("", "", "aa")


def test_one_matcher_serves_many_streams() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.feed("", "ST") == ("", "ST", None)
    assert matcher.feed("", "OP") == ("OP", "", None)


def test_long_stop_strings_cost_no_square_of_memory() -> None:
    stop = "a" * 20_000 + "b"
    emit, held, matched = StopStrings([stop]).feed("", stop[:-1])
    assert (emit, matched) == ("", None)
    assert StopStrings([stop]).feed(held, "c") == (stop[:-1] + "c", "", None)


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match=r"stop: got .*, allowed: strings that are not empty"):
        StopStrings(stops)
