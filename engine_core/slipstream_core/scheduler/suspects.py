"""Suspects: requests that run alone, because a step that contained them has failed.

A suspect runs alone, with nothing else in flight, until it has sampled a token, and
before all other requests. Only a request that fails alone is at fault. The flags are a column of
`RequestTable`.
"""

from __future__ import annotations

import numpy as np

from slipstream_core.scheduler.request_table import Acked, RequestTable
from slipstream_ipc.arrays import Int64s


class SuspectQueue:
    """The suspects among `requests`; false if there are none."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def has(self, row: int) -> bool:
        """True if a request is a suspect."""
        return self._num > 0 and bool(self._requests.is_suspect[row])

    def added(self, row: int) -> None:
        """A request was added; it may come from another core with strikes."""
        self._num += int(self._requests.is_suspect[row])

    def begin(self, row: int) -> None:
        """Make a request a suspect: a step that contained it has failed."""
        if not self._requests.is_suspect[row]:
            self._requests.is_suspect[row] = True
            self._num += 1

    def end(self, rows: Int64s) -> None:
        """Clear these rows, all different: they sampled a token, or are removed."""
        if self._num:
            self._num -= int(self._requests.is_suspect[rows].sum())
            self._requests.is_suspect[rows] = False

    def first(self, acked: Acked) -> int | None:
        """The first in order of those that may run, or None."""
        rows = np.flatnonzero(self._requests.is_suspect)
        rows = self._requests.in_order(rows[self._requests.may_run(rows, acked)])
        return int(rows[0]) if len(rows) else None
