"""`slipstream trace FILE`: shows a timeline written by `--trace FILE`, as a table or a picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream.tracing.part_files import part_paths
from slipstream.tracing.parts import merge_parts
from slipstream.tracing.picture import check_drawing, draw, window_of
from slipstream.tracing.trace_events import TraceTimeline, read_timeline


def add_trace(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "FILE [options]",
        ("slipstream trace timeline.json", "slipstream trace timeline.json --png timeline.png"),
    )
    parser.add_argument("file", metavar="FILE", help="a timeline written by --trace FILE")
    parser.add_argument(
        "--png",
        metavar="OUT",
        help="draw a window of it into this file (needs matplotlib), in place of a table",
    )
    parser.add_argument(
        "--begin-ms",
        type=float,
        metavar="MS",
        help="begin of the window (default: where half of the host's work is done)",
    )
    parser.add_argument(
        "--window-ms", type=float, metavar="MS", help="length of the window (default: 8 steps)"
    )
    parser.add_argument(
        "--title", metavar="TEXT", help="title of the picture (default: the file's name)"
    )
    parser.set_defaults(run=trace)


def trace(arguments: argparse.Namespace) -> int:
    """Show the timeline. Raises: BadRequestError, OSError."""
    file = Path(arguments.file)
    if arguments.png is None:
        for name in ("begin_ms", "window_ms", "title"):
            if getattr(arguments, name) is not None:
                raise wrong_option(name, getattr(arguments, name), "nothing without --png")
    else:
        check_drawing()
        _check_target(arguments.png)
    if not file.exists() and file.parent.is_dir() and part_paths(file.absolute()):
        merge_parts(str(file.absolute()))  # the stack was killed before it merged them
    timeline = read_timeline(file)
    if arguments.png is None:
        sys.stdout.write("\n".join(_table(timeline)) + "\n")
        return 0
    window = window_of(timeline, arguments.begin_ms, arguments.window_ms)
    draw(timeline, window, arguments.png, arguments.title or file.name)
    return 0


def _check_target(png: str) -> None:
    folder = Path(png).absolute().parent
    if Path(png).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise wrong_option("png", png, "a file in a folder that exists and can be written to")


def _table(timeline: TraceTimeline) -> Iterator[str]:
    wall_ns = max(1, timeline.duration_ns)
    yield f"{wall_ns / 1e6:.1f} ms" + (
        f"; the {timeline.num_dropped} oldest spans were dropped" if timeline.num_dropped else ""
    )
    yield f"{'track':<10}{'kind':<14}{'count':>10}{'mean':>12}{'longest':>12}{'of the time':>14}"
    for track in timeline.tracks:
        lengths_ns = track.ends_ns - track.begins_ns
        first_seen = {kind: at for at, kind in reversed(list(enumerate(track.kinds.tolist())))}
        for kind in sorted(first_seen, key=first_seen.__getitem__):
            some = lengths_ns[np.flatnonzero(track.kinds == kind)]
            yield (
                f"{track.name:<10}{kind:<14}{len(some):>10}{some.mean() / 1e3:>9.1f} µs"
                f"{some.max() / 1e3:>9.1f} µs{some.sum() / wall_ns:>13.2%}"
            ).rstrip()
