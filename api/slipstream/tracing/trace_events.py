"""Writes and reads timelines as files for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is the JSON of the Trace Event Format, compressed where the file name ends in `.gz`: a
process for each track, a slice ("ph": "X") for each span with its step in `args.step`, and times in
microseconds since the first span. A slice is named by kind and step, as viewers show the name;
`cat` is the kind alone. Only files written here can be read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.errors import bad_request
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.telemetry.trace import NO_STEP

_CHUNK = 8192  # events converted to objects at a time, while a file is written
_GZIP_MAGIC = b"\x1f\x8b"

Strings = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Track:
    """The spans of one process or device as parallel columns. Times start with the trace."""

    name: str
    process_id: int
    kinds: Strings  # [n]
    begins_ns: Int64s  # [n]
    ends_ns: Int64s  # [n]
    steps: Int64s  # [n], NO_STEP where there is none


@dataclass(frozen=True, slots=True)
class TraceTimeline:
    """A whole trace. num_dropped: the oldest spans, dropped by processes for lack of room."""

    tracks: tuple[Track, ...]
    num_dropped: int = 0

    @property
    def duration_ns(self) -> int:
        """The time from the first begin, which is 0, to the last end."""
        return max((int(track.ends_ns.max(initial=0)) for track in self.tracks), default=0)


# ---- the format ----------------------------------------------------------------------------


class _SliceArgs(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    step: int = NO_STEP


class _Slice(msgspec.Struct, frozen=True, gc=False, tag_field="ph", tag="X"):
    name: str
    cat: str
    pid: int
    tid: int
    ts: float  # µs
    dur: float  # µs
    args: _SliceArgs


class _MetadataArgs(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str = ""
    labels: str = ""
    sort_index: int | None = None


class _Metadata(msgspec.Struct, frozen=True, tag_field="ph", tag="M"):
    name: str
    pid: int
    tid: int
    args: _MetadataArgs


class _OtherData(msgspec.Struct, frozen=True, rename="camel"):
    clock: str = "CLOCK_MONOTONIC"
    num_dropped_spans: int = 0


class _TraceFile(msgspec.Struct, frozen=True, rename="camel"):
    other_data: _OtherData
    trace_events: list[_Slice | _Metadata]


# ---- written -------------------------------------------------------------------------------


def write_timeline(file: Path, timeline: TraceTimeline) -> None:
    """Write a timeline atomically. Raises: OSError."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        with gzip.open(unfinished, "wb") if file.suffix == ".gz" else unfinished.open("wb") as out:
            for piece in _encoded(timeline):
                out.write(piece)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _encoded(timeline: TraceTimeline) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    other = encode(_OtherData(num_dropped_spans=timeline.num_dropped))
    yield b'{"displayTimeUnit":"ms","otherData":' + other + b',"traceEvents":[\n'
    events = chain.from_iterable(
        chain(_track_metadata(at, track), _slices(at, track))
        for at, track in enumerate(timeline.tracks, 1)
    )
    separator = b""
    while chunk := list(islice(events, _CHUNK)):
        yield separator + b",\n".join(map(encode, chunk))
        separator = b",\n"
    yield b"\n]}\n"


def _track_metadata(at: int, track: Track) -> Iterable[_Metadata]:
    yield _Metadata("process_name", at, at, _MetadataArgs(name=track.name))
    yield _Metadata("thread_name", at, at, _MetadataArgs(name=track.name))
    yield _Metadata("process_labels", at, at, _MetadataArgs(labels=f"process {track.process_id}"))
    yield _Metadata("process_sort_index", at, at, _MetadataArgs(sort_index=at))


def _slices(at: int, track: Track) -> Iterable[_Slice]:
    order = np.argsort(track.begins_ns, kind="stable")  # viewers expect outer slices first
    for first in range(0, len(order), _CHUNK):
        some = order[first : first + _CHUNK]
        for kind, begin_ns, end_ns, step in zip(
            track.kinds[some].tolist(),
            track.begins_ns[some].tolist(),
            track.ends_ns[some].tolist(),
            track.steps[some].tolist(),
            strict=True,
        ):
            name = kind if step == NO_STEP else f"{kind} {step}"
            duration_us = (end_ns - begin_ns) / 1e3
            yield _Slice(name, kind, at, at, begin_ns / 1e3, duration_us, _SliceArgs(step))


# ---- read ----------------------------------------------------------------------------------


def read_timeline(file: Path) -> TraceTimeline:
    """Read a file of `write_timeline`. Raises: OSError; BadRequestError for any other file."""
    data = file.read_bytes()
    try:
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        decoded = msgspec.json.decode(data, type=_TraceFile)
    except (msgspec.DecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        allowed = f"a file that --trace wrote ({error})"
        raise bad_request(BadRequest("file", str(file), allowed)) from error
    slices: dict[int, list[_Slice]] = {}
    names: dict[int, str] = {}
    process_ids: dict[int, int] = {}
    for event in decoded.trace_events:
        match event:
            case _Slice():
                slices.setdefault(event.pid, []).append(event)
            case _Metadata(name="process_name"):
                names[event.pid] = event.args.name
            case _Metadata(name="process_labels"):
                process_ids[event.pid] = int(event.args.labels.rpartition(" ")[2])
    tracks = (
        _track(name, process_ids.get(at, 0), slices.get(at, ())) for at, name in names.items()
    )
    return TraceTimeline(tuple(tracks), decoded.other_data.num_dropped_spans)


def _track(name: str, process_id: int, slices: Sequence[_Slice]) -> Track:
    begins_ns = _ns([one.ts for one in slices])
    return Track(
        name,
        process_id,
        np.array([one.cat for one in slices], np.str_),
        begins_ns,
        begins_ns + _ns([one.dur for one in slices]),
        np.array([one.args.step for one in slices], np.int64),
    )


def _ns(times_us: list[Any]) -> Int64s:
    return np.rint(np.array(times_us, np.float64) * 1e3).astype(np.int64)
