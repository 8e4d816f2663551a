"""Renders a split view for a terminal as lines of text with ANSI sequences.

- A line is never wider than the terminal, counted in columns; the rest is cut off.
- A pane shows the end of its text. A mark in the text (a process died here) is highlighted.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

PLAIN, DIM, BOLD, GREEN, RED, YELLOW, MARK = "", "2", "1", "32", "1;31", "33", "1;37;41"
CLEAR_LINE = "\x1b[K"
HOME = "\x1b[H"
CLEAR_BELOW = "\x1b[J"
ENTER = "\x1b[?1049h\x1b[?25l"  # the alternate screen, without a cursor
LEAVE = "\x1b[?25h\x1b[?1049l"

Cell = tuple[str, str]  # a character, its style

_GAP = 3  # columns between two panes
_LOG_LINES = 6


class Pane(Struct):
    """One stream's text, in styled pieces."""

    title: str
    footer: str = ""
    pieces: list[tuple[str, str]] = field(default_factory=list)  # text, style

    def add(self, text: str, style: str = PLAIN) -> None:
        """Append text."""
        self.pieces.append((text, style))


class ScreenView(Struct):
    """All content of the screen. log: newest last; status: texts in the first line, with styles."""

    title: str
    panes: list[Pane]
    status: list[tuple[str, str]] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)


def frame(view: ScreenView, width: int, height: int) -> list[str]:
    """The whole screen, as at most `height` lines of at most `width` columns."""
    log = [*view.log[-_LOG_LINES:], *[("", PLAIN)] * (_LOG_LINES - len(view.log))]
    pane_height = max(3, height - len(log) - 3)
    num = len(view.panes)
    pane_width = max(10, (width - _GAP * (num - 1)) // num)
    columns = [_pane(pane, pane_width, pane_height) for pane in view.panes]
    head: list[Cell] = [(char, BOLD) for char in view.title + "  "]
    for text, style in view.status:
        head += [(char, style) for char in "  " + text]
    lines = [_line(head, width), ""]
    separator = [(char, DIM) for char in " │ "]
    for rows in zip(*columns, strict=True):
        cells: list[Cell] = []
        for row in rows:
            cells += [*(separator if cells else []), *_padded(row, pane_width)]
        lines.append(_line(cells, width))
    lines.append("")
    lines += [_line([(char, style) for char in text], width) for text, style in log]
    return lines[:height]


def wrapped(pieces: Sequence[tuple[str, str]], width: int) -> list[list[Cell]]:
    """Wrap text into rows of at most `width` columns, at spaces where possible."""
    rows: list[list[Cell]] = [[]]
    used = 0
    for char, style in _cells(pieces):
        if char == "\n":
            rows.append([])
            used = 0
            continue
        size = columns_of(char)
        if used + size > width:
            rest = _cut_at_space(rows[-1])
            rows.append(rest)
            used = sum(columns_of(each) for each, _ in rest)
        rows[-1].append((char, style))
        used += size
    return rows


def columns_of(char: str) -> int:
    """The number of columns that a character takes in a terminal."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cells(pieces: Sequence[tuple[str, str]]) -> Iterator[Cell]:
    for text, style in pieces:
        for char in text.replace("\t", "    "):
            # control characters in a model's output must not reach the terminal
            yield (char if char.isprintable() or char == "\n" else "\ufffd"), style


def _cut_at_space(row: list[Cell]) -> list[Cell]:
    """Remove and return the text after a row's last space, if that is in the row's second half."""
    for at in range(len(row) - 1, len(row) // 2, -1):
        if row[at][0] == " ":
            rest = row[at + 1 :]
            del row[at:]
            return rest
    return []


def _pane(pane: Pane, width: int, height: int) -> list[list[Cell]]:
    rows = wrapped(pane.pieces, width)[-(height - 2) :]
    rows += [[]] * (height - 2 - len(rows))
    title = [(char, BOLD) for char in pane.title]
    footer = [(char, DIM) for char in pane.footer]
    return [title, *rows, footer]


def _padded(row: Sequence[Cell], width: int) -> list[Cell]:
    used, kept = 0, []
    for char, style in row:
        if used + columns_of(char) > width:
            break
        kept.append((char, style))
        used += columns_of(char)
    return [*kept, *[(" ", PLAIN)] * (width - used)]


def _line(cells: Sequence[Cell], width: int) -> str:
    """A row as text, with a sequence at each change of style; the style is plain at the end."""
    found: list[str] = []
    style = PLAIN
    for char, wanted in _padded(cells, width):
        if wanted != style:
            found.append(f"\x1b[0{';' + wanted if wanted else ''}m")
            style = wanted
        found.append(char)
    if style != PLAIN:
        found.append("\x1b[0m")
    return "".join(found).rstrip(" ")
