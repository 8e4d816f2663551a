"""The retention of streams without a reader, and of the ids of forgotten ones.

- A stream is given up at its latest `expires_at`; `inf` means never. One that has not ended by then
  has to be aborted by the caller.
- If ended streams together take more than _MAX_ENDED_BYTES, the oldest of those that no reader is
  still receiving are given up at once.
- A stream that comes back from another replica has a higher `moves`: it is another one here.
- Ids of forgotten streams are remembered for long, so that an ended stream is not run again. The
  core remembers them too, and sends them to the next worker. Ids aborted before they were accepted
  are remembered by this worker alone, and so are the scopes of forgotten ones.
- A stream that was deleted is remembered with its scope, as forgotten however often it moves, where
  it was and where another replica may bring it. Nothing keeps it once its reader has its end.
"""

from __future__ import annotations

import heapq
from math import inf

from slipstream_ipc.messages import Admit, Fault, SamplingParams, StructuredOutputs
from slipstream_ipc.validation.structured_output import json_as_text
from slipstream_worker.streams.stream import Stage, WorkerStream, WorkerStreamTable
from slipstream_worker.streams.tombstones import Tombstones

_MAX_ENDED_BYTES = 256 * 2**20  # of ended streams, kept for readers that attach again
_OBJECT_BYTES = 40  # a number and its place in a tuple, or half of one in a dict
_MIN_TOMBSTONES = 2**16
_MIN_EXPIRING = 1024
MIN_UNREAD_S = 10.0
_MIN_ABORTED = 2**12
_MIN_SCOPED = 2**13
_MIN_DELETED = 2**12
ABORTED = Fault("bad_request", "aborted before it was accepted")
_FORGOTTEN = Fault("unknown_stream", "this stream has ended, and its output is no longer kept")


def request_bytes(registration: Admit) -> int:
    """The memory that a stream's request takes, without its outputs."""
    params, answer = registration.spec.params, registration.derived.answer
    num_bytes = len(registration.prompt_ids) + len(registration.derived.bad_word_ids)
    num_bytes += len(registration.derived.prediction_ids)
    num_bytes += len(registration.derived.frame) + (0 if answer is None else len(answer.tools))
    return num_bytes + _listed_bytes(params) + _form_bytes(params.structured_outputs)


def _listed_bytes(params: SamplingParams) -> int:
    ids = len(params.allowed_token_ids or ()) + 2 * len(params.logit_bias or ())
    texts = params.bad_words or ()
    stops = (params.stop,) if isinstance(params.stop, str) else params.stop
    return _OBJECT_BYTES * ids + sum(map(len, texts)) + sum(map(len, stops))


def _form_bytes(outputs: StructuredOutputs | None) -> int:
    if outputs is None:
        return 0
    schema = json_as_text(outputs).json
    texts = (schema, outputs.regex, outputs.grammar, *(outputs.choice or ()))
    return sum(len(each) for each in texts if each)


