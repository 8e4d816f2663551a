"""The repetition detector against a look at every prefix, as vLLM takes it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream_ipc.messages import RepetitionDetection
from slipstream_ipc.validation.sampling_params import MAX_PATTERN_COUNT, MAX_PATTERN_SIZE
from slipstream_worker.output.repetition import RepetitionDetector, detector_of


def repeats(token_ids: list[int], min_size: int, max_size: int, min_count: int) -> bool:
    """Whether these tokens end with a pattern that often."""
    return any(
        size * min_count <= len(token_ids)
        and token_ids[-size * min_count :] == token_ids[len(token_ids) - size :] * min_count
        for size in range(min_size, max_size + 1)
    )


def first_end(token_ids: list[int], *sizes: int, min_tokens: int = 0) -> int | None:
    for num in range(1, len(token_ids) + 1):
        if num >= min_tokens and repeats(token_ids[:num], *sizes):
            return num
    return None


@st.composite
def histories(draw: st.DrawFn) -> list[int]:
    """Tokens with loops in them, of which some are broken."""
    token_ids: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        pattern = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
        times = draw(st.integers(1, 6))
        cut = draw(st.integers(0, len(pattern)))
        token_ids += pattern * times + pattern[:cut]
    return token_ids


@settings(max_examples=1000, deadline=None)
@given(
    token_ids=histories(),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)).map(sorted),
    min_count=st.integers(2, 5),
    min_tokens=st.sampled_from([0, 0, 1, 7, 20]),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
@example(token_ids=[1, 1], sizes=[1, 1], min_count=2, min_tokens=2, cuts=[])
@example(token_ids=[1, 1, 1], sizes=[1, 9], min_count=2, min_tokens=3, cuts=[1])
def test_it_ends_where_a_look_at_every_prefix_does(
    token_ids: list[int], sizes: list[int], min_count: int, min_tokens: int, cuts: list[int]
) -> None:
    expected = first_end(token_ids, *sizes, min_count, min_tokens=min_tokens)
    wanted = RepetitionDetection(
        min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=min_count
    )
    detector = detector_of(wanted, min_tokens)
    assert detector is not None
    found = None
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    for number, (begin, end) in enumerate(pairwise(bounds)):
        span = token_ids[begin:end]
        if number % 2:  # the fast path has seen them before
            is_within = detector.ends_within(span)
            assert is_within == (expected is not None and expected <= end)
        for at, token_id in enumerate(span, begin + 1):
            if found is None and detector.ends_with(at, token_id):
                found = at
    assert found == detector.end_at == expected


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 600),
    num_before=st.integers(0, 1500),
    min_size=st.integers(1, 20),
    min_count=st.integers(2, 4),
)
def test_long_patterns_behind_many_tokens(
    size: int, num_before: int, min_size: int, min_count: int
) -> None:
    """All tokens are different, but for the pattern's copies."""
    min_size = min(size, min_size)
    before, pattern = list(range(num_before)), list(range(10_000, 10_000 + size))
    detector = RepetitionDetector(min_size, 600, min_count)
    assert detector.ends_within(before + pattern * min_count)
    assert detector.end_at == num_before + size * min_count


def test_what_it_keeps_is_bounded() -> None:
    detector = RepetitionDetector(1, 8, 2)
    assert not detector.ends_within(range(20_000))
    assert len(detector._last_seen) < 1000
    assert detector.ends_within([19_999])
    assert detector.end_at == 20_001


def test_the_largest_sizes_and_counts_fit() -> None:
    detector = RepetitionDetector(1, MAX_PATTERN_SIZE, MAX_PATTERN_COUNT)
    assert detector._least_runs[-1] == MAX_PATTERN_SIZE * (MAX_PATTERN_COUNT - 1)
    assert detector.ends_within([7] * MAX_PATTERN_COUNT)
    assert detector.end_at == MAX_PATTERN_COUNT


@pytest.mark.parametrize("wanted", [None, RepetitionDetection(), RepetitionDetection(min_count=3)])
def test_none_is_wanted(wanted: RepetitionDetection | None) -> None:
    assert detector_of(wanted, 0) is None


def test_no_smallest_size_is_one() -> None:
    wanted = RepetitionDetection(max_pattern_size=2, min_count=3)
    detector = detector_of(wanted, 0)
    assert detector is not None
    assert not detector.ends_within([1, 2, 1, 2, 1])
    assert detector.ends_within([1, 1])
    assert detector.end_at == 7
