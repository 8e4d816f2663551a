"""The core's C; each part stands in a `.c` file beside the module that uses it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.history.streak import Streak
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.link import Link

class ReportReader:
    """Reads the reports of one attach; see `slipstream_core.workers.report_reader`."""

    step: int

    def __init__(self, link: Link[Any], step: int) -> None: ...
    def take(self, data: bytes, now: float) -> bool: ...

class PlainStepSender:
    """Sends the steps of a streak, until something else is to be sent or the session ends."""

    streak: Streak

    def __init__(
        self,
        link: Link[Any],
        streak: Streak,
        tokens: TokenLog,
        rows: RowSet,
        packed_rows: bytes,
        write: Callable[[bytes], bool],
        by_any: bool,
        marks: npt.NDArray[np.bool_],
        deferred: list[LogprobColumns] | None,
    ) -> None: ...
    def send(self, rows: RowSet | None, step: int) -> int:
        """Send a step that gave `rows` a token each and is all there is to be sent. Returns SENT, …
        or 0, if they are not the streak's rows, it is over, credit or log-probabilities are
        missing, the connection does not take it, or an id may end one of some streams.
        """
