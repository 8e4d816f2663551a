"""The streams a worker serves, and the tables that find them by id and by the core's row.

A `WorkerStream` holds a stream's registration, output, stage and reader. Its tokens are kept in
`stream_columns`, under its worker row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from slipstream_ipc.arrays import Int64s
from slipstream_ipc.columns import u32
from slipstream_ipc.history.text_log import START, TextCursor
from slipstream_ipc.messages import Admit, End, KeepOptions, RequestSpec, Submit
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.stream_trace import StreamTrace

_MAX_PAST_READERS = 64
_NOTHING = (b"", NO_ROWS, True)


class Stage(Enum):
    """The stages of a stream, in order."""

    RENDERING = "rendering"  # its prompt is being tokenised
    SUBMITTED = "submitted"  # sent to the core
    RUNNING = "running"  # the core has given it a row
    ENDED = "ended"  # its end is known; kept for readers that attach again


class ResumePoint(NamedTuple):
    """The end of a reader's copy of a stream. digest, checksum: of the copy's tokens, if known."""

    num_chars: int
    num_tokens: int
    digest: int | None = None
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Reader:
    """The reader of a stream, and how far the stream has been sent to it.

    cursor: position sent so far, for a slow row; that of a fast row is in the columns.
    is_waiting: nothing is sent, because the end of the reader's copy is unknown or lies ahead of
    this worker's.
    awaited: in the latter case, the position that has to be reached first.
    """

    client: bytes  # identity
    handle: int
    cursor: TextCursor = START
    is_waiting: bool = False
    awaited: ResumePoint | None = None

    @property
    def is_listening(self) -> bool:
        """True if the reader has asked for the stream since it attached."""
        return not self.is_waiting or self.awaited is not None

    def matches(self, client: bytes, handle: int) -> bool:
        """True if the reader is this client, under this handle."""
        return (self.client, self.handle) == (client, handle)


@dataclass(slots=True, eq=False)
class WorkerStream:
    """One stream. `registration`, `output` and a row exist once the prompt is rendered."""

    stream_id: bytes
    stage: Stage
    submit: Submit | None = None  # until the prompt is rendered
    asked: RequestSpec | None = None  # the same; then it is the registration's
    fingerprint: bytes = b""  # of the submission
    interval: int = 1
    registration: Admit | None = None
    output: StreamOutput | None = None
    worker_row: int = 0  # in `StreamColumns`; 0: none
    core_row: int | None = None
    reader: Reader | None = None
    owner: bytes = b""  # identity of the client that submitted it, if that was to this worker
    past_readers: deque[tuple[bytes, int]] = field(  # superseded, by identity and handle
        default_factory=lambda: deque(maxlen=_MAX_PAST_READERS)
    )
    logprobs_from: int = 0  # first token with log-probabilities, if they were asked for
    pending_end: End | None = None  # a replayed end, until its tokens have arrived
    expires_at: float = inf  # when it is to be ended and forgotten; inf while it is read
    held_bytes: int = 0  # memory it takes, once it has ended
    strikes: int = 0  # cores that crashed while running it, without progress in between
    struck_at: int = 0  # number of tokens at the last of these crashes
    arrived_at: float = 0.0  # when it was submitted; 0.0: to another worker, or its end was sent
    first_at: float = 0.0  # when its first tokens were sent; 0.0: not yet
    first_tokens: int = 0  # number of tokens sent then
    num_answers: int = 0  # of its request, to be counted once the core has accepted it; 0: nothing
    is_counted: bool = False  # its end was decided and counted by another worker
    is_given_up: bool = False  # to be aborted as soon as it is registered
    is_deleted: bool = False  # for good: its reader gets what is under way, and no other reads it
    trace: StreamTrace | None = None  # until its spans are made; None unless it is traced

    @property
    def spec(self) -> RequestSpec | None:
        """The request for the stream; None where it was restored and has no registration yet."""
        return self.asked if self.registration is None else self.registration.spec

    @property
    def label(self) -> str:
        """The client's name for the request, which logs show as its id."""
        spec = self.spec
        return "" if spec is None else spec.label

    @property
    def keep(self) -> KeepOptions | None:
        """The options for keeping the stream's answer; None: it is not kept, or has been made."""
        spec = self.spec
        return None if spec is None else spec.keep

    def keep_no_more(self) -> None:
        """Its answer is kept, or is not to be any more."""
        if self.asked is not None:
            self.asked = replace(self.asked, keep=None)
        if self.registration is not None:
            spec = replace(self.registration.spec, keep=None)
            self.registration = replace(self.registration, spec=spec)

    @property
    def moves(self) -> int:
        """The number of times that the stream has changed its replica."""
        request = self.submit if self.registration is None else self.registration.begun
        return 0 if request is None else request.moves

    @property
    def scope(self) -> bytes:
        """The scope whose messages alone may read and end it; empty: those of any."""
        spec = self.spec
        return b"" if spec is None else spec.scope

    def is_open_to(self, scope: bytes) -> bool:
        """True if messages with this scope may read and end it."""
        return not self.is_deleted and self.scope in (b"", scope)

    @property
    def needs_reader(self) -> bool:
        """True if the stream is given up when nothing reads it."""
        keep = self.keep
        return self.stage is Stage.ENDED or keep is None or not keep.is_background


