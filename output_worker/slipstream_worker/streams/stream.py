"""The streams a worker serves, from submission until they are forgotten.

Owns: what is known of each stream: its registration, its output, how far it has come on its way,
who reads it; and which stream has which of the core's rows. Its tokens lie in `stream_columns`,
under its row. Does not know: sockets, what tokens mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_ipc.history.text_log import START, TextCursor
from slipstream_ipc.messages import Admit, End, SamplingParams, Submit
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_worker.output.stream_output import StreamOutput

Int64s = npt.NDArray[np.int64]

_MAX_PAST_READERS = 64
_NOTHING = (np.zeros(0, np.uint32), NO_ROWS)


class Stage(Enum):
    """Where a stream is on its way."""

    RENDERING = "rendering"  # its prompt is being turned into tokens
    SUBMITTED = "submitted"  # the core has been asked
    RUNNING = "running"  # the core has given it a row
    ENDED = "ended"  # its end is known; kept for readers that come back


class ResumePoint(NamedTuple):
    """Where a reader's copy of a stream ends. digest, checksum: of its tokens, where it has one."""

    num_chars: int
    num_tokens: int
    digest: int | None = None
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Reader:
    """Who reads a stream, and how far it has been sent.

    cursor: of a slow row; a fast one's lies in the columns. is_waiting: it is sent nothing, as we
    do not know where its copy ends, or have not come so far ourselves. awaited: in the second case,
    where that is.
    """

    client: bytes  # identity
    handle: int
    cursor: TextCursor = START
    is_waiting: bool = False
    awaited: ResumePoint | None = None

    @property
    def is_listening(self) -> bool:
        """Whether it has asked for the stream since it attached."""
        return not self.is_waiting or self.awaited is not None

    def is_called(self, client: bytes, handle: int) -> bool:
        """Whether it is this client, under this handle."""
        return (self.client, self.handle) == (client, handle)


@dataclass(slots=True, eq=False)
class WorkerStream:
    """One stream. `registration`, `output` and a row exist once the prompt is rendered."""

    stream_id: bytes
    stage: Stage
    submit: Submit | None = None  # until the prompt is rendered
    params: SamplingParams | None = None  # the same
    fingerprint: bytes = b""  # of the submission
    interval: int = 1
    registration: Admit | None = None
    output: StreamOutput | None = None
    worker_row: int = 0  # in the columns; 0: none
    core_row: int | None = None
    reader: Reader | None = None
    past_readers: deque[tuple[bytes, int]] = field(  # superseded, by identity and handle
        default_factory=lambda: deque(maxlen=_MAX_PAST_READERS)
    )
    logprobs_from: int = 0  # tokens before have none, though they were asked for
    pending_end: End | None = None  # a replayed end that its tokens do not imply; they come first
    leaves_at: float = inf  # when it is to be ended and forgotten; inf while somebody reads it
    held_bytes: int = 0  # what it costs to keep it, once it has ended
    strikes: int = 0  # cores that died from within while they ran it, without progress between
    struck_at: int = 0  # tokens it had at the last of them
    arrived_at: float = 0.0  # when it was submitted; 0.0: to another worker, or its end has left
    first_at: float = 0.0  # when its first tokens left; 0.0: they have not
    is_counted: bool = False  # its end was named and counted by another worker


class WorkerStreamTable:
    """Streams by id and by the core's row."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, WorkerStream] = {}
        self._by_row: dict[int, WorkerStream] = {}
        self._worker_rows: Int64s = np.zeros(64, np.int64)  # by row; 0: nobody's, or it has ended
        self._last = _NOTHING  # rows asked for, and their rows

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[WorkerStream]:
        """Every stream, oldest first."""
        return list(self._by_id.values())

    def get(self, stream_id: bytes) -> WorkerStream | None:
        """The stream of this id, if it is known."""
        return self._by_id.get(stream_id)

    def worker_rows_of(self, core_rows: npt.NDArray[np.uint32]) -> RowSet:
        """The rows of the streams that go on in these rows; 0 where none does.

        The same set as long as the rows and their streams are the same.
        """
        known, worker_rows = self._last
        if len(known) == len(core_rows) and (known == core_rows).all():
            return worker_rows
        try:
            worker_rows = RowSet(self._worker_rows[core_rows])
            self._last = core_rows, worker_rows
            return worker_rows
        except IndexError:
            inside = core_rows < len(self._worker_rows)
            return RowSet(np.where(inside, self._worker_rows[np.where(inside, core_rows, 0)], 0))

    def few_worker_rows_of(self, core_rows: Sequence[int]) -> list[int]:
        """As `worker_rows_of`, for a few rows, without numpy's fixed costs."""
        worker_rows, num = self._worker_rows, len(self._worker_rows)
        return [worker_rows.item(core_row) if core_row < num else 0 for core_row in core_rows]

    def add(self, stream: WorkerStream) -> None:
        """Take in a new stream."""
        assert stream.stream_id not in self._by_id
        self._by_id[stream.stream_id] = stream

    def place(self, stream: WorkerStream, core_row: int) -> None:
        """The core has given the stream this row; whoever had it is done with it."""
        self._vacate(stream)
        before = self._by_row.get(core_row)
        if before is not None:
            self._vacate(before)
        self._by_row[core_row] = stream
        stream.core_row = core_row
        if core_row >= len(self._worker_rows):
            self._worker_rows = np.pad(
                self._worker_rows, (0, max(core_row + 1 - len(self._worker_rows), core_row))
            )
        self._set_worker_row(core_row, stream.worker_row)

    def silence(self, stream: WorkerStream) -> None:
        """A stream has ended: what the core still sends of it is nobody's."""
        if stream.core_row is not None and self._by_row.get(stream.core_row) is stream:
            self._set_worker_row(stream.core_row, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()
        self._by_row.clear()
        self._worker_rows[:] = 0
        self._last = _NOTHING

    def displace_all(self) -> None:
        """No row means anything any more: the core will give them anew."""
        for stream in list(self._by_row.values()):
            self._vacate(stream)

    def remove(self, stream: WorkerStream) -> None:
        """Forget a stream. Idempotent."""
        self._vacate(stream)
        self._by_id.pop(stream.stream_id, None)

    def _vacate(self, stream: WorkerStream) -> None:
        if stream.core_row is not None and self._by_row.get(stream.core_row) is stream:
            del self._by_row[stream.core_row]
            self._set_worker_row(stream.core_row, 0)
        stream.core_row = None

    def _set_worker_row(self, core_row: int, worker_row: int) -> None:
        self._worker_rows[core_row] = worker_row
        self._last = _NOTHING
