"""Steps in which the same rows get a token each, as in the step before, are sent in C
(`plain_step.c`): written as a frame, counted and sent in one call, in which acknowledgements of
earlier ones are taken in, too.

A `PlainStepSender` sends what `WorkerSender` would send, to the byte, or leaves the step alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

from slipstream_ipc._native import LinkNumbers, StreakCounts
from slipstream_ipc.history.streak import Streak
from slipstream_ipc.native.extension import IPC_HEADERS, load_extension
from slipstream_ipc.row_set import RowSet

# what becomes of a step: 0 if it was not sent, else SENT, with AWAITED if its check is awaited, and
# RECEIPTS if the link has receipts left to be taken
SENT, AWAITED, RECEIPTS = 1, 2, 4


class PlainStepSender(Protocol):
    """Sends the steps of a streak, until something else is to be sent or the session ends."""

    streak: Streak

    def send(self, rows: RowSet | None, step: int) -> int:
        """Send a step that gave `rows` a token each and is all there is to be sent. Returns SENT, …
        or 0, if they are not the streak's rows, it is over, credit or log-probabilities are
        missing, the connection does not take it, or an id may end one of some streams.
        """
        ...


@cache
def native_plain_step() -> Any:
    """The C extension, prepared; None where it, or what it works on, is not to be had."""
    source = Path(__file__).with_name("plain_step.c")
    native: Any = load_extension("plain_step", source, IPC_HEADERS)
    if native is not None:
        native.prepare(LinkNumbers, StreakCounts)
    return native
