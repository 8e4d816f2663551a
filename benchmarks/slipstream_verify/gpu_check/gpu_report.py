"""A section's results: printed as they arrive, kept as flat rows, written as JSON and as a table.
It imports nothing heavy, since the parent of all sections uses it too.

- A row is on the disk before its line is printed, so a section that dies leaves what it had found.
- A row's `ok` is True or False for a check, None for a number that is only reported. A number may
  have a goal: `meets_goal` tells whether it is reached, and nothing fails by it.
- What could not be measured is a row with `skipped`, the reason.
- Names carry their units. Times since the start are of one clock, shared by all processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream_bench.common.measures import Row

_COMMON = ("section", "case", "ok", "elapsed_s")


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Receives a section's rows."""

    section: str
    path: Path  # JSON lines
    started_s: float  # time.monotonic() at the start of the run

    def add(self, case: str, ok: bool | None = None, /, **values: str | float | None) -> Row:
        """Keep a row and print it. `ok`: the result of a check, if the row is one."""
        elapsed_s = round(time.monotonic() - self.started_s, 1)
        row: Row = {
            "section": self.section,
            "case": case,
            "ok": ok,
            "elapsed_s": elapsed_s,
            **values,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        verdict = {True: "ok: ", False: "FAILED: ", None: ""}[ok]
        say(self.started_s, f"{self.section}: {case}: {verdict}{_shown(row)}")
        return row

    def say(self, text: str) -> None:
        """Print a line of progress."""
        say(self.started_s, f"{self.section}: {text}")


def say(started_s: float, text: str) -> None:
    """Print a line with the seconds since the start, unbuffered."""
    print(f"[{time.monotonic() - started_s:6.1f} s] {text}", flush=True)


def read_rows(path: Path) -> list[Row]:
    """The rows that were kept; a line cut short when its process died is ignored."""
    if not path.exists():
        return []
    complete = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in complete]


def write_files(out: Path, name: str, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write `name`.json and `name`.md in `out`; returns both paths."""
    out.mkdir(parents=True, exist_ok=True)
    as_json, as_table = out / f"{name}.json", out / f"{name}.md"
    as_json.write_text(json.dumps(rows, indent=2) + "\n")
    as_table.write_text(_tables(name, rows))
    return as_json, as_table


def _shown(row: Row) -> str:
    values = ((name, value) for name, value in row.items() if name not in _COMMON)
    return ", ".join(f"{name} {_text(value)}" for name, value in values if value is not None)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def headline(rows: Sequence[Row]) -> list[Row]:
    """What a run is read by: the rows that are a share of the bound, with their goals."""
    names = ("section", "case", "share_of_bound", "goal_share", "meets_goal")
    return [
        {name: row.get(name) for name in names}
        for row in rows
        if row.get("share_of_bound") is not None
    ]


def _tables(name: str, rows: Sequence[Row]) -> str:
    """The headline, then a table for each run of rows with the same section and columns; in
    Markdown.
    """
    lines = [f"# {name}", ""]
    if shares := headline(rows):
        columns = list(shares[0])
        lines += ["Shares of what bytes over bandwidth, or operations over the rate, allow:", ""]
        lines += [_line(columns), _line("---" for _ in columns)]
        lines += [_line(_cell(row[column]) for column in columns) for row in shares]
    last: tuple[object, ...] = ()
    for row in rows:
        columns = [column for column in row if column not in ("section", "elapsed_s")]
        if (row["section"], *columns) != last:
            if not last or last[0] != row["section"]:
                lines += ["", f"## {row['section']}"]
            lines += ["", _line(columns), _line("---" for _ in columns)]
            last = (row["section"], *columns)
        lines.append(_line(_cell(row[column]) for column in columns))
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return "" if value is None else _text(value).replace("|", "\\|").replace("\n", " ")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
