"""The open streams of one client: delivers deltas, ends streams and wakes their readers.

- An entry continues a stream exactly at its received position. An entry that begins earlier is cut
  to its new part. One that begins later is a gap: nothing of it is taken, and the caller attaches
  anew. So is one that begins earlier with events of its own, which have no positions to cut at.
- A message whose entries all continue their streams is taken as a whole, by its columns. Any other
  message is taken entry by entry, with the same result.
- A stream is over exactly once: by its End, by a fault, or because the client gave it up. It leaves
  the table then; its handle is free once the server knows, too.
- Until then its submission and its token ids are kept, so that a server that lost the stream can be
  sent it again from its current position. Of a stream that was resumed after its beginning only the
  checksum of the first ids is known, and the server recomputes the stream up to its position.
- Streams of one group receive a whole message at a time (`StreamGroup`), others one delta at a
  time.
- Most messages come one at a time and continue their streams: `DeltaRelay` does with them in C what
  is done here.
- Only the I/O thread writes here. It sets a stream's `is_over` last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import repeat
from struct import unpack
from typing import Any

import numpy as np
from msgspec.structs import replace

from slipstream.answers.tool_calls import with_call_ids
from slipstream.client.streams.delta_relay import (
    Delivery,
    DeltaRelay,
    Ways,
    new_delta_relay,
)
from slipstream.client.streams.received_ids import ReceivedIds
from slipstream.client.streams.received_positions import MessageStreams, ReceivedPositions
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import GroupMember, StreamState
from slipstream.client.streams.unread_deltas import (
    LOOK_EVERY,
    MOST_UNREAD,
    MOST_UNREAD_AT_END,
    merge_unread,
)
from slipstream.compiled import ends_of
from slipstream.delta_batch import DeltaBatch, Logprob
from slipstream.delta_objects import items_of, read_in_c
from slipstream.errors import SlipstreamError, StreamLostError, error_from, of_prompt
from slipstream.outputs import Delta
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import (
    MAX_CALLS,
    Abort,
    Accepted,
    AnswerEvent,
    Deltas,
    End,
    EventKind,
    Fault,
    PromptLogprobs,
    Rejected,
    Resume,
    Submit,
    Superseded,
    UnknownStreams,
)
from slipstream_ipc.transport.link import Link
from slipstream_ipc.transport.local_socket import LocalConnection

# all values of `Deltas.kinds`
_KINDS = frozenset(
    [0, int(EventKind.CONTENT), int(EventKind.REASONING)]
    + [EventKind.CALL_ARGUMENTS | call << 8 for call in range(MAX_CALLS)]
)
MANY = 32  # entries from which looking up columns is faster than entry by entry
_MAX_GAPS = 3  # at one position: then the server has lost output, and not the connection


@dataclass(frozen=True, slots=True)
class CarriedStream:
    """A stream on its way to another table, with what was received of it."""

    state: StreamState
    num_chars: int
    num_tokens: int
    ids: bytes | None  # a u32 column; None where they are not kept


class ClientStreamTable:
    """The streams that are not over, by client handle, and those the server has yet to end."""

    def __init__(
        self,
        group_ids: Iterator[int] | None = None,
        on_over: Callable[[StreamState], None] | None = None,
    ) -> None:
        """group_ids: numbers from 1 on, shared by the tables whose streams may be of one group.
        on_over: called with each stream of this table that is over.
        """
        self._on_over = on_over
        read_in_c(Delta, DeltaBatch, Logprob)
        self._streams: dict[int, StreamState] = {}
        self._abandoned: dict[int, Abort] = {}
        self._received: ReceivedPositions[StreamState] = ReceivedPositions()
        self._kept = ReceivedIds()
        self._next_handle = 0
        self._woken: list[StreamState] = []  # the same list for good, as a relay watches it
        self._groups: dict[int, GroupMember] = {}  # by group_id
        self._num_open: dict[int, int] = {}  # streams of this table, by group_id
        self._group_ids = itertools.count(1) if group_ids is None else group_ids
        self._groups_with_batches: list[
            GroupMember
        ] = []  # groups given messages since the last `wake`

    @property
    def streams(self) -> list[StreamState]:
        """The streams that are not over."""
        return list(self._streams.values())

    def get(self, handle: int) -> StreamState | None:
        """The stream of this handle, if it is not over."""
        return self._streams.get(handle)

    def has(self, state: StreamState) -> bool:
        """True if the stream is in this table and not over."""
        return self._streams.get(state.handle) is state

    @property
    def abandoned(self) -> list[Abort]:
        """The aborts that the server has not acknowledged, of streams that this client no longer
        reads.
        """
        return list(self._abandoned.values())

    def add(self, state: StreamState, carried: CarriedStream | None = None) -> None:
        """Add a stream and set its handle, a u32 that no other stream has now.

        carried: what another table has received of it.
        """
        handle = self._next_handle
        while handle in self._abandoned or not self._received.is_free(handle):
            handle = (handle + 1) % 2**32
        self._next_handle = (handle + 1) % 2**32
        state.handle = handle
        self._streams[handle] = state
        request, begin = state.request, (0, 0)
        if isinstance(request, Resume):
            begin = (request.num_chars, request.num_tokens)
        keeps_ids = begin == (0, 0) or (
            isinstance(request, Resume) and request.checksum is not None
        )
        if carried is not None:
            begin = (carried.num_chars, carried.num_tokens)
        group_id = self._group_id(state.group) if state.group is not None else 0
        self._received.open(handle, state, *begin, group_id=group_id, number=state.index)
        if keeps_ids:
            self._kept.open(handle)
            if carried is not None and carried.ids:
                num = pack_u32([len(carried.ids) // 4])
                self._kept.add(pack_u32([handle]), carried.ids, num)

    def take(self, state: StreamState) -> CarriedStream:
        """Remove a stream that goes on in another table (`add`)."""
        carried = CarriedStream(state, *self.position(state), self._kept.of(state.handle))
        self._remove(state)
        return carried

    def abandon(self, state: StreamState, *, has_moved: bool = False) -> Abort | None:
        """Note that the server has to end the stream, which this table does not have any more.
        None if it does not know the stream. has_moved: to another server.
        """
        if not state.was_sent:
            return None
        abort = Abort(state.stream_id, state.handle, has_moved)
        self._abandoned[state.handle] = abort
        return abort

    def _group_id(self, group: GroupMember) -> int:
        if not group.group_id:
            group.group_id = next(self._group_ids)
        self._groups[group.group_id] = group
        self._num_open[group.group_id] = self._num_open.get(group.group_id, 0) + 1
        return group.group_id

    def position(self, state: StreamState) -> tuple[int, int]:
        """The number of characters and tokens received of a stream that is not over."""
        return self._received.position(state.handle)

    def token_ids(self, state: StreamState) -> bytes | None:
        """All token ids of an open stream as a u32 column; None where it began after zero."""
        return self._kept.of(state.handle) if _begins_at_zero(state) else None

    def checksum(self, state: StreamState) -> int | None:
        """`history_checksum` of an open stream; None where it was resumed without one."""
        ids = self._kept.of(state.handle)
        if ids is None:
            return None
        request = state.request
        before = request.checksum if isinstance(request, Resume) else None
        return history_checksum(ids, before or 0)

    # ---- what the server says ----------------------------------------------------------------

    def accept(self, message: Accepted) -> None:
        """The server has accepted the stream."""
        state = self._streams.get(message.handle)
        if state is not None:
            state.prompt_len = len(u32(message.prompt_ids, "prompt_ids"))
            state.prompt_ids = message.prompt_ids if state.keeps_prompt_ids else b""
            state.changed_turns = message.changed_turns
            state.left_out = message.left_out
            submit, digest = state.resubmittable, message.adapter_digest
            if digest and submit is not None and submit.adapter_digest != digest:
                # elsewhere it goes on with this one, or ends
                state.resubmittable = replace(submit, adapter_digest=digest)
            if state.awaits_acceptance:
                self._woken.append(state)

    def take_prompt(self, message: PromptLogprobs) -> bool:
        """Add log-probabilities of a stream's prompt; False if they leave a gap.

        Raises: ProtocolError.
        """
        state = self._streams.get(message.handle)
        if state is None:
            return True
        if state.prompt_ids is None:
            raise ProtocolError("a prompt's log-probabilities before the prompt")
        if state.prompt_logprobs is None:
            state.prompt_logprobs = PromptPieces()
        num_tokens = state.prompt_len - 1
        return state.prompt_logprobs.add_piece(message.start, message.logprobs, num_tokens)

    def reject(self, message: Rejected) -> Abort | None:
        """Fail a stream that the server has rejected.

        Returns an Abort if the server has to end it still: it was resubmitted and recomputed, and
        the recomputed output differs from what was received.
        """
        state = self._streams.get(message.handle)
        if state is None:
            return None
        self._fail(state, error_from(message.fault))
        if message.fault.code != "diverged" or not state.was_resubmitted:
            return None
        return self.abandon(state)

    def turn_away(self, message: Rejected) -> StreamState | None:
        """The server is leaving and has rejected the stream: submit it again after the next attach.

        A stream that cannot be submitted again, or is being aborted, ends; the others are returned.
        """
        state = self._streams.get(message.handle)
        if state is not None and (state.is_abort_wanted or state.resubmittable is None):
            self.reject(message)
            return None
        if state is not None:
            state.was_sent = False
        return state

    def supersede(self, message: Superseded) -> None:
        """Fail a stream that another reader has taken over."""
        state = self._streams.get(message.handle)
        if state is not None:
            why = "another reader has taken this stream over"
            self._fail(state, error_from(Fault("superseded", why)))

    def lose(self, message: UnknownStreams) -> list[StreamState]:
        """The server does not have these streams. Returns those to submit again; fails the rest."""
        again: list[StreamState] = []
        for handle in message.handles:
            state = self._streams.get(handle)
            if state is None:
                continue
            can_ask = state.resubmittable is not None and not state.was_resubmitted
            if can_ask and not state.is_abort_wanted:
                state.was_resubmitted = True
                again.append(state)
            elif state.prompt_ids is not None:
                self.fail_lost(state)
            else:
                why = "no stream of this id is known: it never was, or it ended and is not kept"
                self._fail(state, error_from(Fault("unknown_stream", why)))
        return again

    def fail_lost(self, state: StreamState) -> None:
        """Fail a stream that the server has lost and that cannot be submitted again."""
        why = "the server does not have this stream any more: submit the request again"
        self._fail(state, StreamLostError(Fault("unknown_stream", why)))

    def deliver_next(self, message: Deltas, now: float) -> bool:
        """Deliver a message that has nothing but tokens, their text and candidates for each of the
        streams of the message before it, behind that. Returns False, without effect, for any other.
        """
        found = self._received.continued(message)
        if found is None:
            return False
        self._kept.add(message.handles, message.token_ids, message.counts)
        self._give(found, DeltaBatch(message, {}, now))
        return True

    def relay(
        self, link: Link[Any], connection: LocalConnection, *queues: Sized
    ) -> DeltaRelay | None:
        """The relay that delivers each such message of a link in one call and wakes its readers,
        while all queues are empty; None without a C compiler.
        """
        ways, watched = Ways(self._delivery, self._make_room, self.wake), (self._woken, *queues)
        return new_delta_relay(link, connection, self._received, self._kept, ways, watched)

    def _delivery(self, found: MessageStreams[StreamState]) -> Delivery:
        group, numbers = self._groups[found.group_id], found.numbers
        first = group.states[numbers[0]]
        assert first.wakeup is not None
        own = group if type(group) is StreamGroup else None
        return Delivery(
            own,
            items_of(Delta) if own is not None else None,
            group.add_batch,
            numbers,
            first.wakeup.ring,  # one wakeup for the whole group
            first,
        )

    def deliver(self, message: Deltas, now: float = 0.0) -> bool:
        """Deliver the entries to their streams; False if one of them leaves a gap.

        now: in seconds of the monotonic clock.

        Raises: ProtocolError where the columns do not match.
        """
        if self.deliver_next(message, now):
            return True
        _check(message)
        if message.events:
            message = self._with_call_ids(message)
        ends: dict[int, End] = {}
        if message.ends:
            ends.update(zip(u32(message.ended).tolist(), message.ends, strict=True))
        batch = DeltaBatch(message, ends, now)
        return self._take_whole(batch) or self._take_each(batch)

    def _with_call_ids(self, message: Deltas) -> Deltas:
        """The message, with an id for each call that begins in it."""
        handles = _numbers(message.handles)
        changed = False
        found: list[tuple[AnswerEvent, ...]] = []
        for entry, events in zip(_numbers(message.event_entries), message.events, strict=True):
            state = self._streams.get(handles[entry])
            own = events if state is None else with_call_ids(events, state.stream_id)
            changed |= own is not events
            found.append(own)
        return replace(message, events=tuple(found)) if changed else message

    # ---- what the client does ----------------------------------------------------------------

    def give_up(self, state: StreamState, error: SlipstreamError | None) -> Abort | None:
        """End the stream on the client's side, with an error or without. Idempotent.

        Returns what is to be said to the server, if anything.
        """
        if state.is_over:
            return None
        state.error = error
        self._finish(state)
        return self.abandon(state)

    def give_up_all(self, error: Callable[[], SlipstreamError]) -> None:
        """End every stream on the client's side, each with a new error."""
        for state in self.streams:
            self.give_up(state, error())

    def forget(self, abort: Abort) -> None:
        """The server has acknowledged the end of an abandoned stream."""
        if abort.handle is not None:
            self._abandoned.pop(abort.handle, None)

    def wake(self) -> None:
        """Ring the wakeups of all streams with news. Called once after each batch."""
        if not self._woken:
            return
        self._groups_with_batches.clear()
        woken = self._woken.copy()
        self._woken.clear()
        for state in woken:
            wakeup = state.wakeup
            if wakeup is not None:
                wakeup.ring(state)

    # ---- deltas ------------------------------------------------------------------------------

    def _take_whole(self, batch: DeltaBatch) -> bool:
        """Take all entries if each continues its stream exactly; otherwise none. Return True if
        done.
        """
        message, received = batch.message, self._received
        found = received.find(message.handles, message.chars, message.tokens)
        if found is None:
            return False
        ends_at = ends_of(message.chars, message.tokens, message.texts, message.counts)
        received.advance(found, *ends_at)
        self._kept.add(message.handles, message.token_ids, message.counts)
        self._give(found, batch)
        return True

    def _give(self, found: MessageStreams[StreamState], batch: DeltaBatch) -> None:
        """Give a message's entries to their streams, which `found` has at the positions behind."""
        states = found.items
        if found.group_id:
            group = self._groups[found.group_id]
            if not batch.ends or all(end.reason != "error" for end in batch.ends.values()):
                self._take_together(group, found.numbers, batch)
                return
            states = [group.states[number] for number in found.numbers]
        texts, num = batch.message.texts, len(batch.message.texts)
        self._divide()
        deltas = list(map(Delta, texts, repeat(batch), range(num)))
        begin = 0
        for entry, end in batch.ends.items():  # in the message's order
            self._queue(states[begin:entry], deltas[begin:entry])
            self._end(states[entry], deltas[entry], end)
            begin = entry + 1
        self._queue(states[begin:], deltas[begin:])
        if num >= MANY:
            passed = u32(batch.message.tokens) ^ u32(found.tokens) >= LOOK_EVERY
            states = [states[entry] for entry in np.flatnonzero(passed).tolist()]
        for state in states:
            if len(state.deltas) > MOST_UNREAD and not state.is_over:
                self._make_room(state)

    def _take_together(self, group: GroupMember, numbers: list[int], batch: DeltaBatch) -> None:
        """Hand a message whose streams are all of one group to that group."""
        group.add_batch(numbers, batch)
        self._groups_with_batches.append(group)
        self._woken.append(group.states[numbers[0]])  # one wakeup for the whole group
        for entry, end in batch.ends.items():
            state = group.states[numbers[entry]]
            state.end = end
            self._finish(state)

    def _divide(self) -> None:
        """Divide the groups' pending batches, so that single deltas are queued after them."""
        for group in self._groups_with_batches:
            group.divide()
        self._groups_with_batches.clear()

    def _queue(self, states: list[StreamState], deltas: list[Delta]) -> None:
        woken = self._woken
        for state, delta in zip(states, deltas, strict=True):
            state.push(delta)
            if state.wakeup is not None and not state.wants_whole:
                woken.append(state)

    def _make_room(self, state: StreamState) -> None:
        merge_unread(state.deltas)
        if state.wakeup is not None and not state.wants_whole:
            self._woken.append(state)  # it may have found the queue empty during the merge

    def _take_each(self, batch: DeltaBatch) -> bool:
        """Take the new part of each entry; False if one of them leaves a gap."""
        message, received = batch.message, self._received
        num = len(message.texts)
        counts = batch.counts or [1] * num
        is_whole = True
        self._divide()
        skips = [0] * num  # tokens of an entry that are not taken
        for entry, (handle, chars, tokens, text, count) in enumerate(
            zip(
                _numbers(message.handles),
                _numbers(message.chars),
                _numbers(message.tokens),
                message.texts,
                counts,
                strict=True,
            )
        ):
            state = self._streams.get(handle)
            if state is None:
                skips[entry] = count
                continue
            num_chars, num_tokens = received.position(handle)
            if chars == num_chars and tokens == num_tokens:
                delta = Delta(text, batch, entry)
                received.move(handle, chars + len(text), tokens + count)
            elif chars > num_chars or tokens > num_tokens:
                is_whole = False
                skips[entry] = count
                self._note_gap(state)
                continue
            else:
                new_text = text[num_chars - chars :]
                skips[entry] = skip = min(num_tokens - tokens, count)
                is_old = not new_text and skip == count
                if is_old and entry not in batch.ends:
                    continue
                if not is_old and batch.own_events.get(entry):
                    is_whole = False
                    skips[entry] = count
                    self._note_gap(state)
                    continue
                delta = Delta(new_text, batch, entry, skip)
                received.move(handle, num_chars + len(new_text), num_tokens + count - skip)
            if batch.ends and entry in batch.ends:
                self._end(state, delta, batch.ends[entry])
                continue
            state.push(delta)
            if state.wakeup is not None and not state.wants_whole:
                self._woken.append(state)
            if len(state.deltas) > MOST_UNREAD:
                self._make_room(state)
        if any(skips):
            ids = b"".join([batch.id_column(entry, skip) for entry, skip in enumerate(skips)])
            self._kept.add(message.handles, ids, pack_u32(np.subtract(counts, skips)))
        else:
            self._kept.add(message.handles, message.token_ids, message.counts)
        return is_whole

    def _note_gap(self, state: StreamState) -> None:
        position = self.position(state)
        state.num_gaps = state.num_gaps + 1 if state.gap_at == position else 1
        state.gap_at = position
        if state.num_gaps >= _MAX_GAPS:
            why = "the server lost a part of this stream: submit the request again"
            self.give_up(state, error_from(Fault("diverged", why)))

    # ---- ends --------------------------------------------------------------------------------

    def _end(self, state: StreamState, last: Delta, end: End) -> None:
        if end.reason == "error":
            why = end.fault or Fault("engine", "the engine failed this stream and did not say why")
            state.error = error_from(why)
        if state.error is None or last.text or last.num_tokens:
            state.push(last)
        if len(state.deltas) > MOST_UNREAD_AT_END:
            merge_unread(state.deltas)
        state.end = end
        self._finish(state)

    def _fail(self, state: StreamState, error: SlipstreamError) -> None:
        """End a stream with an error; without one if an abort was requested."""
        if not state.is_abort_wanted:
            state.error = error
        self._finish(state)

    def _finish(self, state: StreamState) -> None:
        if self.has(state):  # else it was never added
            state.num_chars, state.num_tokens = self.position(state)
            self._remove(state)
        if state.group is not None:
            state.group.release(state)
        if state.error is not None and state.where:
            state.error = of_prompt(state.error, state.where)
        state.is_over = True  # written last, as the reader reads it first
        self._woken.append(state)
        if self._on_over is not None:
            self._on_over(state)

    def _remove(self, state: StreamState) -> None:
        del self._streams[state.handle]
        self._received.close(state.handle)
        self._kept.drop(state.handle)
        if state.group is not None:
            group_id = state.group.group_id
            self._num_open[group_id] -= 1
            if not self._num_open[group_id]:
                del self._num_open[group_id], self._groups[group_id]


def _begins_at_zero(state: StreamState) -> bool:
    request = state.request
    return isinstance(request, Submit) or not (request.num_chars or request.num_tokens)


def _numbers(column: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(column) // 4}I", column)  # faster than an array for a few entries


def _are_kinds(column: bytes, size: int) -> bool:
    return len(column) == size and _KINDS.issuperset(_numbers(column))


def _check(deltas: Deltas) -> None:
    """Check that the columns match, with a fast path for plain messages. Raises: ProtocolError."""
    size = 4 * len(deltas.texts)
    if (
        deltas.counts
        or deltas.ended
        or deltas.ends
        or deltas.logprobs is not None
        or (deltas.kinds and not _are_kinds(deltas.kinds, size))
        or deltas.event_entries
        or deltas.events
        or len(deltas.handles) != size
        or len(deltas.chars) != size
        or len(deltas.tokens) != size
        or len(deltas.token_ids) != size
    ):
        check_deltas(deltas)