class WorkerStreamTable:
    """Streams by id and by core row."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, WorkerStream] = {}
        self._by_row: dict[int, WorkerStream] = {}
        self._worker_rows: Int64s = np.zeros(64, np.int64)  # by core row; 0: none, or ended
        self._last = _NOTHING  # core rows of the last lookup, and what it returned
        self.assigned = object()  # another one once any stream gets or loses a core row

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[WorkerStream]:
        """All streams, oldest first."""
        return list(self._by_id.values())

    def get(self, stream_id: bytes) -> WorkerStream | None:
        """The stream of this id; None if it is unknown."""
        return self._by_id.get(stream_id)

    def worker_rows_of(self, core_rows: bytes) -> tuple[RowSet, bool]:
        """The worker rows of the running streams in these core rows (u32), [n], 0 if there is none;
        and whether each has one.

        Returns the same RowSet as long as the rows and their streams are the same.
        """
        known, worker_rows, has_all = self._last
        if known == core_rows:
            return worker_rows, has_all
        rows = u32(core_rows, "rows")
        if len(rows) and int(rows.max()) >= len(self._worker_rows):
            inside = rows < len(self._worker_rows)
            found = np.where(inside, self._worker_rows.take(rows, mode="clip"), 0)
        else:
            found = self._worker_rows[rows]
        worker_rows, has_all = RowSet(found), bool(found.all())
        self._last = core_rows, worker_rows, has_all
        return worker_rows, has_all

    @property
    def latest_rows(self) -> tuple[bytes, RowSet]:
        """The core rows asked about last whose streams are still the same, and the worker rows of
        these; no rows if some have no stream.
        """
        known, worker_rows, has_all = self._last
        return (known, worker_rows) if has_all else (b"", NO_ROWS)

    def core_rows_of(self, worker_rows: Int64s) -> tuple[Int64s, Int64s]:
        """The core rows whose tokens go to any of these worker rows, none of them 0, and the worker
        row of each.
        """
        core_rows = np.flatnonzero(np.isin(self._worker_rows, worker_rows))
        return core_rows, self._worker_rows[core_rows]

    def add(self, stream: WorkerStream) -> None:
        """Add a new stream."""
        assert stream.stream_id not in self._by_id
        self._by_id[stream.stream_id] = stream

    def assign_core_row(self, stream: WorkerStream, core_row: int) -> None:
        """Assign this core row to the stream; a stream that had the row before loses it."""
        self._clear_core_row(stream)
        before = self._by_row.get(core_row)
        if before is not None:
            self._clear_core_row(before)
        self._by_row[core_row] = stream
        stream.core_row = core_row
        if core_row >= len(self._worker_rows):
            self._worker_rows = np.pad(
                self._worker_rows, (0, max(core_row + 1 - len(self._worker_rows), core_row))
            )
        self._set_worker_row(core_row, stream.worker_row)

    def ignore_tokens(self, stream: WorkerStream) -> None:
        """Drop further tokens of a stream that has ended, which the core may still send."""
        if stream.core_row is not None and self._by_row.get(stream.core_row) is stream:
            self._set_worker_row(stream.core_row, 0)

    def clear(self) -> None:
        """Forget all streams."""
        self._by_id.clear()
        self._by_row.clear()
        self._worker_rows[:] = 0
        self._last, self.assigned = _NOTHING, object()

    def clear_core_rows(self) -> None:
        """Invalidate all core rows: after an attach the core assigns new ones."""
        for stream in list(self._by_row.values()):
            self._clear_core_row(stream)

    def remove(self, stream: WorkerStream) -> None:
        """Forget a stream. Idempotent."""
        self._clear_core_row(stream)
        self._by_id.pop(stream.stream_id, None)

    def _clear_core_row(self, stream: WorkerStream) -> None:
        if stream.core_row is not None and self._by_row.get(stream.core_row) is stream:
            del self._by_row[stream.core_row]
            self._set_worker_row(stream.core_row, 0)
        stream.core_row = None

    def _set_worker_row(self, core_row: int, worker_row: int) -> None:
        self._worker_rows[core_row] = worker_row
        self._last, self.assigned = _NOTHING, object()
