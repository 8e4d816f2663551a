"""Draws a window of a timeline as a PNG.

A picture has a row for each track, with bars coloured by kind, a legend beside each row, step
numbers, and arrows from the end of a step on the device to the begin of the work on its tokens in
the worker. matplotlib is imported only for drawing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.errors import bad_request, wrong_option
from slipstream.tracing.trace_events import TraceTimeline, Track
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.telemetry.trace import NO_STEP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICE, WORKER = "device", "worker"

# by kind; neighbours in a row differ in print, too, and for colour-blind readers
_COLOURS = {
    "schedule": "#0072B2",
    "launch": "#56B4E9",
    "collect": "#009E73",
    "publish": "#E69F00",
    "device": "#9DB4C8",
    "decode": "#CC79A7",
    "stop check": "#D55E00",
    "detokenise": "#EDBB2F",
    "emit": "#12908E",
    "client": "#4B5FA8",
}
_OTHER_COLOUR = "#8C8C8C"
_SECOND_DEVICE_COLOUR = "#BCCBD8"  # of every other step, so that their borders show

_NUM_STEPS = 8  # in the default window
_WITHOUT_DEVICE_MS = 40.0
_MAX_ARROWS = 40
_WIDTH_IN, _ROW_IN, _AROUND_IN, _DPI = 12.0, 0.92, 1.35, 150
_LEFT_IN, _RIGHT_IN, _TOP_IN = 1.15, 1.05, 0.78
_BAR = 0.52  # of a row's height
_CHARACTER_IN = 0.075
_INK, _FAINT = "#222222", "#666666"


@dataclass(frozen=True, slots=True)
class PictureWindow:
    """The time range to draw, in nanoseconds since the trace's begin."""

    begin_ns: int
    end_ns: int


def check_drawing() -> None:
    """Check that matplotlib is installed. Raises: BadRequestError."""
    if importlib.util.find_spec("matplotlib") is None:
        allowed = "only with matplotlib, which is missing here: pip install slipstream[plots]"
        raise bad_request(BadRequest("png", Summary("a file"), allowed))


def window_of(
    timeline: TraceTimeline, begin_ms: float | None, window_ms: float | None
) -> PictureWindow:
    """The window to draw; by default 8 steps from the middle of the work.

    Raises: BadRequestError for a window out of range, or a trace without spans.
    """
    duration_ns = timeline.duration_ns
    if window_ms is not None and not window_ms > 0:
        raise wrong_option("window_ms", window_ms, "a number > 0")
    if begin_ms is not None and not 0 <= begin_ms * 1e6 < duration_ns:
        raise wrong_option("begin_ms", begin_ms, f"a number in [0, {duration_ns / 1e6:g})")
    if duration_ns == 0:
        raise wrong_option(
            "file", "a trace without spans", "a trace of a stack that served requests"
        )
    begin_ns, end_ns = _middle(timeline)
    length_ns = end_ns - begin_ns if window_ms is None else round(window_ms * 1e6)
    if begin_ms is not None:
        begin_ns = round(begin_ms * 1e6)
    return PictureWindow(begin_ns, begin_ns + length_ns)


