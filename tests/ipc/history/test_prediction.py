"""An answer's way through its prediction: as an oracle that looks at one token after another finds
it, in pieces as at once.
"""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.history.prediction import MATCH, FollowedPrediction


def ids(numbers: list[int]) -> UInt32s:
    return np.array(numbers, np.uint32)


class Oracle:
    """The rules, a token at a time."""

    def __init__(self, prediction: list[int]) -> None:
        self.prediction = prediction
        self.answer: list[int] = []
        self.place, self.follows = 0, True
        self.right: set[int] = set()

    def take(self, token_id: int) -> None:
        self.answer.append(token_id)
        if self.follows and self.prediction[self.place : self.place + 1] == [token_id]:
            self.right.add(self.place)
            self.place += 1
            return
        self.follows = False
        last = self.answer[-MATCH:]
        places = [
            at + MATCH
            for at in range(len(self.prediction) - MATCH + 1)
            if self.prediction[at : at + MATCH] == last
        ]
        if places:
            behind = [place for place in places if place > self.place]
            self.place = behind[0] if behind else places[-1]
            self.follows = True

    def foreseen(self) -> list[int]:
        return self.prediction[self.place :] if self.follows else []


# few ids: that they part and are found again is frequent
texts = st.lists(st.integers(0, 3), max_size=60)
edits = st.lists(st.tuples(st.sampled_from(["cut", "put", "jump"]), st.integers(0, 59)), max_size=6)


def edited(text: list[int], changes: list[tuple[str, int]]) -> list[int]:
    for kind, at in changes:
        if kind == "cut":
            text = text[:at] + text[at + 3 :]
        elif kind == "put":
            text = [*text[:at], at % 5, 7, *text[at:]]
        else:
            text = text[at:] + text[:at]
    return text


@given(texts, edits, st.integers(0, 2**32))
def test_each_piece_goes_on_as_single_tokens_do(
    text: list[int], changes: list[tuple[str, int]], seed: int
) -> None:
    answer, random = edited(text, changes), Random(seed)
    oracle, whole = Oracle(text), FollowedPrediction(ids(text))
    pieces = FollowedPrediction(ids(text))
    at = 0
    while at < len(answer):
        num = random.choice([0, 1, 1, 2, 5, 17])
        pieces.follow(ids(answer[at : at + num]))
        for each in answer[at : at + num]:
            oracle.take(each)
        at = min(at + num, len(answer))
        assert pieces.num_tokens == at
        assert pieces.foreseen(100) == oracle.foreseen()
        assert pieces.foreseen(2) == oracle.foreseen()[:2]
        assert pieces.num_accepted == len(oracle.right)
        assert pieces.num_accepted + pieces.num_rejected == len(text)
    whole.follow(ids(answer))
    assert whole.foreseen(100) == oracle.foreseen()
    assert whole.num_accepted == len(oracle.right)
    assert (whole.num_right, whole.num_wrong) == (pieces.num_right, pieces.num_wrong)


def test_an_edit_is_left_and_found_again() -> None:
    text = list(range(100, 140))
    followed = FollowedPrediction(ids(text))
    assert followed.foreseen(2) == [100, 101]
    followed.follow(ids([*text[:10], 7, 8, *text[12:15]]))
    assert followed.foreseen(3) == [115, 116, 117]
    assert (followed.num_right, followed.num_wrong) == (10, 1)
    followed.follow(ids(text[15:]))
    assert followed.foreseen(3) == []
    assert (followed.num_accepted, followed.num_rejected) == (35, 5)
    followed.follow(ids([1, 2]))  # beyond its end nothing was foreseen
    assert followed.num_wrong == 1


def test_of_equal_places_the_next_one_counts() -> None:
    text = [1, 2, 3, 10, 1, 2, 3, 20, 1, 2, 3, 30]
    followed = FollowedPrediction(ids(text))
    followed.follow(ids([1, 2, 3, 10, 9, 1, 2, 3]))
    assert followed.foreseen(1) == [20]
    followed.follow(ids([9, 1, 2, 3]))
    assert followed.foreseen(1) == [30]
    followed.follow(ids([9, 1, 2, 3]))  # there is none behind: the last one before it
    assert followed.foreseen(1) == [30]


def test_what_is_said_twice_counts_once() -> None:
    text = list(range(20))
    followed = FollowedPrediction(ids(text))
    followed.follow(ids(text * 3))
    assert (followed.num_accepted, followed.num_rejected) == (20, 0)
    assert followed.num_right == 20 + 2 * 17
