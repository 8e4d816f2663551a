"""The report of a benchmark: its options, medians over runs, an aligned table, a JSON file.

- A row is flat: column names in snake_case that end in their unit, values that JSON has. None
  stands for what was not, or could not be, measured.
- The table shows columns of the rows, never a number that is not in them.

In a benchmark:
    def add_options(parser: Parser) -> None:
        add_common(parser, runs=5, quick_runs=1)
        parser.set_defaults(run=bench_thing)

    def bench_thing(arguments: argparse.Namespace) -> int:
        check_common(arguments)     # before anything is measured
        rows = ...
        print_rows(rows, arguments, columns=[...])
        return 0
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.measures import Row, median_row
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.pictures import check_plots
from slipstream_ipc.atomic_file import write_atomically

__all__ = ["Row", "median_rows", "table", "write_json"]

Point = TypeVar("Point")

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


def in_rounds(
    runs: int, points: Sequence[Point], measure: Callable[[Point], Iterable[Row]]
) -> list[Row]:
    """The rows of all points in each of `runs` rounds, with a progress bar.

    In rounds a noisy minute spoils one of several runs of a point, and not all of them.
    """
    rows: list[Row] = []
    with tqdm(total=runs * len(points), unit="point", disable=None, leave=False) as bar:
        for _ in range(runs):
            for point in points:
                rows += measure(point)
                bar.update()
    return rows


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


def columns_of(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells as text in aligned columns, all to the left; the first line has the headings."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def markdown_of(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells as a Markdown table; the first line has the headings."""
    rule = ["---"] * len(lines[0])
    return [f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:])]


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


def add_common(parser: Parser, *, runs: int, quick_runs: int = 1) -> None:
    """Add the options. runs, quick_runs: default number of runs, without and with --quick."""
    option = Option("runs", integer(1), "the table has their medians", runs, quick_runs)
    group = parser.add_argument_group("report")
    group.add_argument("--quick", action="store_true", help="a small form, in under 50 s")
    add(group, (option,))
    group.add_argument("--json", metavar="FILE", help="write the rows there, a list of objects")
    group.add_argument("--png", metavar="FILE", help="save a picture there (needs matplotlib)")
    parser.set_defaults(runs_option=option)


def add_result(group: argparse._ActionsContainer) -> None:
    """Add the options of a benchmark whose result is one object."""
    group.add_argument("--quick", action="store_true", help="a small form, in under 60 s")
    group.add_argument("--json", metavar="FILE", help="write the result there, one object")


def check_common(arguments: argparse.Namespace) -> None:
    """Reject invalid options before anything is measured; set --runs. Raises: BadRequestError."""
    fill_in(arguments, (arguments.runs_option,))
    check_files(arguments)
    if arguments.png is not None:
        check_plots()


def check_files(arguments: argparse.Namespace) -> None:
    """Reject --json and --png if the file cannot be written, before minutes of measuring are lost.

    Raises: BadRequestError.
    """
    for name in ("json", "png"):
        file = getattr(arguments, name, None)
        if file is None:
            continue
        folder = Path(file).absolute().parent
        if Path(file).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise wrong_option(name, file, "a file in a folder that exists and can be written to")


def write_result(file: str | Path | None, result: Struct, indent: int = 2) -> None:
    """Write a result as a JSON object, completely or not at all; None: nowhere."""
    if file is not None:
        content = msgspec.json.format(msgspec.json.encode(result), indent=indent)
        write_atomically(Path(file), content + b"\n", mode=0o644)


def print_rows(
    rows: Sequence[Row], arguments: argparse.Namespace, columns: Sequence[str] | None = None
) -> None:
    """Print `columns` of the rows in this order, and write all columns with --json."""
    print("\n".join(table(rows, columns)), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
