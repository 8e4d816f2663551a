"""The messages that a client's streams owe the server, and their order.

- After each Welcome, the messages due are derived from the streams' states, not from an old queue:
  Submit for a stream not accepted yet (idempotent by its stream id); Resume from the received
  position for one that is accepted, or was not submitted by this client; Abort for one to be ended,
  until the server has acknowledged it.
- While no server is attached nothing is due, and ended streams are not kept for sending.
- A stream that the server does not know is submitted again with the token ids received, or, where
  the first of them are not kept, with their number and checksum.
- Answers to one prompt that are submitted together share one message, with the prompt in it once.
  They are resubmitted one by one.
- A message is made when it is sent, so it reflects the state at that time; messages for streams
  that have ended meanwhile are skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import islice

from msgspec.structs import replace

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.request.parallel_sampling import can_join, joined
from slipstream.request.requests import fits_message
from slipstream_ipc.columns import u32
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import MAX_OTHERS, Abort, ClientToWorker, Resume, Submit

Send = Callable[[ClientToWorker, Abort | None], bool]
_Answer = tuple[StreamState, Submit]


class _Due(Enum):
    REQUEST = auto()
    RESUME = auto()
    ABORT = auto()


class PendingRequests:
    """Messages due, oldest first. `due` and `abandoned` stay the same objects."""

    def __init__(self, table: ClientStreamTable) -> None:
        self._table = table
        self.due: deque[tuple[_Due, StreamState]] = deque()  # not sent yet
        self.abandoned: deque[Abort] = deque()  # of streams that are not in the table any more
        self._is_attached = False

    def add(self, state: StreamState) -> None:
        """Queue the request to run or to resume the stream. It has to be in the table."""
        self._append(_Due.REQUEST, state)

    def abort(self, state: StreamState) -> None:
        """Queue the request to end the stream."""
        self._append(_Due.ABORT, state)

    def abandon(self, abort: Abort | None) -> None:
        """Queue what a stream's end or its leaving requires, if anything."""
        if abort is not None and self._is_attached:
            self.abandoned.append(abort)

    def clear(self) -> None:
        """Drop all messages, as no server is attached; see `refill`. Idempotent."""
        self._is_attached = False
        self.due.clear()
        self.abandoned.clear()

    def refill(self) -> None:
        """Queue all messages anew, after an attach: the server may know none of the streams."""
        self.clear()
        self._is_attached = True
        for state in self._table.streams:
            state.was_resubmitted = False
            is_accepted = state.prompt_ids is not None
            self._append(_Due.RESUME if is_accepted else _Due.REQUEST, state)
            if state.is_abort_wanted:
                self.abort(state)
        self.abandoned.extend(self._table.abandoned)

    def flush(self, send: Send) -> None:
        """Send messages until `send` returns False. The receipt of an abandoned stream's Abort is
        that Abort.
        """
        while self.due:
            due, state = self.due[0]
            others = self._others(state) if due is _Due.REQUEST else []
            if not self._send(due, state, others, send):
                return
            for _ in range(1 + len(others)):
                self.due.popleft()
        while self.abandoned:
            if not send(self.abandoned[0], self.abandoned[0]):
                return
            self.abandoned.popleft()

    def _append(self, due: _Due, state: StreamState) -> None:
        if self._is_attached:
            self.due.append((due, state))

    def _others(self, first: StreamState) -> list[_Answer]:
        """The next due streams that can share one Submit with `first`."""
        submit, others = first.request, list[_Answer]()
        if not isinstance(submit, Submit) or not self._is_new(first):
            return others
        for due, state in islice(self.due, 1, 1 + MAX_OTHERS):
            request = state.request
            if (
                due is not _Due.REQUEST
                or not isinstance(request, Submit)
                or not self._is_new(state)
            ):
                break
            if not can_join(submit, request):
                break
            others.append((state, request))
        return others

    def _is_new(self, state: StreamState) -> bool:
        """True if the stream is in the table and not accepted, and nothing of it was received."""
        if not self._table.has(state) or state.prompt_ids is not None or state.moves > 0:
            return False
        return self._table.position(state) == (0, 0)

    def _send(
        self,
        due: _Due,
        state: StreamState,
        others: Sequence[_Answer],
        send: Send,
    ) -> bool:
        """Send one message; True if it was sent or is obsolete. others: share its Submit."""
        if state.is_over or not self._table.has(state):
            return True
        if due is _Due.ABORT:
            return not state.was_sent or send(Abort(state.stream_id, state.handle), None)
        is_submit = isinstance(state.request, Submit) or state.was_resubmitted
        if due is _Due.REQUEST and is_submit and state.resubmittable is not None:
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
            was_accepted=state.was_accepted or state.prompt_ids is not None,
            num_chars=num_chars,
            moves=state.moves,
            strikes=state.strikes,
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
        scope = state.request.scope
        return Resume(
            state.handle,
            state.stream_id,
            num_chars,
            num_tokens,
            digest,
            checksum,
            scope,
            state.moves,
        )
