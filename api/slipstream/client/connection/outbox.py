"""What a client has to tell its server.

Owns: which message is due for which stream, and in which order. Does not know: sockets, clocks.

Rules:
- Nothing is sent from a queue of the past: after each Welcome what is due follows from the
  streams' states. Not accepted: Submit (idempotent by its stream id). Accepted, or not our own
  submission: Resume, from what was received. To be ended: Abort, until the server has acknowledged
  it.
- While no server is there nothing is due, and what nobody waits for any more is kept by nobody.
- Of a stream that was asked for and that the server does not know: Submit again, with the ids that
  were received, or, where the first of them are not kept, with their number and checksum.
- Answers to one prompt that were asked for together are so in one message, and the prompt is in it
  once. Each is asked for again alone.
- A body is made when it leaves, so it says what is true then; what an end has made idle is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import islice

from msgspec.structs import replace

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.requests import can_join, fits_message, joined
from slipstream_ipc.columns import u32
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import MAX_OTHERS, Abort, ClientToWorker, Resume, Submit

Send = Callable[[ClientToWorker, StreamState | None], bool]
_Ask = tuple[StreamState, Submit]


class _Due(Enum):
    ASK = auto()
    RESUME = auto()
    ABORT = auto()


class Outbox:
    """Messages due, oldest first."""

    def __init__(self, table: ClientStreamTable) -> None:
        self._table = table
        self._due: deque[tuple[_Due, StreamState]] = deque()
        self._is_attached = False

    def ask(self, state: StreamState) -> None:
        """The server is to run the stream, which is in the table, or to go on with it."""
        self._add(_Due.ASK, state)

    def abort(self, state: StreamState) -> None:
        """The server is to end the stream."""
        self._add(_Due.ABORT, state)

    def clear(self) -> None:
        """No server is there; the next one is told by `refill`. Idempotent."""
        self._is_attached = False
        self._due.clear()

    def refill(self) -> None:
        """Begin anew, with a server that may know nothing of what was sent before."""
        self.clear()
        self._is_attached = True
        for state in self._table.streams:
            state.was_resubmitted = False
            is_accepted = state.prompt_ids is not None
            self._add(_Due.RESUME if is_accepted else _Due.ASK, state)
            if state.is_abort_wanted:
                self.abort(state)
        for state in self._table.abandoned:
            self.abort(state)

    def flush(self, send: Send) -> None:
        """Send what is due, until `send` says no. A receipt names a stream to be forgotten."""
        while self._due:
            due, state = self._due[0]
            others = self._others(state) if due is _Due.ASK else []
            if not self._send(due, state, others, send):
                return
            for _ in range(1 + len(others)):
                self._due.popleft()

    def _add(self, due: _Due, state: StreamState) -> None:
        if self._is_attached:
            self._due.append((due, state))

    def _others(self, first: StreamState) -> list[_Ask]:
        """The streams next in line that one Submit may ask for together with `first`."""
        submit, others = first.request, list[_Ask]()
        if not isinstance(submit, Submit) or not self._is_new(first):
            return others
        for due, state in islice(self._due, 1, 1 + MAX_OTHERS):
            request = state.request
            if due is not _Due.ASK or not isinstance(request, Submit) or not self._is_new(state):
                break
            if not can_join(submit, request):
                break
            others.append((state, request))
        return others

    def _is_new(self, state: StreamState) -> bool:
        """Whether the server has yet to accept it, and nothing of it is here."""
        is_over = state.is_over or state.prompt_ids is not None
        return not is_over and self._table.position(state) == (0, 0)

    def _send(
        self,
        due: _Due,
        state: StreamState,
        others: Sequence[_Ask],
        send: Send,
    ) -> bool:
        """Whether the message is dealt with: sent, or idle. `others` are asked for with it."""
        if due is _Due.ABORT:
            abort = Abort(state.stream_id, state.handle)
            return not state.was_sent or send(abort, state if state.is_over else None)
        if state.is_over:
            return True
        is_submit = isinstance(state.request, Submit) or state.was_resubmitted
        if due is _Due.ASK and is_submit and state.resubmittable is not None:
            submit = self._submit(state, state.resubmittable)
            if submit.was_accepted and not fits_message(submit):
                self._table.fail_lost(state)
                return True
            if others:
                submit = joined(submit, [self._submit(*each) for each in others])
            is_sent = send(submit, None)
            for other, _ in others:
                other.was_sent |= is_sent
        else:
            is_sent = send(self._resume(state), None)
        state.was_sent |= is_sent
        return is_sent

    def _submit(self, state: StreamState, submit: Submit) -> Submit:
        num_chars, num_tokens = self._table.position(state)
        submit = replace(
            submit,
            handle=state.handle,
            was_accepted=state.prompt_ids is not None,
            num_chars=num_chars,
        )
        ids = self._table.token_ids(state)
        if ids is not None:
            return replace(submit, output_ids=ids)
        return replace(submit, num_tokens=num_tokens, checksum=self._table.checksum(state))

    def _resume(self, state: StreamState) -> Resume:
        num_chars, num_tokens = self._table.position(state)
        ids = self._table.token_ids(state)
        digest = None if ids is None else history_digest(u32(ids))
        checksum = self._table.checksum(state) if digest is None else None
        return Resume(state.handle, state.stream_id, num_chars, num_tokens, digest, checksum)
