"""Which files of tests a landing runs in full, within a number of seconds.

    python -m tests.ledger.plan --seconds 900 FILE

The quick suite always runs. What is left of the time goes to the files that read something that
differs from their last green run, those nearest to what has changed first; then to a sample of the
others that the commit's hash draws, those that start processes first. The rest is left to
`scripts/test --all`. FILE gets the files that run in full, a line each, and the scripts that make
environments for them.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.ledger.durations import ROOT, Entry, Ledger, elapsed_s
from tests.ledger.inputs import Inputs
from tests.ledger.left import names_by_folder
from tests.ledger.tools import TOOLS, tool_of

_UNMEASURED = Entry(wall=10.0, cpu=10.0, quick=1.0)
_FAR = 99


class Unit(NamedTuple):
    """Files that run together or not at all: one, or all of a tool that has an environment.

    is_changed: they read something else than when they were green. distance: how many imports lie
    between them and the nearest file that has changed.
    """

    files: tuple[str, ...]
    cost: Entry
    script: str
    is_changed: bool
    distance: int


class Plan(NamedTuple):
    quick_s: float
    changed: list[Unit]
    drawn: list[Unit]
    left: list[Unit]

    def lines(self) -> list[str]:
        """What FILE gets."""
        chosen = [*self.changed, *self.drawn]
        scripts = {unit.script for unit in chosen if unit.script}
        return sorted({file for unit in chosen for file in unit.files} | scripts)


def divide(units: Iterable[Unit], quick_s: float, budget_s: float, seed: str) -> Plan:
    """Divide the units among what runs and what is left."""

    def order(unit: Unit) -> tuple[bool, int, str]:
        lot = hashlib.sha256(f"{seed} {unit.files[0]}".encode()).hexdigest()
        return (
            not unit.is_changed,
            unit.distance if unit.is_changed else not unit.cost.starts,
            lot,
        )

    plan = Plan(quick_s, [], [], [])
    taken: list[Entry] = []
    for unit in sorted(units, key=order):
        # an environment is worth its making only where something has changed
        is_worth = unit.is_changed or not unit.script
        if is_worth and quick_s + elapsed_s([*taken, unit.cost]) <= budget_s:
            taken.append(unit.cost)
            (plan.changed if unit.is_changed else plan.drawn).append(unit)
        else:
            plan.left.append(unit)
    return plan


def units_of(
    files: Sequence[str], ledger: Ledger, inputs: Inputs, touched: Iterable[str]
) -> list[Unit]:
    """The units that files of tests are in."""
    together: dict[str, list[str]] = {}
    for file in files:
        tool = tool_of(file)
        together.setdefault(tool if tool and TOOLS[tool].script else file, []).append(file)
    entries, starting, has_changed = ledger.files(), ledger.starting(), set(touched)
    found = []
    for name, each in together.items():
        known = [entries.get(file) or _UNMEASURED for file in each]
        cost = Entry(
            wall=sum(max(0.0, entry.wall - entry.quick) for entry in known),
            cpu=sum(entry.cpu * _share_left(entry) for entry in known),
            starts=not starting.isdisjoint(each),
        )
        is_changed = any(
            entry.digest != inputs.digest(file) for file, entry in zip(each, known, strict=True)
        )
        distance = _FAR
        if is_changed:
            read = [inputs.of(file) for file in each]
            near = (all_of[path] for all_of in read for path in has_changed & all_of.keys())
            distance = min(near, default=_FAR)
        script = TOOLS[name].script if name in TOOLS else ""
        found.append(Unit(tuple(each), cost, script, is_changed, distance))
    return found


def quick_s(files: Iterable[Entry]) -> float:
    """Seconds that the quick suite takes."""
    return elapsed_s(
        Entry(wall=file.quick, cpu=file.cpu * (1 - _share_left(file))) for file in files
    )


def _share_left(entry: Entry) -> float:
    """The share of a file's time that the quick suite does not take."""
    return max(0.0, 1 - entry.quick / entry.wall) if entry.wall else 0.0


def describe(plan: Plan, seed: str) -> str:
    """What runs and what does not, for people."""

    def minutes(units: list[Unit]) -> str:
        return f"{_files(units)}, {elapsed_s(unit.cost for unit in units) / 60:.1f} minutes"

    num_changed = sum(len(unit.files) for unit in plan.left if unit.is_changed)
    return "\n".join(
        [
            f"the quick suite: {plan.quick_s / 60:.1f} minutes by the ledger",
            f"in full, reading what has changed since they were green: {minutes(plan.changed)}",
            *_names(plan.changed),
            f"in full, drawn by {seed[:8]}: {minutes(plan.drawn)}",
            *_names(plan.drawn),
            f"left to scripts/test --all: {minutes(plan.left)}; changed: {num_changed}",
            *_names(plan.left),
        ]
    )


def _files(units: list[Unit]) -> str:
    num = sum(len(unit.files) for unit in units)
    return f"{num} file{'' if num == 1 else 's'}"


def _names(units: list[Unit]) -> list[str]:
    return names_by_folder(file for unit in units for file in unit.files)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _touched() -> list[str]:
    """The files that differ from those of the commit that wrote the ledger last."""
    written = _git("log", "-1", "--format=%H", "--", "tests/durations.json").strip()
    return _git("diff", "--name-only", written).splitlines() if written else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ledger.plan")
    parser.add_argument("--seconds", type=float, required=True, help="for all of the tests")
    parser.add_argument("file", type=Path, help="where to write what runs in full")
    arguments = parser.parse_args()
    ledger, inputs, seed = Ledger.read(), Inputs(), _git("rev-parse", "HEAD").strip()
    files, entries = inputs.test_files(), ledger.files()
    units = units_of(files, ledger, inputs, _touched())
    plan = divide(
        units, quick_s(entries.get(file) or _UNMEASURED for file in files), arguments.seconds, seed
    )
    arguments.file.write_text("".join(f"{line}\n" for line in plan.lines()))
    sys.stdout.write(f"{describe(plan, seed)}\n")


if __name__ == "__main__":
    main()
