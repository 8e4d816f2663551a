"""Who runs alone, because a step with it in it has failed.

Owns: how many are on probation, who of them is next. The column that says who is lies with the
others (`request_table`). Does not know: plans, what is in flight.

Rules:
- Who is on probation runs alone, with nothing else in flight, until it has sampled a token; those
  that are run one after another, before all others. A step that fails puts its requests there,
  and whatever was launched behind it counts for nothing of theirs. Only who fails alone is at
  fault.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.scheduler.request_table import Acked, RequestTable

Int64s = npt.NDArray[np.int64]


class SuspectQueue:
    """Those of `requests` that are on probation; false where nobody is."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def has(self, row: int) -> bool:
        """Whether a request is on probation."""
        return self._num > 0 and bool(self._requests.on_probation[row])

    def came(self, row: int) -> None:
        """A request was added; it may come from another core with a strike."""
        self._num += int(self._requests.on_probation[row])

    def begin(self, row: int) -> None:
        """A step with this request in it has failed."""
        if not self._requests.on_probation[row]:
            self._requests.on_probation[row] = True
            self._num += 1

    def end(self, rows: Int64s) -> None:
        """These have sampled a token, or go; all different."""
        if self._num:
            self._num -= int(self._requests.on_probation[rows].sum())
            self._requests.on_probation[rows] = False

    def first(self, acked: Acked) -> int | None:
        """The first of those that may run."""
        rows = np.flatnonzero(self._requests.on_probation)
        rows = self._requests.in_order(rows[self._requests.may_run(rows, acked)])
        return int(rows[0]) if len(rows) else None
