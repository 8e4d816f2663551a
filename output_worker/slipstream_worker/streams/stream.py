"""The streams a worker serves, from submission until they are forgotten.

Owns: what is known of each stream: its registration, its output, how far it has come on its way,
who reads it; and which stream has which of the core's rows. Its tokens lie in `stream_columns`,
under its line. Does not know: sockets, what tokens mean.
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

from slipstream_ipc.history.text_log import START, Cursor
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


class Position(NamedTuple):
    """Where a reader's copy of a stream ends. digest, checksum: of its tokens, where it has one."""

    num_chars: int
    num_tokens: int
    digest: int | None = None
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Reader:
    """Who reads a stream, and how far it has been sent.

    cursor: of a slow line; a fast one's lies in the columns. is_waiting: it is sent nothing, as we
    do not know where its copy ends, or have not come so far ourselves. awaited: in the second case,
    where that is.
    """

    client: bytes  # identity
    handle: int
    cursor: Cursor = START
    is_waiting: bool = False
    awaited: Position | None = None

    @property
    def is_listening(self) -> bool:
        """Whether it has asked for the stream since it attached."""
        return not self.is_waiting or self.awaited is not None

    def is_called(self, client: bytes, handle: int) -> bool:
        """Whether it is this client, under this handle."""
        return (self.client, self.handle) == (client, handle)


@dataclass(slots=True, eq=False)
class Stream:
    """One stream. `registration`, `output` and a line exist once the prompt is rendered."""

    stream_id: bytes
    stage: Stage
    submit: Submit | None = None  # until the prompt is rendered
    params: SamplingParams | None = None  # the same
    fingerprint: bytes = b""  # of the submission
    interval: int = 1
    registration: Admit | None = None
    output: StreamOutput | None = None
    line: int = 0  # in the columns; 0: none
    row: int | None = None
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


class StreamTable:
    """Streams by id and by the core's row."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Stream] = {}
        self._by_row: dict[int, Stream] = {}
        self._lines: Int64s = np.zeros(64, np.int64)  # by row; 0: nobody's, or it has ended
        self._last = _NOTHING  # rows asked for, and their lines

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Stream]:
        """Every stream, oldest first."""
        return list(self._by_id.values())

    def get(self, stream_id: bytes) -> Stream | None:
        """The stream of this id, if it is known."""
        return self._by_id.get(stream_id)

    def lines_of(self, rows: npt.NDArray[np.uint32]) -> RowSet:
        """The lines of the streams that go on in these rows; 0 where none does.

        The same set as long as the rows and their streams are the same.
        """
        known, lines = self._last
        if len(known) == len(rows) and (known == rows).all():
            return lines
        try:
            lines = RowSet(self._lines[rows])
            self._last = rows, lines
            return lines
        except IndexError:
            inside = rows < len(self._lines)
            return RowSet(np.where(inside, self._lines[np.where(inside, rows, 0)], 0))

    def few_lines_of(self, rows: Sequence[int]) -> list[int]:
        """As `lines_of`, for a few rows, without numpy's fixed costs."""
        lines, num = self._lines, len(self._lines)
        return [lines.item(row) if row < num else 0 for row in rows]

    def add(self, stream: Stream) -> None:
        """Take in a new stream."""
        assert stream.stream_id not in self._by_id
        self._by_id[stream.stream_id] = stream

    def place(self, stream: Stream, row: int) -> None:
        """The core has given the stream this row; whoever had it is done with it."""
        self._vacate(stream)
        before = self._by_row.get(row)
        if before is not None:
            self._vacate(before)
        self._by_row[row] = stream
        stream.row = row
        if row >= len(self._lines):
            self._lines = np.pad(self._lines, (0, max(row + 1 - len(self._lines), row)))
        self._set_line(row, stream.line)

    def silence(self, stream: Stream) -> None:
        """A stream has ended: what the core still sends of it is nobody's."""
        if stream.row is not None and self._by_row.get(stream.row) is stream:
            self._set_line(stream.row, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()
        self._by_row.clear()
        self._lines[:] = 0
        self._last = _NOTHING

    def displace_all(self) -> None:
        """No row means anything any more: the core will give them anew."""
        for stream in list(self._by_row.values()):
            self._vacate(stream)

    def remove(self, stream: Stream) -> None:
        """Forget a stream. Idempotent."""
        self._vacate(stream)
        self._by_id.pop(stream.stream_id, None)

    def _vacate(self, stream: Stream) -> None:
        if stream.row is not None and self._by_row.get(stream.row) is stream:
            del self._by_row[stream.row]
            self._set_line(stream.row, 0)
        stream.row = None

    def _set_line(self, row: int, line: int) -> None:
        self._lines[row] = line
        self._last = _NOTHING
