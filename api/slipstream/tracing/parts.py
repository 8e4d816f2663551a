"""Merges the trace parts that processes write beside FILE into the timeline in FILE.

- A broken part costs its own track and a warning, never the timeline.
- Parts are deleted once the timeline is written, and before a stack starts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from slipstream.tracing.part_files import part_paths
from slipstream.tracing.trace_events import TraceTimeline, Track, write_timeline
from slipstream_ipc.telemetry.trace import SpanKind, TracePart

_ORDER = ("core", "device", "worker", "http", "client")  # from top to bottom
_KIND_NAMES = {int(kind): kind.name.lower().replace("_", " ") for kind in SpanKind}
_logger = logging.getLogger(__name__)


def merge_parts(trace: str) -> bool:
    """Write the timeline once all recording processes have ended, and warn of missing tracks.

    Returns whether the timeline was written. An OSError is logged and not raised, as a stack's
    finalizer calls this.
    """
    file = Path(trace)
    try:
        paths = part_paths(file)
        parts = [part for path in paths if (part := _read(path)) is not None]
        write_timeline(file, timeline_of(parts))
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("cannot write the timeline %s: %s", file, error)
        return False
    return True


def timeline_of(parts: Sequence[TracePart]) -> TraceTimeline:
    """Join the parts, which share one clock already; time 0 is the begin of the first span."""
    tracks = [_track(part) for part in parts]
    starts = [int(track.begins_ns.min()) for track in tracks if len(track.begins_ns)]
    for track in tracks:
        track.begins_ns[:] -= min(starts, default=0)
        track.ends_ns[:] -= min(starts, default=0)
    tracks.sort(key=_track_order)
    return TraceTimeline(tuple(tracks), sum(part.num_dropped for part in parts))


def _track_order(track: Track) -> tuple[int, int]:
    kind = _ORDER.index(track.name) if track.name in _ORDER else len(_ORDER)
    return kind, int(track.begins_ns.min(initial=2**62))


def _track(part: TracePart) -> Track:
    """The track of a part. Raises: ValueError where its columns do not match."""
    kinds = np.frombuffer(part.kinds, np.uint8)
    begins_ns, ends_ns, steps = (
        np.frombuffer(column, "<i8").astype(np.int64)
        for column in (part.begins_ns, part.ends_ns, part.steps)
    )
    if not len(kinds) == len(begins_ns) == len(ends_ns) == len(steps):
        raise ValueError("columns of different lengths")
    names = [_KIND_NAMES.get(kind, f"kind {kind}") for kind in range(256)]
    return Track(part.process, part.pid, np.array(names)[kinds], begins_ns, ends_ns, steps)


def _read(path: Path) -> TracePart | None:
    data = path.read_bytes()
    if not data:
        _logger.warning("%s: its process was killed; its track is missing", path.name)
        return None
    try:
        part = msgspec.msgpack.decode(data, type=TracePart)
        _track(part)
    except (msgspec.DecodeError, ValueError) as error:
        _logger.warning("%s: its track is missing: %s", path.name, error)
        return None
    if part.num_dropped:
        _logger.warning(
            "%s: the timeline lacks its %d oldest spans", part.process, part.num_dropped
        )
    return part
