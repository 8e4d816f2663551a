"""Which process runs which test, where processes die."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.scheduling import UnitScheduling
from tests.ledger.test_recorder import run
from xdist.scheduler import LoadScopeScheduling

KILLING = (
    "import os\n\ndef test_kills():\n    os.kill(os.getpid(), 9)\n\ndef test_behind_it(): ...\n"
)
PLAIN = "def test_first(): ...\n\ndef test_second(): ...\n"


class Process:
    """As one of pytest-xdist: a test begins once it is known what is next, another or the end."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="")
        self.shutting_down = False
        self._told: deque[int | None] = deque()

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self._told += indices

    def shutdown(self) -> None:
        if not self.shutting_down:
            self.shutting_down = True
            self._told.append(None)

    @property
    def running(self) -> int | None:
        return self._told[0] if len(self._told) > 1 else None

    def end_test(self) -> None:
        self._told.popleft()


class Run:
    """A run's scheduler, and what pytest-xdist's session calls of it."""

    def __init__(self, scheduling: type[LoadScopeScheduling], files: list[int], num: int) -> None:
        self.nodeids = [f"test_{file}.py::f{at}" for file, n in enumerate(files) for at in range(n)]
        option = SimpleNamespace(ledger=Path("/none"), loadscopereorder=False)
        config: Any = SimpleNamespace(option=option, getvalue=lambda _: [f"{num}*popen"])
        self.scheduler: Any = scheduling(config)
        self.scheduler.log = lambda *_: None
        self.ended: Counter[str] = Counter()
        self.processes = [Process() for _ in range(num)]
        for process in self.processes:
            self.scheduler.add_node(process)
        for process in self.processes:
            self.collected(process)

    def collected(self, process: Process) -> None:
        self.scheduler.add_node_collection(process, self.nodeids)
        if self.scheduler.collection_is_completed:
            self.scheduler.schedule()

    def end_test(self, process: Process, at: int) -> None:
        process.end_test()
        self.ended[self.nodeids[at]] += 1
        self.scheduler.mark_test_complete(process, at)
        if self.scheduler.tests_finished:
            for each in self.scheduler.nodes:
                each.shutdown()

    def die(self, process: Process) -> Process:
        """Return what takes its place, which has collected nothing yet."""
        self.processes.remove(process)
        if killed := self.scheduler.remove_node(process):
            self.ended[killed] += 1
        clone = Process()
        self.processes.append(clone)
        self.scheduler.add_node(clone)
        return clone

    def run(self, draw: Any, most_deaths: int) -> None:
        """Run to the end, or until all processes wait."""
        collecting: list[Process] = []
        while True:
            running = [(each, each.running) for each in self.processes]
            able = [(each, at) for each, at in running if at is not None]
            choices = [*able, *((each, None) for each in collecting)]
            if not choices:
                return
            process, at = draw(st.sampled_from(choices))
            if at is None:
                collecting.remove(process)
                self.collected(process)
            elif most_deaths and draw(st.booleans()):
                most_deaths -= 1
                collecting.append(self.die(process))
            else:
                self.end_test(process, at)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_each_test_ends_once_whatever_dies(files: list[int], num: int, data: Any) -> None:
    each = Run(UnitScheduling, files, num)
    each.run(data.draw, most_deaths=3)
    assert each.ended == dict.fromkeys(each.nodeids, 1)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num", ["1", "2"])
def test_a_run_ends_behind_a_process_that_died_in_its_last_file(tmp_path: Path, num: str) -> None:
    (tmp_path / "test_a.py").write_text(PLAIN)
    (tmp_path / "test_b.py").write_text(KILLING)
    said = run(tmp_path, "-n", num, "--dist", "loadfile")
    assert "1 failed, 3 passed" in said
    assert "crashed while running" in said
