"""The streams a worker serves, from submission until they are forgotten.

Owns: what is known of each stream: its registration, its output, how far it has come on its way,
who reads it. Does not know: sockets, what tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from slipstream_ipc.messages import Admit, End, Submit
from slipstream_ipc.text_log import START, Cursor
from slipstream_worker.logprobs import TokenLogprobs
from slipstream_worker.output import StreamOutput


class Stage(Enum):
    """Where a stream is on its way."""

    RENDERING = "rendering"  # its prompt is being turned into tokens
    SUBMITTED = "submitted"  # the core has been asked
    RUNNING = "running"  # the core has given it a row
    ENDED = "ended"  # its end is known; kept for readers that come back


@dataclass(slots=True, eq=False)
class Reader:
    """Who reads a stream, and how far it has been sent.

    `is_waiting`: the client attached anew and has yet to say where its copy ends; until then it is
    sent nothing of this stream.
    """

    client: bytes  # identity
    handle: int
    cursor: Cursor = START
    is_waiting: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """One stream. `registration` and `output` exist once the prompt is rendered."""

    stream_id: bytes
    stage: Stage
    submit: Submit | None = None  # until the prompt is rendered
    fingerprint: bytes = b""  # of the submission
    interval: int = 1
    registration: Admit | None = None
    output: StreamOutput | None = None
    row: int | None = None
    reader: Reader | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    width: int = 0  # values to a token in `logprobs`
    pending_end: End | None = None  # a replayed end that its tokens do not imply; they come first
    leaves_at: float = inf  # when it is to be forgotten; inf while it goes on, or somebody reads it


class StreamTable:
    """Streams by id and by the core's row."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Stream] = {}
        self._by_row: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Stream]:
        """Every stream, oldest first."""
        return list(self._by_id.values())

    def get(self, stream_id: bytes) -> Stream | None:
        """The stream of this id, if it is known."""
        return self._by_id.get(stream_id)

    def at(self, row: int) -> Stream | None:
        """The stream that has this row now, if one has."""
        return self._by_row.get(row)

    def add(self, stream: Stream) -> None:
        """Take in a new stream."""
        assert stream.stream_id not in self._by_id
        self._by_id[stream.stream_id] = stream

    def place(self, stream: Stream, row: int) -> None:
        """The core has given the stream this row; whoever had it is done with it."""
        self._vacate(stream)
        self._by_row[row] = stream
        stream.row = row

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()
        self._by_row.clear()

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
        stream.row = None
