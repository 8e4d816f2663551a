"""Requests on probation: they run alone, because a step that contained them has failed.

A request on probation runs alone, with nothing else in flight, until it has sampled a token, and
before all other requests. Only a request that fails alone is at fault. The flags are a column of
`RequestTable`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.scheduler.request_table import Acked, RequestTable

Int64s = npt.NDArray[np.int64]


class SuspectQueue:
    """Those of `requests` that are on probation; false if there are none."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def has(self, row: int) -> bool:
        """Whether a request is on probation."""
        return self._num > 0 and bool(self._requests.on_probation[row])

    def came(self, row: int) -> None:
        """A request was added; it may come from another core with strikes."""
        self._num += int(self._requests.on_probation[row])

    def begin(self, row: int) -> None:
        """Put a request on probation: a step that contained it has failed."""
        if not self._requests.on_probation[row]:
            self._requests.on_probation[row] = True
            self._num += 1

    def end(self, rows: Int64s) -> None:
        """End the probation of these rows, all different: they sampled a token, or are removed."""
        if self._num:
            self._num -= int(self._requests.on_probation[rows].sum())
            self._requests.on_probation[rows] = False

    def first(self, acked: Acked) -> int | None:
        """The first in order of those that may run, or None."""
        rows = np.flatnonzero(self._requests.on_probation)
        rows = self._requests.in_order(rows[self._requests.may_run(rows, acked)])
        return int(rows[0]) if len(rows) else None
