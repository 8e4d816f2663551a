"""Histories of log-probabilities by row, ragged: each row as wide as its request asked.

Owns: the values beside the tokens of rows that want them, from the row's opening on. Does not know:
cursors, messages' order of sending, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream_core.runner.plan import Logprobs
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.cursors import Portion
from slipstream_ipc.log import PagedLog
from slipstream_ipc.messages import LogprobColumns

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Width:
    """All rows with the same number of values to a token."""

    values: PagedLog
    ids: PagedLog
    ranks: PagedLog = field(default_factory=lambda: PagedLog(np.uint32))

    def logs(self) -> tuple[PagedLog, PagedLog, PagedLog]:
        return self.values, self.ids, self.ranks


class LogprobLog:
    """Log-probabilities of every token since a row was opened."""

    def __init__(self) -> None:
        self._by_width: dict[int, _Width] = {}
        self._widths = np.zeros(64, np.int64)  # by row; 0: none wanted
        self._bases = np.zeros(64, np.int64)  # position in the row's token history of the first

    def open(self, row: int, num_logprobs: int, position: int) -> None:
        """Keep the sampled token's and `num_logprobs` more for tokens from `position` on."""
        if row >= len(self._widths):
            more = max(row + 1, 2 * len(self._widths)) - len(self._widths)
            self._widths = np.pad(self._widths, (0, more))
            self._bases = np.pad(self._bases, (0, more))
        width = 1 + num_logprobs
        if width not in self._by_width:
            self._by_width[width] = _Width(PagedLog(np.float32, width), PagedLog(np.uint32, width))
        for log in self._by_width[width].logs():
            log.open(row)
        self._widths[row] = width
        self._bases[row] = position

    def drop(self, row: int) -> None:
        """Free what `row` holds, if it was ever opened."""
        if row < len(self._widths) and self._widths[row]:
            for log in self._by_width[int(self._widths[row])].logs():
                log.drop(row)
            self._widths[row] = 0

    def append(self, rows: Int64s, logprobs: Logprobs, index: Int64s) -> None:
        """One token for each of `rows`; row i's values are those at `index[i]` of `logprobs`."""
        widths = self._width_of(rows)
        for width in np.unique(widths).tolist():
            if not width:
                continue
            of_width = widths == width
            some, at = rows[of_width], index[of_width]
            logs = self._by_width[width]
            logs.values.append(some, logprobs.values[at, :width])
            logs.ids.append(some, logprobs.ids[at, :width])
            logs.ranks.append(some, logprobs.ranks[at])

    def columns(self, portion: Portion) -> LogprobColumns | None:
        """The columns that go with a portion of the token histories; None where none has any."""
        widths = self._width_of(portion.rows)
        if not widths.any():
            return None
        first = int(widths[0])
        starts = portion.starts - np.where(widths, self._bases[portion.rows], 0)
        if (widths == first).all():
            logs = self._by_width[first]
            picked = [log.gather(portion.rows, starts, portion.counts) for log in logs.logs()]
            return LogprobColumns(
                first, pack_f32(picked[0]), pack_u32(picked[1]), pack_u32(picked[2])
            )
        sizes = portion.counts * widths
        values = np.empty(int(sizes.sum()), np.float32)
        ids = np.empty(len(values), np.uint32)
        ranked = np.where(widths, portion.counts, 0)
        ranks = np.empty(int(ranked.sum()), np.uint32)
        value_starts = np.cumsum(sizes) - sizes
        rank_starts = np.cumsum(ranked) - ranked
        for width in np.unique(widths[widths > 0]).tolist():
            of_width = np.flatnonzero(widths == width)
            logs = self._by_width[width]
            which = (portion.rows[of_width], starts[of_width], portion.counts[of_width])
            at = _spans(value_starts[of_width], sizes[of_width])
            values[at] = logs.values.gather(*which).reshape(-1)
            ids[at] = logs.ids.gather(*which).reshape(-1)
            ranks[_spans(rank_starts[of_width], ranked[of_width])] = logs.ranks.gather(*which)
        return LogprobColumns(0, pack_f32(values), pack_u32(ids), pack_u32(ranks), pack_u32(widths))

    def _width_of(self, rows: Int64s) -> Int64s:
        inside = rows < len(self._widths)
        return np.where(inside, self._widths[np.where(inside, rows, 0)], 0)


def _spans(starts: Int64s, sizes: Int64s) -> Int64s:
    """The indices of many spans, one behind the other."""
    ends = np.cumsum(sizes)
    return np.arange(int(ends[-1])) + np.repeat(starts - ends + sizes, sizes)
