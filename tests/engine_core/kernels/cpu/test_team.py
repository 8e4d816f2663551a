"""The team of threads that our kernels compute with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.helpers.patience import Patience

from slipstream_core.kernels.cpu.kernels import Kernels, kernels

torch.set_num_threads(1)
FOUND = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="there is no C compiler")

WIDTH = 300


@pytest.fixture
def ours() -> Iterator[Kernels]:
    assert FOUND is not None
    yield FOUND
    FOUND.set_threads(1)


def _eventually(condition: Callable[[], bool]) -> None:
    patience = Patience()
    while not condition():
        patience.wait()


def _members() -> list[Path]:
    """The folders in /proc of the team's threads but for the callers."""
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().strip() == "slipstream-cpu"]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_results_are_those_of_one_thread(ours: Kernels, threads: int) -> None:
    """More of them than cores, so that they are stopped in the middle of everything."""
    packed = ours.pack(torch.randn(1000, WIDTH))
    inputs = [torch.randn(1, rows, WIDTH) for rows in (1, 3, 8, 40, 250)]
    weight = torch.randn(WIDTH)

    def results() -> list[torch.Tensor]:
        return [
            each
            for x in inputs
            for each in (ours.product(x, packed, None, 1000), ours.rms_norm(x, weight, 1e-6))
        ]

    expected = results()
    ours.set_threads(threads)
    for _ in range(100):
        assert all(map(torch.equal, results(), expected))
    assert len(_members()) >= threads - 1


def test_several_callers_at_once(ours: Kernels) -> None:
    """One has the team, the others do without."""
    packed = ours.pack(torch.randn(1000, WIDTH))
    x = torch.randn(1, 40, WIDTH)
    expected = ours.product(x, packed, None, 1000)

    def ask(_: int) -> bool:
        ours.set_threads(2)  # of this thread
        return all(torch.equal(ours.product(x, packed, None, 1000), expected) for _ in range(100))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(ask, range(4)))


def test_what_has_no_work_sleeps(ours: Kernels) -> None:
    """It has looked for some for less than a tick of the clock; then it leaves the core alone."""
    packed = ours.pack(torch.randn(1000, WIDTH))
    ours.set_threads(3)
    ours.product(torch.randn(1, 40, WIDTH), packed, None, 1000)
    for member in _members():
        _eventually(lambda member=member: _state(member) == "S")  # type: ignore[misc]


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_helper_without_a_core_stays_away_until_there_is_one(ours: Kernels) -> None:
    packed = ours.pack(torch.randn(4000, WIDTH))
    x = torch.randn(1, 40, WIDTH)
    expected = ours.product(x, packed, None, 4000)
    ours.set_threads(2)
    ours.product(x, packed, None, 4000)
    own, others = sorted(os.sched_getaffinity(0))[:2]
    before = {0: os.sched_getaffinity(0)}
    for member in _members():
        before[int(member.name)] = os.sched_getaffinity(int(member.name))
        os.sched_setaffinity(int(member.name), {others})
    os.sched_setaffinity(0, {own})
    spin = f"import os\nos.sched_setaffinity(0, {{{others}}})\nwhile True: pass"
    spinner = subprocess.Popen([sys.executable, "-c", spin])

    def computes_with(threads: int) -> bool:
        for _ in range(200):  # without a pause, in which a helper would sleep and have its turn
            ours.product(x, packed, None, 4000)
        assert torch.equal(ours.product(x, packed, None, 4000), expected)
        return ours.present() == threads

    try:
        _eventually(lambda: computes_with(1))
        spinner.kill()
        spinner.wait()
        _eventually(lambda: computes_with(2))
    finally:
        spinner.kill()
        spinner.wait()
        for task, cores in before.items():
            os.sched_setaffinity(task, cores)
