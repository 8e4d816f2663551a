"""A step that gave several tokens to its rows is taken in by one call of C (`span_completer.c`),
where `Scheduler._complete_several` has nothing to decide: all rows are alive, below their limits,
and need no masks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core import _native
from slipstream_core.scheduler.request_table import RequestTable
from slipstream_ipc._native import TokenPages
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet


class SpanCompleter:
    """Takes such steps into the histories and the columns of the requests."""

    def __init__(self, requests: RequestTable, tokens: TokenLog) -> None:
        self._requests = requests
        self._tokens = tokens
        # of these pages and generations
        self._made: tuple[TokenPages, Int64s, _native.SpanCompleter] | None = None

    def complete(
        self,
        rows: RowSet,
        generations: Int64s,
        kv_lens: npt.NDArray[np.int32],
        counts: Int64s,
        ids: npt.NDArray[np.uint32],
        *,
        has_later: bool,
    ) -> bool:
        """Take in `counts[i]` ids of each of `rows`, in whose `generations` the step was launched;
        False, without effect, if that is not all that there is to do.

        kv_lens: [n], tokens of the rows in the cache behind the step. has_later: steps in flight
        behind it are void for the rows that got several tokens.
        """
        tokens, requests = self._tokens, self._requests
        pages = tokens.pages
        if pages is None or len(kv_lens) != len(rows):
            return False
        made = self._made
        if made is None or made[0] is not pages or made[1] is not requests.generation:
            columns = (
                requests.generation,
                requests.limit,
                requests.logprob_limit,
                requests.known,
                requests.computed,
                requests.slot,
                requests.may_need_mask,
            )
            completer = _native.SpanCompleter(pages, columns)
            made = self._made = pages, requests.generation, completer
        table = tokens.table
        found = made[2].complete(
            rows.array, generations, kv_lens, counts, ids, table.num_free, has_later
        )
        if found is None:
            return False
        table.num_free, has_begun = found
        requests.num_ended += has_begun
        tokens.latest = rows, ids, counts
        return True
