"""Charts of measured rows, saved as PNG: light ground, a title that says what is compared, axes
with units. matplotlib is imported only when a chart is drawn; no display is needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slipstream.errors import bad_request
from slipstream_ipc.errors import BadRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# distinguishable in print and with colour blindness (Okabe and Ito, 2008)
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C8C", "#000000")
_WIDTH_IN, _HEIGHT_IN, _DPI = 9.0, 5.0, 150
_PANEL_IN = 4.0  # width of one of several panels
_BARS_WIDTH = 0.82  # share of a group's width


def check_plots() -> None:
    """Reject --png if matplotlib is missing; to be called before anything is measured.

    Raises: BadRequestError.
    """
    if importlib.util.find_spec("matplotlib") is None:
        allowed = "only with matplotlib, which is missing here: pip install slipstream[plots]"
        raise bad_request(BadRequest("png", "a file", allowed))


def grouped_bars(
    file: str | Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    is_log: bool = False,
) -> None:
    """Groups of bars side by side, one bar per series in each group; None leaves a gap.

    is_log: logarithmic value axis.
    """
    figure, axes = _new(title, x_label, y_label)
    width = _BARS_WIDTH / max(1, len(series))
    for at, (name, values) in enumerate(series.items()):
        shift = (at - (len(series) - 1) / 2) * width
        places = [place + shift for place, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        bars = axes.bar(
            places, heights, 0.92 * width, label=name, color=_COLOURS[at % len(_COLOURS)]
        )
        if len(groups) * len(series) <= 40:
            axes.bar_label(bars, fmt=_short, fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    if is_log:
        axes.set_yscale("log")
    _save(figure, axes, file, has_legend=len(series) > 1)


class Mark(NamedTuple):
    """A moment, drawn as a line with a text beside it."""

    x: float
    text: str
    is_strong: bool


def stacked_areas(
    file: str | Path,
    xs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    marks: Sequence[Mark],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> None:
    """One area per series, each on top of the ones before, with a value for each x."""
    figure, axes = _new(title, x_label, y_label)
    colours = [_COLOURS[at % len(_COLOURS)] for at in range(len(series))]
    axes.stackplot(xs, *series.values(), labels=list(series), colors=colours, alpha=0.8)
    axes.margins(x=0, y=0.12)
    axes.set_ylim(bottom=0)
    for mark in marks:
        axes.axvline(mark.x, color="#404040", lw=1.0, ls="-" if mark.is_strong else ":")
        axes.annotate(
            mark.text,
            (mark.x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -3),
            textcoords="offset points",
            va="top",
            rotation=90,
            fontsize=8,
        )
    figure.legend(loc="outside lower center", ncols=len(series), frameon=False, fontsize=9)
    _save(figure, axes, file, has_legend=False)


def lines_in_panels(
    file: str | Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> None:
    """A panel per entry, side by side, with a line of (x, y) points per series; both axes are
    logarithmic, and shared. A series has one colour in all panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(_WIDTH_IN, _PANEL_IN * len(panels))
    figure = Figure(figsize=(width, _HEIGHT_IN), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    ticks = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
    for axes, (panel, lines) in zip(grid, panels.items(), strict=True):
        _dress(axes, panel, x_label, y_label if axes is grid[0] else "")
        for name, points in lines.items():
            axes.plot(
                *zip(*sorted(points), strict=True), "o-", ms=4, label=name, color=colours[name]
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
    known = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    figure.legend(handles=list(known.values()), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=_DPI, format="png")


def _new(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # needs no display and no pyplot state
    axes = figure.add_subplot()
    _dress(axes, title, x_label, y_label)
    return figure, axes


def _dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_facecolor("#FAFAFA")
    axes.set_title(title, fontsize=12, loc="left", wrap=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="#E0E0E0", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, axes: Axes, file: str | Path, *, has_legend: bool) -> None:
    if has_legend:
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=_DPI, format="png")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
