"""The core's C; each part stands in a `.c` file beside the module that uses it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc._native import TokenPages
from slipstream_ipc.arrays import Bools, Int64s
from slipstream_ipc.history.cursors import Cursors
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.link import Link

class NgramIndex:
    """By row, what followed its last tokens when they occurred before: the longest of `least` to
    `most` tokens, and of equal ones the latest. Raises ValueError if not 1 <= least <= most <= 32.
    """

    def __init__(self, least: int, most: int) -> None: ...
    def open(self, row: int) -> None:
        """Begin a row's history; one that it had is forgotten."""

    def close(self, row: int) -> None:
        """Forget a row's history, if it has one."""

    def append(
        self, rows: Int64s, counts: Int64s, ids: npt.NDArray[np.uint32], is_sampled: bool
    ) -> None:
        """Take in `counts` ids of each row; rows that are not open are left out. is_sampled: a row
        whose token was foreseen scores by whether it is right.
        """

    def scores(self, rows: Int64s, out: npt.NDArray[np.float64]) -> int:
        """Write each row's share of right ones among the tokens foreseen of late, 0 where the next
        one is not; how many are.
        """

    def draft(self, rows: Int64s, counts: Int64s, out: Int64s) -> None:
        """Write the next `counts` tokens of each row as they are foreseen, row by row.

        Raises ValueError where a row with a count has none, and where `out` has another length.
        """

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
