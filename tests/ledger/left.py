"""Says at the end of a run what it has left to `scripts/test --all`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from tests.ledger.durations import file_of

TIME_IS_UP = "the time is up: left to scripts/test --all"


def names_by_folder(files: Iterable[str]) -> list[str]:
    """A line a folder: the names of its files without what all have."""
    by_folder: dict[str, list[str]] = {}
    for file in sorted(files):
        folder, _, name = file.rpartition("/")
        by_folder.setdefault(folder, []).append(name.removeprefix("test_").removesuffix(".py"))
    return [f"  {folder}: {' '.join(names)}" for folder, names in by_folder.items()]


def describe(unplanned: Mapping[str, int], late: Mapping[str, int], num_cases: int) -> list[str]:
    """What is left, for people. unplanned, late: the number of tests by file. num_cases: more cases
    of the quick tests.
    """
    if not (unplanned or late or num_cases):
        return ["left to scripts/test --all: nothing"]
    parts = [
        f"{_tests(unplanned)} not planned" if unplanned else "",
        f"{_tests(late)} for want of time" if late else "",
        f"{_count(num_cases, 'more case')} of quick tests" if num_cases else "",
    ]
    lines = [f"left to scripts/test --all: {', '.join(filter(None, parts))}"]
    for what, files in (("not planned", unplanned), ("for want of time", late)):
        if files:
            lines += [f"{what}:", *names_by_folder(files)]
    return lines


def _tests(by_file: Mapping[str, int]) -> str:
    return f"{_count(sum(by_file.values()), 'test')} of {_count(len(by_file), 'file')}"


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


class Left:
    """What one run leaves. With pytest-xdist its processes, each of which has collected all, say
    what was not planned, and the reports of tests what came too late.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, object] | None = getattr(config, "workeroutput", None)
        self._unplanned: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._num_cases = 0

    def note(self, unplanned: Iterable[str], num_cases: int) -> None:
        """Take note of the collection. unplanned: node ids. num_cases: as `describe` has it."""
        self._unplanned, self._num_cases = Counter(map(file_of, unplanned)), num_cases
        if self._output is not None:
            self._output["left"] = (dict(self._unplanned), num_cases)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if said := getattr(node, "workeroutput", {}).get("left"):
            self._unplanned, self._num_cases = Counter(said[0]), said[1]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        why = report.longrepr
        if report.skipped and isinstance(why, tuple) and TIME_IS_UP in why[2]:
            self._late[file_of(report.nodeid)] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in describe(self._unplanned, self._late, self._num_cases):
            terminalreporter.write_line(line)