class Retention:
    """The streams of one worker that are to be given up. Its user keeps `now` current (monotonic,
    s).
    """

    def __init__(self, streams: WorkerStreamTable, grace_s: float) -> None:
        self._streams = streams
        self._expiring: list[tuple[float, int, bytes]] = []  # heap: time, serial number, stream id
        self._serial = 0
        self._ended: dict[WorkerStream, None] = {}  # oldest first
        self._ended_bytes = 0
        self._tombstones = Tombstones(_MIN_TOMBSTONES)
        # while their prompts were being tokenised; apart, as any client can abort ids that never
        # were, and would push out those that matter (decision 007)
        self._aborted = Tombstones(_MIN_ABORTED)
        self._scoped = Tombstones(_MIN_SCOPED)  # ids that have a scope, alone and with it
        self._deleted = Tombstones(_MIN_DELETED)  # with their scopes
        self.grace_s = grace_s
        self.now = 0.0

    def expire_at(self, stream: WorkerStream, when: float) -> None:
        """Give the stream up at `when`, unless it is read again before."""
        stream.expires_at = when
        if len(self._expiring) >= 2 * len(self._streams) + _MIN_EXPIRING:
            self._drop_withdrawn()
        self._serial += 1  # ties in the heap never compare ids
        heapq.heappush(self._expiring, (when, self._serial, stream.stream_id))

    def expire_after_grace(self, stream: WorkerStream) -> None:
        """Give the stream up after the grace time, unless it is read again before. A running stream
        is kept for at least MIN_UNREAD_S, as long as clients take to attach again; one in the
        background is not given up before it has ended.
        """
        if not stream.needs_reader:
            return
        least_s = 0.0 if stream.stage is Stage.ENDED else MIN_UNREAD_S
        self.expire_at(stream, self.now + max(least_s, self.grace_s))

    def expire_once_read(self, stream: WorkerStream) -> None:
        """Give a stream of which nothing is owed to a reader up after the grace time, and one that
        was deleted now.
        """
        if stream.is_deleted and stream.stage is Stage.ENDED:
            self.expire_at(stream, self.now)
        else:
            self.expire_after_grace(stream)

    def ended(self, stream: WorkerStream, held_bytes: int) -> None:
        """A stream has ended; it takes `held_bytes` of memory until it is forgotten."""
        stream.held_bytes = held_bytes
        self._ended_bytes += held_bytes
        self._ended[stream] = None

    def removed(self, stream: WorkerStream) -> None:
        """A stream's memory is free again."""
        self._ended_bytes -= stream.held_bytes
        stream.held_bytes = 0
        self._ended.pop(stream, None)

    def take_due(self) -> list[WorkerStream]:
        """The streams whose time has come. Their ids are remembered as forgotten from now on."""
        self._make_room()
        due = []
        while self._expiring and self._expiring[0][0] <= self.now:
            stream = self._streams.get(heapq.heappop(self._expiring)[2])
            if stream is not None and stream.expires_at <= self.now:
                stream.expires_at = inf  # the heap has an entry for each `expire_at`
                self.add_tombstone(stream.stream_id, stream.moves)
                self._remember_scope(stream)
                due.append(stream)
        return due

    def add_tombstone(self, stream_id: bytes, moves: int = 0) -> None:
        """Remember a stream that is forgotten, or that was by an earlier worker."""
        self._tombstones.add(stream_id, moves)

    def aborted(self, stream: WorkerStream) -> None:
        """Remember a stream that was aborted before it was accepted."""
        self._aborted.add(_key_of(stream.stream_id, stream.moves))
        self._remember_scope(stream)

    def deleted(self, stream_id: bytes, scope: bytes) -> None:
        """Remember a stream that was deleted, whether it was here or not."""
        self._deleted.add(stream_id + scope)

    def why_gone(self, stream_id: bytes, moves: int = 0, scope: bytes = b"") -> Fault | None:
        """The fault for a request of a stream that is gone; None if it is not known to be."""
        if _key_of(stream_id, moves) in self._aborted:
            return ABORTED
        is_gone = moves <= self._tombstones.moves_of(stream_id)
        return _FORGOTTEN if is_gone or stream_id + scope in self._deleted else None

    def has_been(self, stream_id: bytes, scope: bytes = b"") -> bool:
        """True if a stream of this id and scope is over and forgotten. The scope is unknown for ids
        that an earlier worker has forgotten: only messages without a scope are told.
        """
        if scope or stream_id in self._scoped:
            return bool(scope) and stream_id + scope in self._scoped
        return self.why_gone(stream_id) is not None

    def _remember_scope(self, stream: WorkerStream) -> None:
        if stream.scope:
            self._scoped.add(stream.stream_id)
            self._scoped.add(stream.stream_id + stream.scope)

    def clear(self) -> None:
        """Drop all streams; remembered ids stay."""
        self._ended.clear()
        self._ended_bytes = 0

    def _drop_withdrawn(self) -> None:
        """Drop outdated heap entries: a stream may be left and read again very often."""
        valid = {
            (when, stream_id): number
            for when, number, stream_id in self._expiring
            if (stream := self._streams.get(stream_id)) is not None and stream.expires_at == when
        }
        self._expiring = [(when, number, stream_id) for (when, stream_id), number in valid.items()]
        heapq.heapify(self._expiring)

    def _make_room(self) -> None:
        """Give up the oldest ended streams while they take too much memory together."""
        if self._ended_bytes <= _MAX_ENDED_BYTES:
            return
        for stream in list(self._ended):
            if self._ended_bytes <= _MAX_ENDED_BYTES:
                break
            if stream.expires_at != inf:  # else its reader has not acknowledged its end
                self.removed(stream)
                self.expire_at(stream, self.now)


def _key_of(stream_id: bytes, moves: int) -> bytes:
    return stream_id + moves.to_bytes(4, "little") if moves else stream_id
