"""The index says what a search through the whole history says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream_core._native import NgramIndex


def match_of(ids: list[int], least: int, most: int) -> int | None:
    """The position behind the latest earlier occurrence of the longest of the last tokens."""
    for num in range(min(most, len(ids)), least - 1, -1):
        for at in range(len(ids) - 1, num - 1, -1):
            if ids[at - num : at] == ids[-num:]:
                return at
    return None


def drafts_of(ids: list[int], match: int, num: int) -> list[int]:
    gone_on = list(ids)
    for at in range(num):
        gone_on.append(gone_on[match + at])
    return gone_on[len(ids) :]


class Oracle:
    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.ids: list[int] = []
        self.score = 0.5

    def append(self, ids: list[int], *, is_sampled: bool) -> None:
        for token in ids:
            match = match_of(self.ids, self.least, self.most)
            if is_sampled and match is not None:
                self.score += 0.125 * ((self.ids[match] == token) - self.score)
            self.ids.append(token)


def append(index: NgramIndex, given: dict[int, list[int]], *, is_sampled: bool) -> None:
    rows, counts = np.array(list(given), np.int64), [len(each) for each in given.values()]
    ids = np.array([token for each in given.values() for token in each], np.uint32)
    index.append(rows, np.array(counts, np.int64), ids, is_sampled)


def assert_same(index: NgramIndex, oracles: dict[int, Oracle], num: int = 9) -> None:
    rows = np.array([*oracles, 99], np.int64)  # one of them is not open
    scores = np.empty(len(rows))
    found = index.scores(rows, scores)
    wanted, drafts = [], list[int]()
    for each in oracles.values():
        match = match_of(each.ids, each.least, each.most)
        wanted.append(0.0 if match is None else each.score)
        drafts += [] if match is None else drafts_of(each.ids, match, num)
    assert scores.tolist() == pytest.approx([*wanted, 0.0])
    assert found == np.count_nonzero(scores)
    out = np.empty(len(drafts), np.int64)
    index.draft(rows, np.where(scores > 0, num, 0), out)
    assert out.tolist() == drafts


@given(
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    spans=st.lists(
        st.tuples(st.booleans(), st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=3)),
        max_size=12,
    ),
)
@example(lengths=(1, 0), spans=[(True, [[0] * 30])] * 5)  # the table grows under a repetition
def test_as_a_search_through_the_history(
    lengths: tuple[int, int], spans: list[tuple[bool, list[list[int]]]]
) -> None:
    least, most = lengths[0], sum(lengths)
    index, oracles = NgramIndex(least, most), dict[int, Oracle]()
    for is_sampled, by_row in spans:
        for row in range(len(by_row)):
            if row not in oracles:
                index.open(row)
                oracles[row] = Oracle(least, most)
        append(index, dict(enumerate(by_row)), is_sampled=is_sampled)
        for row, ids in enumerate(by_row):
            oracles[row].append(ids, is_sampled=is_sampled)
        assert_same(index, oracles)
    if oracles:
        index.close(0)
        del oracles[0]
        assert_same(index, oracles)


def test_long_histories_of_many_rows() -> None:
    rng = random.Random(5)
    text = [rng.randrange(50) for _ in range(3000)]
    index, oracles = NgramIndex(2, 4), dict[int, Oracle]()
    for row in (0, 63, 64, 300):
        index.open(row)
        oracles[row] = Oracle(2, 4)
        oracles[row].ids = text[row : row + 1000] + text[row + 500 : row + 700]
        append(index, {row: oracles[row].ids}, is_sampled=False)
    assert_same(index, oracles, num=16)


def test_what_cannot_be() -> None:
    for least, most in ((0, 3), (4, 3), (1, 33)):
        with pytest.raises(ValueError, match="allowed: 1 to 32"):
            NgramIndex(least, most)
    index = NgramIndex(2, 4)
    with pytest.raises(ValueError, match="below 0"):
        index.open(-1)
    index.open(1)
    one, ids = np.array([1], np.int64), np.array([1, 2, 1, 2], np.uint32)
    for counts in ([3], [5], [-1], [2, 2]):
        with pytest.raises(ValueError, match="do not fit"):
            index.append(one, np.array(counts, np.int64), ids, True)
    with pytest.raises(ValueError, match="do not fit what is found"):
        index.draft(one, one, np.empty(1, np.int64))
    index.append(one, np.array([4]), ids, True)
    with pytest.raises(ValueError, match="do not fit what is found"):
        index.draft(one, one, np.empty(2, np.int64))
    with pytest.raises(ValueError, match="different lengths"):
        index.scores(one, np.empty(2))
    index.close(5)  # is not open
