"""Finds the token with which a stream's last tokens are one pattern, several times in a row.

- A pattern of `size` tokens stands there `count` times when each of the last `size * (count - 1)`
  tokens equals the one `size` places before it. So a run of equal tokens is counted for each size,
  and `min_count` costs nothing.
- A token's cost is bounded by `max_pattern_size`: a few operations on arrays of that length, or
  none if the token has not occurred within that many tokens. Memory is bounded likewise.
- The fast and the slow path of a token both ask for it. A token is given by its position, so it is
  seen once, whichever asks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from slipstream_ipc.messages import RepetitionDetection

__all__ = ["RepetitionDetector", "detector_of"]

_SLACK = 256  # tokens between two moves of the recent ones


class RepetitionDetector:
    """Sees a stream's tokens from the first, up to the end that they bring.

    end_at: with how many tokens the stream ends, if it has not ended before; None: not yet known.
    """

    __slots__ = (
        "_at",
        "_cells",
        "_last_seen",
        "_least_run",
        "_least_runs",
        "_max_size",
        "_min_size",
        "_min_tokens",
        "_num_tokens",
        "_recent",
        "_runs",
        "_runs_of_any",
        "end_at",
    )

    def __init__(self, min_size: int, max_size: int, min_count: int, min_tokens: int = 0) -> None:
        """Sizes in tokens, 1 <= min_size <= max_size; min_count >= 2. min_tokens: the stream does
        not end with fewer.
        """
        self._min_size = min_size
        self._max_size = max_size
        self._min_tokens = min_tokens
        self._least_runs = _least_runs(min_size, max_size, min_count)
        self._least_run = min_size * (min_count - 1)
        # i32 [sizes]: how many of the last tokens equal the one a size before
        self._runs = np.zeros(max_size - min_size + 1, np.int32)
        self._runs_of_any = 0  # none of them is larger
        # u32: from `_at` on the last tokens, the latest first
        self._recent = np.zeros(max_size + 1 + _SLACK, np.uint32)
        self._cells = self._recent.data
        self._at = len(self._recent)
        self._num_tokens = 0
        self._last_seen: dict[int, int] = {}  # token id -> the number of tokens with its last one
        self.end_at: int | None = None

    def ends_with(self, num_tokens: int, token_id: int) -> bool:
        """True if the stream ends with this token, the `num_tokens`-th. The one before it has been
        seen.
        """
        if num_tokens > self._num_tokens and self.end_at is None:
            self._see(token_id)
        return self.end_at == num_tokens

    def ends_within(self, token_ids: Sequence[int]) -> bool:
        """True if the stream ends within these tokens, which follow those seen."""
        for token_id in token_ids:
            if self.end_at is None:
                self._see(token_id)
        return self.end_at is not None

    def _see(self, token_id: int) -> None:
        self._num_tokens = num_tokens = self._num_tokens + 1
        at = self._at
        if not at:
            at = _SLACK
            self._recent[at:] = self._recent[: self._max_size + 1]
        self._at = at = at - 1
        self._cells[at] = token_id
        seen = self._last_seen
        last = seen.get(token_id)
        seen[token_id] = num_tokens
        if last is None or num_tokens - last > self._max_size:
            if self._runs_of_any:
                self._runs.fill(0)
                self._runs_of_any = 0
            if len(seen) > 2 * self._max_size + _SLACK:
                oldest = num_tokens - self._max_size
                self._last_seen = {id_: last for id_, last in seen.items() if last > oldest}
            return
        num_sizes = min(self._max_size, num_tokens - 1) - self._min_size + 1
        if num_sizes <= 0:
            return
        begin = at + self._min_size
        runs, least_runs = self._runs, self._least_runs
        if num_sizes < len(runs):
            runs, least_runs = runs[:num_sizes], least_runs[:num_sizes]
        runs += 1
        runs *= self._recent[begin : begin + num_sizes] == token_id
        self._runs_of_any += 1
        if self._runs_of_any < self._least_run or num_tokens < self._min_tokens:
            return
        if (runs >= least_runs).any():
            self.end_at = num_tokens


def detector_of(wanted: RepetitionDetection | None, min_tokens: int) -> RepetitionDetector | None:
    """The detector that a checked request asks for, if any."""
    if wanted is None or not wanted.max_pattern_size:
        return None
    min_size = max(1, wanted.min_pattern_size)
    return RepetitionDetector(min_size, wanted.max_pattern_size, wanted.min_count, min_tokens)


@lru_cache(64)
def _least_runs(min_size: int, max_size: int, min_count: int) -> npt.NDArray[np.int32]:
    """i32 [sizes]: the runs with which a pattern of that size stands there often enough."""
    found = np.arange(min_size, max_size + 1, dtype=np.int32) * (min_count - 1)
    found.setflags(write=False)
    return found
