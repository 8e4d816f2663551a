"""Formats rows: medians, an aligned table, a JSON file.

- A row is flat: column names in snake_case that end in their unit, values that JSON has. None
  stands for what was not, or could not be, measured.
- The table shows columns of the rows, never a number that is not in them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slipstream_bench.common.measures import Row, median_row

__all__ = ["Row", "median_rows", "table", "write_json"]

_GAP = "  "
_DIGITS = 4  # significant digits shown; integer digits are never cut


def median_rows(rows: Sequence[Row], by: Sequence[str]) -> list[Row]:
    """One row of medians per distinct value of the columns `by`, in order of first appearance.

    `runs` is the number of rows behind a median.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [median_row(group) | {"runs": len(group)} for group in groups.values()]


def table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """The lines of an aligned table: words to the left, numbers to the right.

    columns: which ones, in this order; default: all. Columns that no row has are left out.
    """
    present = list(dict.fromkeys(name for row in rows for name in row))
    names = present if columns is None else [name for name in columns if name in present]
    cells = [[_shown(row.get(name)) for name in names] for row in rows]
    widths = [
        max(len(name), *(len(line[at]) for line in cells)) if cells else len(name)
        for at, name in enumerate(names)
    ]
    are_words = [any(isinstance(row.get(name), str) for row in rows) for name in names]

    def line(words: Sequence[str]) -> str:
        return _GAP.join(
            word.ljust(width) if is_word else word.rjust(width)
            for word, width, is_word in zip(words, widths, are_words, strict=True)
        ).rstrip()

    return [line(names), _GAP.join("-" * width for width in widths), *map(line, cells)]


def write_json(rows: Sequence[Row], file: str | Path) -> None:
    """Write the rows as a JSON list of objects."""
    Path(file).write_text(json.dumps(list(rows), indent=2) + "\n", encoding="utf-8")


def _shown(cell: str | int | float | bool | None) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if not isinstance(cell, float):
        return str(cell)
    num_whole = len(str(int(abs(cell))))
    return f"{cell:.{max(0, _DIGITS - num_whole)}f}"
