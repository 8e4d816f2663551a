"""How many threads compute on the CPU, and where."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from slipstream_core.config import CoreConfig
from slipstream_core.kernels.cpu import cpu_threads
from slipstream_core.kernels.cpu.cpu_threads import (
    TeamSize,
    Threads,
    cgroup_quota,
    cores_of_rank,
    num_cores,
    place_of,
)
from slipstream_core.runner import factory


def _cgroups(folder: Path, own: str, files: dict[str, str]) -> float | None:
    """The quota that is found, where `own` is what /proc/self/cgroup says."""
    proc = folder / "cgroup"
    proc.write_text(own)
    for name, content in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return cgroup_quota(proc, folder / "mounted")


V1_LIMIT = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
V1_NONE = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}


def test_quota_of_version_2(tmp_path: Path) -> None:
    limit = {"a/b/cpu.max": "150000 100000\n", "a/cpu.max": "max 100000\n"}
    assert _cgroups(tmp_path, "0::/a/b\n", limit) == 1.5
    assert _cgroups(tmp_path, "0::/a\n", {}) is None
    assert _cgroups(tmp_path, "0::/a/b\n", {"a/cpu.max": "50000 100000\n"}) == 0.5


def test_quota_of_version_2_beside_version_1(tmp_path: Path) -> None:
    assert _cgroups(tmp_path, "0::/a\n", {"unified/a/cpu.max": "300000 100000\n"}) == 3


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_quota_of_version_1(tmp_path: Path, controllers: str) -> None:
    own = f"4:memory:/m\n3:{controllers}:/a/b\n0::/\n"
    limits = {f"{controllers}/a/b/{name}": content for name, content in V1_NONE.items()}
    assert _cgroups(tmp_path, own, limits) is None
    limits = {f"{controllers}/a/{name}": content for name, content in V1_LIMIT.items()}
    assert _cgroups(tmp_path, own, limits) == 1.5


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    limits = {f"cpu/{name}": content for name, content in V1_LIMIT.items()}
    assert _cgroups(tmp_path, "3:cpu:/docker/0123\n", limits) == 1.5


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "none", tmp_path) is None
    assert _cgroups(tmp_path, "0::/\n", {"cpu.max": "some 0\n"}) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (0.2, 1), (1.5, 2), (2.4, 2), (9.0, 4)])
def test_num_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6, 7})
    monkeypatch.setattr(cpu_threads, "cgroup_quota", lambda: quota)
    assert num_cores() == expected


def _steps(size: TeamSize, begin_s: float, num: int, computed: float) -> list[int]:
    """Steps of 10 ms, one after another; the share of each in which the caller had a core."""
    sizes = []
    for step in range(num):
        now_s = begin_s + step / 100
        sizes.append(size.at(now_s))
        if sizes[-1] > 1:
            size.note(now_s + 0.01, 0.01, 0.01 * computed)
    return sizes


def test_a_team_that_computes_stays() -> None:
    assert _steps(TeamSize(4), 0, 1000, computed=0.8) == [4] * 1000


def test_a_team_that_waits_is_tried_seldom_and_comes_back() -> None:
    size = TeamSize(4)
    busy = _steps(size, 0, 1000, computed=0.5)
    assert busy[0] == 4
    assert busy[500:].count(4) <= 0.05 * 500
    after = _steps(size, 10, 1000, computed=1.0)
    assert after[101:] == [4] * 899, "a second alone, at most"
    again = _steps(size, 20, 100, computed=0.0)
    assert again[:20].count(1), "and is given up as soon as at first"


def test_one_slow_step_changes_nothing() -> None:
    size = TeamSize(2)
    _steps(size, 0, 20, computed=1.0)
    size.note(0.21, 0.03, 0.0)
    assert size.at(0.22) == 2


def test_torch_has_one_thread_where_kernels_do_the_work() -> None:
    before = torch.get_num_threads()
    try:
        of_device = Threads(2, None)
        of_device.prepare()
        assert torch.get_num_threads() == 2
        of_device.begin_forward(is_list=True)
        assert torch.get_num_threads() == 1
        of_device.end_forward()
        assert torch.get_num_threads() == 2
        of_device.begin_forward(is_list=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_torch_is_imported_with_little_spinning_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    at_import = []
    environment = dict(given)
    monkeypatch.setattr(factory.os, "environ", environment)
    really = factory.importlib.import_module

    def import_module(name: str) -> object:
        if name != "slipstream_core.runner.torch_factory":
            return really(name)
        return at_import.append(environment.get("GOMP_SPINCOUNT"))

    monkeypatch.setattr(factory.importlib, "import_module", import_module)
    factory.import_runner(CoreConfig(model="m", address="none"))
    assert at_import == [expected]


@pytest.mark.parametrize("cores", [set(range(64)), {7}, {3, 5, 90}, set(range(0, 50, 3)), set()])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_of_cores_are_equal_and_apart(cores: set[int], size: int) -> None:
    shares = [cores_of_rank(cores, index, size, lambda core: (0, core)) for index in range(size)]
    if size > len(cores):
        assert not any(shares)
        return
    assert {len(each) - len(cores) // size for each in shares} <= {0, 1}
    assert sum(map(len, shares)) == len(cores)
    assert set().union(*shares) == cores


def test_hyperthreads_and_packages_stay_together() -> None:
    """Two packages of two cores of two threads, numbered as they often are."""
    places = {core: (core // 2 % 2, core % 2) for core in range(8)}
    first, second = (cores_of_rank(range(8), index, 2, places.__getitem__) for index in (0, 1))
    assert first == {0, 1, 4, 5}
    assert second == {2, 3, 6, 7}
    assert cores_of_rank(range(8), 1, 4, places.__getitem__) == {1, 5}
    shares = [cores_of_rank(range(8), index, 3, places.__getitem__) for index in range(3)]
    assert shares == [{0, 4}, {1, 5}, {2, 3, 6, 7}]
    shares = [cores_of_rank(range(8), index, 5, places.__getitem__) for index in range(5)]
    assert [len(each) for each in shares] == [1, 2, 1, 2, 2]


def test_a_core_without_a_place_is_still_one() -> None:
    assert place_of(10**6) == (0, 10**6)


def test_a_ranks_threads_keep_to_its_share() -> None:
    cores = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def work(threads: int, size: int) -> None:
        Threads(threads, None, (size - 1, size)).prepare()
        found.append(os.sched_getaffinity(0))

    for threads, size in ((1, len(cores)), (len(cores) + 1, 1), (1, len(cores) + 1)):
        thread = threading.Thread(target=work, args=(threads, size))
        thread.start()
        thread.join()
    alone, crowded, without = found
    assert len(alone) == 1
    assert crowded == without == cores, "a share that is too small is no limit"
    assert os.sched_getaffinity(0) == cores
