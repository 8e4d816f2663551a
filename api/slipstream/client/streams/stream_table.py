"""The streams of one client, as its I/O thread keeps them: what each has, and how each ends.

Owns: every stream's unread deltas, its one end, who is to be woken. Does not know: sockets, clocks,
who reads.

Rules:
- An entry continues a stream exactly at the reader's position. What begins earlier is cut to what
  is new; what begins later is a gap, of which nothing is taken: the caller attaches anew.
- A message whose entries all go on where their streams are is taken as a whole, by its columns; any
  other one entry by entry, with the same result. So is one of a few streams which are not those of
  the message before: looking them up takes longer.
- A stream is over exactly once: by its End, by a fault, or because its client gave up. Only then
  does it leave the table. Its handle is free when the server knows, too.
- Until then its submission and its ids are kept: with them it can be asked for again, from where it
  is, by whoever has lost it. Of a stream that began later than at zero the first ids are not there:
  their checksum is, and the stream is computed anew up to where it is.
- Streams of one group are handed over a message at a time (`group`), all others a delta at a time.
- The I/O thread alone writes here, and says that a stream is over last of all (`stream_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from struct import unpack

import numpy as np

from slipstream.client.streams.received_ids import ReceivedIds
from slipstream.client.streams.received_positions import MANY, ReceivedPositions, ends_of
from slipstream.client.streams.stream_state import GroupMember, StreamState
from slipstream.client.streams.unread_deltas import (
    LOOK_EVERY,
    MOST_UNREAD,
    MOST_UNREAD_AT_END,
    merge_unread,
)
from slipstream.delta_batch import DeltaBatch
from slipstream.errors import SlipstreamError, StreamLostError, error_from
from slipstream.outputs import Delta
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import (
    Accepted,
    Deltas,
    End,
    Fault,
    PromptLogprobs,
    Rejected,
    Resume,
    Submit,
    Superseded,
    UnknownStreams,
)

_MAX_GAPS = 3  # at one position: then the server, not the way to it, has lost something


class ClientStreamTable:
    """Every stream that is not over, by its handle; and those the server has yet to end."""

    def __init__(self) -> None:
        self._streams: dict[int, StreamState] = {}
        self._abandoned: dict[int, StreamState] = {}
        self._received: ReceivedPositions[StreamState] = ReceivedPositions()
        self._last_handles = b""  # of the last message
        self._kept = ReceivedIds()
        self._next_handle = 0
        self._woken: list[StreamState] = []
        self._groups: dict[int, GroupMember] = {}  # by their group in `received`
        self._num_groups = 0
        self._told: list[GroupMember] = []  # were given messages since wakeups rang last

    @property
    def streams(self) -> list[StreamState]:
        """Those that are not over."""
        return list(self._streams.values())

    @property
    def abandoned(self) -> list[StreamState]:
        """Those over on our side alone: the server is to be told until it has heard."""
        return list(self._abandoned.values())

    def add(self, state: StreamState) -> None:
        """Give the stream a handle that no other one has now; a u32."""
        handle = self._next_handle
        while handle in self._abandoned or not self._received.is_free(handle):
            handle = (handle + 1) % 2**32
        self._next_handle = (handle + 1) % 2**32
        state.handle = handle
        self._streams[handle] = state
        request, begin = state.request, (0, 0)
        if isinstance(request, Resume):
            begin = (request.num_chars, request.num_tokens)
        group_id = self._group_id(state.group) if state.group is not None else 0
        self._received.open(handle, state, *begin, group_id=group_id, number=state.index)
        if begin == (0, 0) or (isinstance(request, Resume) and request.checksum is not None):
            self._kept.open(handle)

    def _group_id(self, group: GroupMember) -> int:
        if not group.group_id:
            self._num_groups += 1
            group.group_id = self._num_groups
        self._groups[group.group_id] = group
        return group.group_id

    def position(self, state: StreamState) -> tuple[int, int]:
        """How many characters and tokens of a stream that is not over have been received."""
        return self._received.position(state.handle)

    def token_ids(self, state: StreamState) -> bytes | None:
        """All token ids of a stream that is not over, a u32 column; None where it began later."""
        return self._kept.of(state.handle) if _begins_at_zero(state) else None

    def checksum(self, state: StreamState) -> int | None:
        """`history_checksum` of a stream that is not over; None where it began without one."""
        ids = self._kept.of(state.handle)
        if ids is None:
            return None
        request = state.request
        before = request.checksum if isinstance(request, Resume) else None
        return history_checksum(ids, before or 0)

    # ---- what the server says ----------------------------------------------------------------

    def accept(self, message: Accepted) -> None:
        """The stream runs."""
        state = self._streams.get(message.handle)
        if state is not None:
            u32(message.prompt_ids, "prompt_ids")
            state.prompt_ids = message.prompt_ids

    def take_prompt(self, message: PromptLogprobs) -> bool:
        """Log-probabilities of a stream's prompt; False if they left a gap."""
        state = self._streams.get(message.handle)
        if state is None:
            return True
        if state.prompt_ids is None:
            raise ProtocolError("a prompt's log-probabilities before the prompt")
        if state.prompt_logprobs is None:
            state.prompt_logprobs = PromptPieces()
        num_tokens = len(state.prompt_ids) // 4 - 1
        return state.prompt_logprobs.add_piece(message.start, message.logprobs, num_tokens)

    def reject(self, message: Rejected) -> StreamState | None:
        """The stream does not run, or not on. The stream, where it runs all the same: it was
        computed again for this reader, whose copy is another one, and is to be ended.
        """
        state = self._streams.get(message.handle)
        if state is None:
            return None
        self._fail(state, error_from(message.fault))
        if message.fault.code != "diverged" or not state.was_resubmitted:
            return None
        self._abandoned[state.handle] = state
        return state

    def turn_away(self, message: Rejected) -> None:
        """The stream does not run there, and is asked for again over the next attach."""
        state = self._streams.get(message.handle)
        if state is not None and (state.is_abort_wanted or not isinstance(state.request, Submit)):
            self.reject(message)
        elif state is not None:
            state.was_sent = False

    def supersede(self, message: Superseded) -> None:
        """Somebody else reads the stream now."""
        state = self._streams.get(message.handle)
        if state is not None:
            why = "another reader has taken this stream over"
            self._fail(state, error_from(Fault("superseded", why)))

    def lose(self, message: UnknownStreams) -> list[StreamState]:
        """The server has none of these. Those that are to be asked for again."""
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
        """The server does not have this stream any more, and cannot be given it."""
        why = "the server does not have this stream any more: submit the request again"
        self._fail(state, StreamLostError(Fault("unknown_stream", why)))

    def deliver(self, message: Deltas) -> bool:
        """Hand the entries to their streams; False if one of them left a gap.

        Raises: ProtocolError where the columns do not fit each other.
        """
        _check(message)
        ends: dict[int, End] = {}
        if message.ends:
            ends.update(zip(u32(message.ended).tolist(), message.ends, strict=True))
        batch = DeltaBatch(message, ends)
        handles = message.handles
        is_worth_it = handles == self._last_handles or len(message.texts) >= MANY
        self._last_handles = handles
        return (is_worth_it and self._take_whole(batch)) or self._take_each(batch)

    # ---- what the client does ----------------------------------------------------------------

    def give_up(self, state: StreamState, error: SlipstreamError | None) -> None:
        """End the stream on our side: by an error, or because nobody reads it. Idempotent."""
        if state.is_over:
            return
        state.error = error
        self._finish(state)
        if state.was_sent:
            self._abandoned[state.handle] = state

    def give_up_all(self, error: Callable[[], SlipstreamError]) -> None:
        """End every stream on our side, each by an error of its own."""
        for state in self.streams:
            self.give_up(state, error())

    def forget(self, state: StreamState) -> None:
        """The server has heard that an abandoned stream is over."""
        self._abandoned.pop(state.handle, None)

    def wake(self) -> None:
        """Ring for every stream with news; once after each batch."""
        if not self._woken:
            return
        self._told.clear()
        woken, self._woken = self._woken, []
        for state in woken:
            wakeup = state.wakeup
            if wakeup is not None:
                wakeup.ring(state)

    # ---- deltas ------------------------------------------------------------------------------

    def _take_whole(self, batch: DeltaBatch) -> bool:
        """Take all entries, if each goes on exactly where its stream is; else nothing."""
        message, received = batch.message, self._received
        found = received.find(message.handles, message.chars, message.tokens)
        if found is None:
            return False
        texts, num = message.texts, len(message.texts)
        ends_at = ends_of(message.chars, message.tokens, texts, message.counts)
        received.advance(found, *ends_at)
        self._kept.add(message.handles, message.token_ids, message.counts)
        states = found.items
        if found.group_id:
            group = self._groups[found.group_id]
            if not batch.ends or all(end.reason != "error" for end in batch.ends.values()):
                self._take_together(group, found.numbers, batch)
                return True
            states = [group.states[number] for number in found.numbers]
        self._divide()
        deltas = list(map(Delta, texts, repeat(batch), range(num)))
        begin = 0
        for entry, end in batch.ends.items():  # in the message's order
            self._queue(states[begin:entry], deltas[begin:entry])
            self._end(states[entry], deltas[entry], end)
            begin = entry + 1
        self._queue(states[begin:], deltas[begin:])
        if num >= MANY:
            passed = u32(message.tokens) ^ u32(ends_at[1]) >= LOOK_EVERY
            states = [states[entry] for entry in np.flatnonzero(passed).tolist()]
        for state in states:
            if len(state.deltas) > MOST_UNREAD and not state.is_over:
                self._make_room(state)
        return True

    def _take_together(self, group: GroupMember, numbers: list[int], batch: DeltaBatch) -> None:
        """Hand over a message whose streams are all of one group."""
        group.add_batch(numbers, batch)
        self._told.append(group)
        self._woken.append(group.states[numbers[0]])  # one rings for all
        for entry, end in batch.ends.items():
            state = group.states[numbers[entry]]
            state.end = end
            self._finish(state)

    def _divide(self) -> None:
        """What comes now comes to each stream alone, and behind what came to them together."""
        for group in self._told:
            group.divide()
        self._told.clear()

    def _queue(self, states: list[StreamState], deltas: list[Delta]) -> None:
        woken = self._woken
        for state, delta in zip(states, deltas, strict=True):
            state.push(delta)
            if state.wakeup is not None and not state.wants_whole:
                woken.append(state)

    def _make_room(self, state: StreamState) -> None:
        merge_unread(state.deltas)
        if state.wakeup is not None and not state.wants_whole:
            self._woken.append(state)  # it may have looked in between

    def _take_each(self, batch: DeltaBatch) -> bool:
        """Take what is new of each entry; False if one of them left a gap."""
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
                if not new_text and skip == count and entry not in batch.ends:
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
        """The server says no more of it; to who asked for its end, that is the end."""
        if not state.is_abort_wanted:
            state.error = error
        self._finish(state)

    def _finish(self, state: StreamState) -> None:
        if self._streams.pop(state.handle, None) is not None:  # one that came late is not there
            state.num_chars, state.num_tokens = self.position(state)
            self._received.close(state.handle)
            self._kept.drop(state.handle)
        if state.group is not None:
            state.group.release(state)
            if not state.group.num_open:
                self._groups.pop(state.group.group_id, None)
        state.is_over = True  # last of all: the reader looks here first
        self._woken.append(state)


def _begins_at_zero(state: StreamState) -> bool:
    request = state.request
    return isinstance(request, Submit) or not (request.num_chars or request.num_tokens)


def _numbers(column: bytes) -> tuple[int, ...]:
    return unpack(f"<{len(column) // 4}I", column)  # of a few, quicker than an array


def _check(deltas: Deltas) -> None:
    """ProtocolError where the columns do not fit each other; a plain message is seen to at once."""
    size = 4 * len(deltas.texts)
    if (
        deltas.counts
        or deltas.ended
        or deltas.ends
        or deltas.logprobs is not None
        or len(deltas.handles) != size
        or len(deltas.chars) != size
        or len(deltas.tokens) != size
        or len(deltas.token_ids) != size
    ):
        check_deltas(deltas)
