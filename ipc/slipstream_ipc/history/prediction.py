"""A text that an answer may say, in tokens, and the way of the answer through it.

- The answer is expected to begin as the prediction does. Where they part, it is looked for again:
  by its last MATCH tokens, first behind the place where they parted, then up to it.
- How far an answer has followed is a function of its tokens alone, however they are cut into
  pieces: a core drafts by it, and a worker counts by it, whichever of them died meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from slipstream_ipc.arrays import UInt32s, UInt64s

MATCH = 3  # tokens that have to be equal
_ID_BITS = 21  # of MATCH ids in 64 bits; larger ids may be taken for others, and foresee wrongly
_NO_IDS: UInt32s = np.empty(0, np.uint32)


class FollowedPrediction:
    """A prediction, and the place in it up to which an answer has followed."""

    def __init__(self, token_ids: UInt32s) -> None:
        """token_ids: [n]"""
        self._ids = token_ids
        keys = _keys(token_ids)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self._last = _NO_IDS  # of the answer, up to MATCH
        self._is_right = np.zeros(len(token_ids), np.bool_)
        self._place = 0  # in front of the token that is foreseen, or where they parted
        self._follows = True
        self.num_tokens = 0  # of the answer
        # of these, that came as they were foreseen, and that came in place of what was foreseen
        self.num_right = self.num_wrong = 0

    @property
    def num_accepted(self) -> int:
        """The prediction's tokens that came where they were foreseen, each counted once."""
        return int(np.count_nonzero(self._is_right))

    @property
    def num_rejected(self) -> int:
        """The prediction's other tokens, up to now."""
        return len(self._ids) - self.num_accepted

    def foreseen(self, num: int) -> list[int]:
        """Up to `num` tokens that come next if the answer goes on as the prediction does."""
        if not self._follows:
            return []
        found: list[int] = self._ids[self._place : self._place + num].tolist()
        return found

    def follow(self, token_ids: UInt32s) -> None:
        """Take in the next tokens of the answer."""
        num_before = len(self._last)
        joined = np.concatenate([self._last, token_ids])
        hits: list[int] | None = None  # tokens of the piece behind which the answer is found again
        at = 0
        while at < len(token_ids):
            if self._follows:
                num = self._num_equal(token_ids[at:])
                self._is_right[self._place : self._place + num] = True
                self._place += num
                self.num_right += num
                at += num
                if at == len(token_ids):
                    break
                self._follows = False
                self.num_wrong += self._place < len(self._ids)
            if hits is None:
                hits = self._hits(joined, num_before)
            nth = bisect_left(hits, at)
            if nth == len(hits):
                break
            at = hits[nth] + 1
            self._place = self._behind(joined[: num_before + at])
            self._follows = True
        self._last = joined[-MATCH:]
        self.num_tokens += len(token_ids)

    def _num_equal(self, token_ids: UInt32s) -> int:
        """The number of tokens that come as they are foreseen."""
        ahead = self._ids[self._place : self._place + len(token_ids)]
        differ = np.flatnonzero(ahead != token_ids[: len(ahead)])
        return int(differ[0]) if len(differ) else len(ahead)

    def _hits(self, joined: UInt32s, num_before: int) -> list[int]:
        """The tokens behind the first `num_before` that end MATCH tokens of the prediction."""
        keys = _keys(joined)
        if not len(keys) or not len(self._keys):
            return []
        found = self._keys.take(np.searchsorted(self._keys, keys), mode="clip") == keys
        ends = np.flatnonzero(found) + MATCH - 1 - num_before
        hits: list[int] = ends[ends >= 0].tolist()
        return hits

    def _behind(self, answer: UInt32s) -> int:
        """The place behind the answer's last MATCH tokens, which the prediction has."""
        key = _keys(answer[-MATCH:])[0]
        begin, end = (int(np.searchsorted(self._keys, key, side)) for side in ("left", "right"))
        places = self._order[begin:end] + MATCH
        nth = int(np.searchsorted(places, self._place, "right"))
        return int(places[min(nth, len(places) - 1)])


def _keys(token_ids: UInt32s) -> UInt64s:
    """A number for each MATCH adjacent tokens, [n - MATCH + 1]; none for fewer."""
    num = len(token_ids) - MATCH + 1
    if num <= 0:
        return np.empty(0, np.uint64)
    ids = token_ids.astype(np.uint64)
    found = np.zeros(num, np.uint64)
    for at in range(MATCH):
        found = (found << np.uint64(_ID_BITS)) ^ ids[at : at + num]
    return found
