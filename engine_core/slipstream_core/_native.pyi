"""The core's C; each part stands in a `.c` file beside the module that uses it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc._native import TokenPages
from slipstream_ipc.history.cursors import Cursors
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.link import Link

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

class ReportReader:
    """Reads the reports of one attach; see `slipstream_core.workers.report_reader`."""

    step: int

    def __init__(self, link: Link[Any], step: int) -> None: ...
    def take(self, data: bytes, now: float) -> bool: ...

class SentRows:
    """The receipt of a step that was sent. rows, ends: u32 columns of its rows and of where their
    tokens end. life: see `Cursors`.
    """

    rows: bytes
    ends: bytes
    life: int

class StepSender:
    """Sends steps over a link, until the columns of the cursors grow or the session ends."""

    def __init__(
        self,
        link: Link[Any],
        cursors: Cursors,
        columns: tuple[Int64s, Int64s, Bools, Int64s],
        tokens: TokenLog,
        write: Callable[[bytes], bool],
        possible_ends: tuple[Bools, Bools],
        budget: int,
    ) -> None:
        """columns: of the cursors. possible_ends: `PossibleEnds.columns`. budget: tokens of a
        message.
        """

    def send(self, rows: RowSet, step: int, deferred: list[LogprobColumns] | None) -> int:
        """Send a step that gave `rows` the tokens that their history got last, and is all there is
        to be sent. Returns SENT, … or 0, if a row is not open, the tokens exceed the budget, credit
        is missing, the connection does not take it, or an id may end one of some streams.

        deferred: the columns of a token of each row, where they have log-probabilities; then 0,
        too, if the last ones are not new, or a row got several tokens.
        """

class SpanCompleter:
    """Takes steps with several tokens to a row into these histories and columns of requests."""

    def __init__(
        self,
        pages: TokenPages,
        columns: tuple[Int64s, Int64s, Int64s, Int64s, Int64s, Int64s, Bools],
    ) -> None:
        """columns: generation, limit, logprob_limit, known, computed, slot, may_need_mask."""

    def complete(
        self,
        rows: Int64s,
        generations: Int64s,
        kv_lens: npt.NDArray[np.int32],
        counts: Int64s,
        ids: npt.NDArray[np.uint32],
        num_free: int,
        has_later: bool,
    ) -> tuple[int, bool] | None:
        """Take in a step; the pages then left of the `num_free` free ones, and whether a generation
        has begun. None, without effect, for what `span_completer.SpanCompleter` leaves alone.
        """
