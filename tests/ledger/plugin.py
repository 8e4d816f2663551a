"""Measured durations order the tests, mark them, and are written where `--write-durations` asks.

Marks, from `tests/durations.json` and `tests.ledger.tools`: `process` (starts processes), `long`
(its cases take more than 5 s, on average), `later` (cheaper tests fill its file's part of the quick
suite), `tool` (a test of what stands beside the product). A test that is not in the ledger has of
the first two those that are written at it.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import is_hypothesis_test, settings
from tests.ledger.durations import (
    LONG_S,
    PATH,
    QUICK_CPU_S,
    QUICK_SHARE,
    Ledger,
    file_of,
    test_of,
)
from tests.ledger.left import TIME_IS_UP, Left
from tests.ledger.tools import tool_of

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

_T = TypeVar("_T")
MARKS = {
    "later": f"cheaper tests fill the {QUICK_CPU_S:g} s that its file has of the quick suite",
    "long": f"its cases take more than {LONG_S:g} s, on average",
    "process": "starts processes",
    "tool": "of what stands beside the product: benchmarks, container, clients of others",
}
PIN = "quick"
# Quick tests take up to 5 s. The first of a file has the start of its stack besides, which
# takes minutes where thirty others want the same two CPUs.
_QUICK_TIMEOUT_S = 400.0
IS_MARKED = pytest.StashKey[bool]()  # where the test is written
_LEDGER = pytest.StashKey[Ledger]()
_LEFT = pytest.StashKey[Left]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run what has none of the marks")
    about = "of a test with more cases, run this many, from all over their list, and a quarter "
    about += "of a property's examples"
    parser.addoption("--cases", type=int, metavar="N", help=about)
    about = "run what is quick, and the files that this file names with all that they have"
    parser.addoption("--in-full", type=Path, metavar="FILE", help=about)
    about = "after so many seconds, begin none that is not quick"
    parser.addoption("--seconds", type=float, metavar="N", help=about)
    about = "write what each test takes to the ledger; with --quick, which of them are quick enough"
    parser.addoption("--write-durations", action="store_true", help=about)
    about = "the ledger, if not tests/durations.json"
    parser.addoption("--ledger", type=Path, metavar="FILE", default=PATH, help=about)


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in {**MARKS, PIN: "never `later`, whatever its file's tests take"}.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.stash[_LEDGER] = Ledger.read(config.option.ledger)
    is_worker = hasattr(config, "workerinput")
    if config.option.in_full:
        config.stash[_LEFT] = Left(config)
        config.pluginmanager.register(config.stash[_LEFT])
    if config.option.seconds is not None:
        config.pluginmanager.register(_Deadline(config.option.seconds))
    if config.option.write_durations:
        from tests.ledger.recorder import Meter, Recorder

        if is_worker or not config.getoption("numprocesses", None):
            config.pluginmanager.register(Meter())
        if not is_worker:
            config.pluginmanager.register(Recorder(config))


# ---- which tests, and in which order -------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which --quick runs nothing."""
    if not config.option.quick or collection_path.suffix != ".py":
        return None
    file = os.path.relpath(collection_path, config.rootpath)
    is_left = tool_of(file) is not None or config.stash[_LEDGER].is_marked(file)[0]
    return True if is_left else None


@pytest.hookimpl(trylast=True)  # once all cases are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no more cases of a test than --quick runs: three times as many would be made and left
    out again, by each process.
    """
    option, calls = metafunc.config.option, metafunc._calls
    if option.quick and option.cases and len(calls) > option.cases:
        quick = [each for each in calls if not any(mark.name in MARKS for mark in each.marks)]
        metafunc._calls = _spread(quick, option.cases) or calls[:1]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests, leave out what the options leave out, and run the longest files first."""
    ledger = config.stash[_LEDGER]
    for item in items:
        # all that may be quick is measured
        _mark(item, ledger, with_later=not config.option.write_durations)
    in_full: set[str] = set()
    collected = list(items)
    if config.option.quick:
        _keep(config, items, [each for each in items if is_quick(each)])
    if config.option.in_full:
        in_full = set(config.option.in_full.read_text().splitlines())
        _keep(config, items, [each for each in items if is_quick(each) or _file(each) in in_full])
    planned = set(items)
    if config.option.cases:
        fewer = [each for each in items if is_quick(each) and _file(each) not in in_full]
        kept = set(_some_cases(fewer, config.option.cases))
        others = set(items) - set(fewer)
        _keep(config, items, [each for each in items if each in kept or each in others])
        _try_fewer_examples([each for each in items if _file(each) not in in_full])
    if config.option.in_full:
        unplanned = (each.nodeid for each in collected if each not in planned)
        left: Left = config.stash[_LEFT]
        left.note(unplanned, num_cases=len(planned) - len(items))
    expected = ledger.seconds(item.nodeid for item in items)
    per_file: Counter[str] = Counter()
    for nodeid, seconds in expected.items():
        per_file[file_of(nodeid)] += seconds  # type: ignore[assignment]
    items.sort(key=lambda item: -per_file[_file(item)])
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.timeout(_QUICK_TIMEOUT_S))


class _Deadline:
    """Leaves tests outside of the quick suite to another run once the time is up."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)  # before the test's fixtures
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._end_s and not is_quick(item):
            pytest.skip(TIME_IS_UP)


def is_quick(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in MARKS)


def _mark(item: pytest.Item, ledger: Ledger, *, with_later: bool) -> None:
    item.stash[IS_MARKED] = not is_quick(item)
    if with_later and ledger.is_later(item.nodeid) and not item.get_closest_marker(PIN):
        item.add_marker(pytest.mark.later)
    starts, is_long = ledger.is_marked(item.nodeid)
    if starts:
        item.add_marker(pytest.mark.process)
    if is_long:
        item.add_marker(pytest.mark.long)
    if tool_of(_file(item)):
        item.add_marker(pytest.mark.tool)


def _file(item: pytest.Item) -> str:
    return file_of(item.nodeid)


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselect all others."""
    chosen = set(kept)
    if left_out := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _some_cases(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most that many cases of each test, from all over their list."""
    cases = defaultdict(list)
    for item in items:
        cases[test_of(item.nodeid)].append(item)
    kept: list[pytest.Item] = []
    for every in cases.values():
        kept += _spread(every, most)
    return kept


def _spread(every: Sequence[_T], most: int) -> list[_T]:
    """At most that many, from all over a list."""
    fewer = min(most, len(every))
    return [every[number * len(every) // fewer] for number in range(fewer)]


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    """Let Hypothesis try a quarter of what each test asks for."""
    # settings of a property, which nothing public changes afterwards, and of a state machine
    of_property, of_machine = "_hypothesis_internal_use_settings", "settings"
    functions = {getattr(item.obj, "__func__", item.obj) for item in items if hasattr(item, "obj")}
    given = filter(is_hypothesis_test, functions)
    machines = {item.cls for item in items if hasattr(item, "cls")}
    for name, tests in ((of_property, given), (of_machine, machines)):
        for test in tests:
            asked = getattr(test, name, None)
            if asked is not None:
                fewer = max(1, int(asked.max_examples * QUICK_SHARE))
                setattr(test, name, settings(asked, max_examples=fewer))


# ---- which process runs them ---------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    if config.option.dist != "loadfile":
        return None
    from tests.ledger.scheduling import UnitScheduling

    return UnitScheduling(config, log)
