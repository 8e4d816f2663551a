"""What a client has to tell its server.

Owns: which message is due for which stream, and in which order. Does not know: sockets, clocks.

Rules (STREAMS I):
- Nothing is sent from a queue of the past: after each Welcome what is due follows from the
  streams' states. Not accepted: Submit (idempotent by its stream id). Accepted: Resume, from what
  was received. To be ended: Abort, until the server has acknowledged it.
- A body is made when it leaves, so it says what is true then; what an end has made idle is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import msgspec

from slipstream.stream_table import StreamState, StreamTable
from slipstream_ipc.messages import Abort, ClientToWorker, Resume

Send = Callable[[ClientToWorker, StreamState | None], bool]


class _Due(Enum):
    SUBMIT = auto()
    RESUME = auto()
    ABORT = auto()


class Outbox:
    """Messages due, oldest first."""

    def __init__(self, table: StreamTable) -> None:
        self._table = table
        self._due: deque[tuple[_Due, StreamState]] = deque()

    def submit(self, state: StreamState) -> None:
        """The server is to run the stream, which is in the table."""
        self._due.append((_Due.SUBMIT, state))

    def abort(self, state: StreamState) -> None:
        """The server is to end the stream."""
        self._due.append((_Due.ABORT, state))

    def refill(self) -> None:
        """Begin anew, with a server that may know nothing of what was sent before."""
        self._due.clear()
        for state in self._table.streams:
            is_accepted = state.prompt_ids is not None
            self._due.append((_Due.RESUME if is_accepted else _Due.SUBMIT, state))
            if state.is_abort_wanted:
                self.abort(state)
        for state in self._table.abandoned:
            self.abort(state)

    def flush(self, send: Send) -> None:
        """Send what is due, until `send` says no. A receipt names a stream to be forgotten."""
        while self._due:
            due, state = self._due[0]
            if not _send(due, state, send):
                return
            self._due.popleft()


def _send(due: _Due, state: StreamState, send: Send) -> bool:
    """Whether the message is dealt with: sent, or idle."""
    stream_id = state.submit.stream_id
    if due is _Due.ABORT:
        return not state.was_sent or send(Abort(stream_id), state if state.is_over else None)
    if state.is_over:
        return True
    if due is _Due.RESUME:
        return send(Resume(state.handle, stream_id, state.num_chars, state.num_tokens), None)
    state.was_sent |= send(msgspec.structs.replace(state.submit, handle=state.handle), None)
    return state.was_sent