def draw(timeline: TraceTimeline, window: PictureWindow, png: str | Path, title: str) -> None:
    """Draw the window and save it as a PNG. Raises: OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tracks = [_visible(track, window) for track in timeline.tracks]
    height_in = _ROW_IN * len(tracks) + _AROUND_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor="white")
    FigureCanvasAgg(figure)  # needs no display and none of pyplot's global state
    axes = figure.add_axes(
        (
            _LEFT_IN / _WIDTH_IN,
            (_AROUND_IN - _TOP_IN) / height_in,
            (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) / _WIDTH_IN,
            _ROW_IN * len(tracks) / height_in,
        )
    )
    left_in = _LEFT_IN / _WIDTH_IN
    figure.text(left_in, 1 - 0.27 / height_in, title, fontsize=12, color=_INK)
    how = "A row for each process; numbers are steps of the model"
    if {DEVICE, WORKER} <= {track.name for track in tracks}:
        how += "; arrows lead from a step's end on the device to the work on its tokens"
    figure.text(left_in, 1 - 0.53 / height_in, how + ".", fontsize=9, color=_FAINT)
    scale = _Scale(window, (_WIDTH_IN - _LEFT_IN - _RIGHT_IN) * 1e6 / _length(window))
    for row, track in enumerate(tracks):
        _draw_track(axes, row, track, scale)
    for row, track in enumerate(tracks):
        if track.name == WORKER:
            _draw_arrows(axes, tracks, row, scale)
    _finish(axes, tracks, window)
    figure.savefig(png, dpi=_DPI, format="png")


# ---- the window ----------------------------------------------------------------------------


def _middle(timeline: TraceTimeline) -> tuple[int, int]:
    """The default window: the steps from the point at which half of the host's work is done.

    The middle in time, or by steps, might be idle or belong to the warm-up.
    """
    hosts = [track for track in timeline.tracks if track.name != DEVICE] or timeline.tracks
    begins_ns = np.concatenate([track.begins_ns for track in hosts])
    order = np.argsort(begins_ns, kind="stable")
    work_ns = np.cumsum(np.concatenate([t.ends_ns - t.begins_ns for t in hosts])[order])
    middle_ns = int(begins_ns[order][np.searchsorted(work_ns, work_ns[-1] / 2)])
    for track in timeline.tracks:
        if track.name == DEVICE and len(track.begins_ns):
            begins, ends = np.sort(track.begins_ns), np.sort(track.ends_ns)
            last = min(len(ends), int(np.searchsorted(ends, middle_ns)) + _NUM_STEPS) - 1
            begin, end = int(begins[max(0, last - _NUM_STEPS + 1)]), int(ends[last])
            margin = (end - begin) // 50
            return begin - margin, end + margin
    return middle_ns, middle_ns + round(_WITHOUT_DEVICE_MS * 1e6)


def _length(window: PictureWindow) -> int:
    return window.end_ns - window.begin_ns


def _visible(track: Track, window: PictureWindow) -> Track:
    seen = np.flatnonzero((track.ends_ns > window.begin_ns) & (track.begins_ns < window.end_ns))
    seen = seen[np.argsort(track.begins_ns[seen], kind="stable")]
    return Track(
        track.name,
        track.process_id,
        track.kinds[seen],
        np.maximum(track.begins_ns[seen], window.begin_ns),
        np.minimum(track.ends_ns[seen], window.end_ns),
        track.steps[seen],
    )


def busy_ns(begins_ns: Int64s, ends_ns: Int64s) -> int:
    """The time in nanoseconds that is covered by at least one span. begins_ns, ends_ns: [n]."""
    if not len(begins_ns):
        return 0
    order = np.argsort(begins_ns, kind="stable")
    begins, ends = begins_ns[order], np.maximum.accumulate(ends_ns[order])
    covered = np.concatenate(([begins[0]], ends[:-1]))
    return int(np.maximum(0, ends - np.maximum(begins, covered)).sum())


# ---- drawing -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scale:
    window: PictureWindow
    inches_per_ms: float

    def width_ms(self, text: str) -> float:
        """The width of a label in ms of the time axis, with its margin."""
        return (len(text) + 1) * _CHARACTER_IN / self.inches_per_ms


def _ms(times_ns: Int64s) -> npt.NDArray[np.float64]:
    return times_ns / 1e6


def _draw_track(axes: Axes, row: int, track: Track, scale: _Scale) -> None:
    is_device = track.name == DEVICE
    begins, lengths = _ms(track.begins_ns), _ms(track.ends_ns - track.begins_ns)
    for kind in _kinds_in(track):
        some = np.flatnonzero(track.kinds == kind)
        axes.broken_barh(
            list(zip(begins[some], lengths[some], strict=True)),
            (row - _BAR / 2, _BAR),
            facecolors=[
                _SECOND_DEVICE_COLOUR if is_device and at % 2 else _colour(kind)
                for at in track.steps[some]
            ],
            linewidth=0,
            zorder=2,
        )
    free_from = -np.inf  # the end of the previous label
    for step, begin, length in _groups(track):
        name = str(step)
        width = scale.width_ms(name)
        if begin < free_from or (is_device and width > length):
            continue
        free_from = begin + width
        axes.text(
            begin + length / 2 if is_device else begin,
            row if is_device else row + _BAR / 2 + 0.02,
            name,
            ha="center" if is_device else "left",
            va="center" if is_device else "top",
            fontsize=10 if is_device else 8,
            color=_INK if is_device else _FAINT,
            clip_on=True,
            zorder=4,
        )


def _groups(track: Track) -> list[tuple[int, float, float]]:
    """Step, begin and length (ms) of what gets a label: steps in the device and worker tracks."""
    if track.name not in (DEVICE, WORKER):
        return []
    groups = []
    for step in np.unique(track.steps[track.steps != NO_STEP]):
        some = np.flatnonzero(track.steps == step)
        begin, end = track.begins_ns[some].min() / 1e6, track.ends_ns[some].max() / 1e6
        groups.append((int(step), float(begin), float(end - begin)))
    return groups


def _draw_arrows(axes: Axes, tracks: list[Track], row: int, scale: _Scale) -> None:
    work = {step: begin for step, begin, _ in _groups(tracks[row])}
    if len(work) > _MAX_ARROWS:
        return
    for above, track in enumerate(tracks):
        if track.name != DEVICE or above >= row:
            continue
        for step, begin, length in _groups(track):
            if step in work and (begin + length) * 1e6 < scale.window.end_ns - 1:
                axes.annotate(
                    "",
                    xy=(work[step], row - _BAR / 2),
                    xytext=(begin + length, above + _BAR / 2),
                    arrowprops={"arrowstyle": "-|>", "color": _FAINT, "lw": 0.9},
                    zorder=3,
                )


def _finish(axes: Axes, tracks: list[Track], window: PictureWindow) -> None:
    axes.set_xlim(window.begin_ns / 1e6, window.end_ns / 1e6)
    axes.set_ylim(len(tracks) - 0.5, -0.5)  # the first track on top
    axes.set_facecolor("#FAFAFA")
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="x", color="#E3E3E3", linewidth=0.8)
    axes.set_xlabel("ms since the trace's begin", color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(tracks)), [_row_name(track, window) for track in tracks])
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    for row, track in enumerate(tracks):
        if row:
            axes.axhline(row - 0.5, color="#D8D8D8", linewidth=0.8, zorder=1)
        _draw_names(axes, row, track)


def _row_name(track: Track, window: PictureWindow) -> str:
    percent = 100 * busy_ns(track.begins_ns, track.ends_ns) / _length(window)
    return f"{track.name}\n{percent:.1f} % busy"


def _draw_names(axes: Axes, row: int, track: Track) -> None:
    """Draw the legend of a row to its right."""
    kinds = [kind for kind in _kinds_in(track) if kind != track.name]
    line = 0.155 / _ROW_IN
    for at, kind in enumerate(kinds):
        y = row + (at - (len(kinds) - 1) / 2) * line
        transform = axes.get_yaxis_transform()
        for x, text, colour in ((1.012, "■", _colour(kind)), (1.03, kind, _INK)):
            axes.text(x, y, text, color=colour, transform=transform, va="center", fontsize=8.5)


def _kinds_in(track: Track) -> list[str]:
    """The kinds of a track in the order of `_COLOURS`, that of their occurrence in a step."""
    found = set(track.kinds.tolist())
    return [kind for kind in _COLOURS if kind in found] + sorted(found - _COLOURS.keys())


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, _OTHER_COLOUR)
