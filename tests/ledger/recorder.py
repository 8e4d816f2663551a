"""Measures tests where they run, and writes the ledger where their reports are collected.

The figures travel with the reports, whose attributes pytest-xdist carries.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import is_hypothesis_test
from msgspec.structs import replace
from tests.ledger.durations import QUICK_SHARE, Entry, file_of, quick_s, test_of, update
from tests.ledger.inputs import Inputs
from tests.ledger.plugin import IS_MARKED, PIN

# what compiles C, and what libraries ask about the machine when they are imported
_NOT_COUNTED = {
    "ar",
    "as",
    "c++",
    "cc",
    "g++",
    "gcc",
    "ld",
    "ldconfig",
    "lscpu",
    "objdump",
    "uname",
}


class Meter:
    """Adds to each report `cpu_s`, seconds of the processor, ended children included; to a test's
    last one also `starts`, whether it or one of its fixtures starts processes, `num_cases`, the
    cases of its file, 0 where not all of them are run, `is_marked`, whether it has a mark in its
    file, so that it is not quick whatever it takes, `is_property`, whether it takes examples, and
    `is_pinned`, whether it is never `later`.
    """

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self._num_started = 0
        self._fixtures: set[pytest.FixtureDef[Any]] = set()
        self._num_cases: Counter[str] = Counter()
        self._in_part: set[str] = set()  # files of which some are not run
        sys.addaudithook(self._count)

    def _count(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.fork", "os.forkpty"):
            self._num_started += 1
        elif event in ("subprocess.Popen", "os.posix_spawn"):
            self._num_started += _program(*args[:2]) not in _NOT_COUNTED

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._in_part.update(file_of(item.nodeid) for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_cases.update(file_of(item.nodeid) for item in session.items)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._cpu_s = _cpu_s()
        self._num_started = 0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        before = self._num_started
        try:
            return (yield)
        finally:
            if self._num_started > before:
                self._fixtures.add(fixturedef)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _cpu_s()
        report.cpu_s = now_s - self._cpu_s
        self._cpu_s = now_s
        if report.when == "teardown":
            report.starts = self._num_started > 0 or self._has_starting_fixture(item)
            file = file_of(item.nodeid)
            report.num_cases = 0 if file in self._in_part else self._num_cases[file]
            report.is_marked = item.stash[IS_MARKED]
            report.is_property = _is_property(item)
            report.is_pinned = item.get_closest_marker(PIN) is not None
        return report

    def _has_starting_fixture(self, item: pytest.Item) -> bool:
        """True also for the tests that find a fixture of their file's as another left it."""
        info = getattr(item, "_fixtureinfo", None)  # what only pytest knows
        if info is None:
            return False
        return any(self._fixtures.intersection(each) for each in info.name2fixturedefs.values())


def _is_property(item: pytest.Item) -> bool:
    case = getattr(getattr(item, "cls", None), "settings", None)  # of a state machine
    return case is not None or is_hypothesis_test(getattr(item, "obj", None))


def _program(path: Any, command: Any) -> str:
    """The name of a program that is started, without its folder."""
    if path is None:
        path = command if isinstance(command, str | bytes | os.PathLike) else command[0]
    return os.path.basename(os.fsdecode(path))


def _cpu_s() -> float:
    """Seconds of the processor that this process and its ended children took."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Run:
    """What has been reported of one file's tests. of_quick: in the quick suite, which takes some
    cases and some of a property's examples.
    """

    def __init__(self, *, of_quick: bool) -> None:
        self._of_quick = of_quick
        self.tests: defaultdict[str, Entry] = defaultdict(Entry)
        self.properties: set[str] = set()
        self.quick_s: defaultdict[str, list[float]] = defaultdict(list)  # of cases without a mark
        self.case_s: Counter[str] = Counter()
        self.ended = 0
        self.of = 0  # cases in all; 0 where only some are run
        self.passed = False
        self.failed = False

    @property
    def is_whole(self) -> bool:
        return 0 < self.of == self.ended

    def scaled(self, share: float) -> dict[str, Entry]:
        """The tests, their wall times as they are on a machine without other work."""
        scaled = {}
        for name, entry in self.tests.items():
            factor = max(share, min(1.0, entry.cpu / entry.wall)) if entry.wall else 1.0
            tried = QUICK_SHARE if name in self.properties else 1.0
            all_tried = 1 / tried if self._of_quick else 1.0  # times what was measured
            scaled[name] = replace(
                entry,
                wall=entry.wall * factor * all_tried,
                cpu=entry.cpu * all_tried,
                quick=quick_s(self.quick_s[name]) * factor * all_tried * tried,
            )
        return scaled

    def add(self, report: pytest.TestReport) -> None:
        entry = self.tests[test_of(report.nodeid)]
        self.case_s[report.nodeid] += report.duration  # type: ignore[assignment]
        entry.wall += report.duration
        entry.cpu += getattr(report, "cpu_s", 0.0)
        self.failed |= report.failed
        self.passed |= report.when == "call" and report.passed
        if report.when == "teardown":
            entry.cases += 1
            entry.starts |= report.starts
            entry.pinned |= report.is_pinned
            took_s = self.case_s.pop(report.nodeid)
            if report.is_property:
                self.properties.add(test_of(report.nodeid))
            if not report.is_marked:
                self.quick_s[test_of(report.nodeid)].append(took_s)
            self.ended += 1
            self.of = report.num_cases


class _Processors:
    """The machine's processors from now on."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self, own_s: float) -> float:
        """The share of the processors' time that others have not taken, of 1."""
        now = psutil.cpu_times()
        passed_s = sum(now) - sum(self._before)
        idle_s = now.idle + now.iowait - self._before.idle - self._before.iowait
        return min(1.0, (own_s + idle_s) / passed_s) if passed_s > 0 else 1.0


class Recorder:
    """Writes the ledger at the end, in the process that collects the reports: for each file that
    was run whole, and what it read where nothing in it failed.

    A run of the quick suite says of the files that were run whole before which of their tests are
    later. Wall times are less what other work on the machine has cost: a tenth where a tenth of the
    processors' time was left to the tests.
    """

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        is_part = any("::" in arg for arg in config.args) or option.in_full
        # a part of a property's examples, or of a file, measures neither
        self._is_whole = not option.cases and not is_part
        chosen = option.keyword or option.markexpr or option.deselect
        self._is_quick = option.quick and option.cases and not (is_part or chosen)
        self._path: Path = config.option.ledger
        self._root = config.rootpath
        self._inputs = Inputs()  # as they are before anything runs
        self._runs = defaultdict[str, Run](partial(Run, of_quick=self._is_quick))
        self._processors = _Processors()
        self._own_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        if not self._runs:  # what comes before, each process's imports, is none of theirs
            self._processors = _Processors()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._own_s += getattr(report, "cpu_s", 0.0)
        self._runs[file_of(report.nodeid)].add(report)

    def pytest_sessionfinish(self) -> None:
        measured = {}
        share = self._processors.share(self._own_s)
        for file, run in self._runs.items():
            has_run = run.passed or run.failed  # else all are skipped, for want of an environment
            if (self._is_quick or (self._is_whole and run.is_whole)) and has_run:
                is_green = run.passed and not run.failed
                digest = self._inputs.digest(file) if is_green else ""
                measured[file] = (run.scaled(share), digest)
        update(self._path, measured, self._root, of_quick=self._is_quick)
