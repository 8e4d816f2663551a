"""The plan of a fleet: who gets which cores, cards, sockets and ports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import BadRequestError
from slipstream.stack.plan.fleet_plan import plan_fleet, shares, visible_cards
from slipstream.stack.settings import settings_from

MODEL = "simulated:step_ms=1"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Shorter than pytest's own: the path of a socket has at most 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="plan-") as path:
        yield Path(path)


def config_of(stack: Any, name: str) -> dict[str, Any]:
    [spec] = [child for child in stack.config.children if child.name == name]
    found: dict[str, Any] = msgspec.json.decode(spec.config)
    return found


@given(st.integers(0, 70), st.integers(1, 64))
def test_shares_are_even_neighbours_and_leave_nothing_out(num_items: int, num: int) -> None:
    items = list(range(num_items))
    dealt = shares(items, num)
    assert len(dealt) == num
    if num_items < num:
        assert not any(dealt)
        return
    assert [item for share in dealt for item in share] == items
    sizes = {len(share) for share in dealt}
    assert max(sizes) - min(sizes) <= 1


def test_replicas_have_names_sockets_ports_and_cores_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5, 6})
    settings = settings_from(
        {
            "model": MODEL,
            "http_port": 0,
            "http_workers": 2,
            "output_workers": 2,
            "listen": "tcp://127.0.0.1:7001",
            "insecure": True,
        }
    )
    plan = plan_fleet(settings, folder, 2)
    *replicas, fronts = plan.stacks
    assert [stack.name for stack in replicas] == ["replica-0", "replica-1"]
    workers = [config_of(stack, "worker-0") for stack in replicas]
    names = [config["replica"].partition(".")[0] for config in workers]
    assert names == ["replica-0", "replica-1"]
    assert [config["listen"] for config in workers] == [
        "tcp://127.0.0.1:7001",
        "tcp://127.0.0.1:7003",
    ]
    assert plan.listen == "tcp://127.0.0.1:7001,tcp://127.0.0.1:7003"
    assert [stack.cpus for stack in replicas] == [{0, 1}, {2, 5, 6}]
    addresses = [f"ipc://{folder}/replica-{index}/client.sock" for index in range(2)]
    assert plan.address == ",".join(addresses)
    assert [child.name for child in fronts.config.children] == ["http-0", "http-1"]
    assert config_of(fronts, "http-1")["client_address"] == plan.address
    assert not fronts.cpus
    assert not any(stack.config.listen for stack in replicas)
    assert [config["members"][:2] for config in workers] == [addresses] * 2


def test_replicas_of_two_machines_have_different_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        stacks = plan_fleet(settings_from({"model": MODEL}), folder, 2).stacks
        return [config_of(stack, "worker")["replica"] for stack in stacks]

    monkeypatch.setattr("socket.gethostname", lambda: "a")
    first = names()
    assert names() == first
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    assert not set(names()) & set(first)


def test_without_http_there_are_replicas_alone(folder: Path) -> None:
    plan = plan_fleet(settings_from({"model": MODEL}), folder, 3)
    assert [stack.is_replica for stack in plan.stacks] == [True] * 3
    assert plan.listen is None


def test_each_replica_has_a_trace_and_the_members_of_its_own(folder: Path, tmp_path: Path) -> None:
    given = {"trace": str(tmp_path / "t.json"), "listen": "tcp://127.0.0.1:7001", "insecure": True}
    plan = plan_fleet(settings_from({"model": MODEL, **given}), folder, 2)
    traces = [str(tmp_path / f"t-replica-{index}.json") for index in range(2)]
    assert plan.traces == tuple(traces)
    assert [config_of(stack, "worker")["trace"] for stack in plan.stacks] == traces
    members = [*plan.address.split(","), "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
    assert [config_of(stack, "worker")["members"] for stack in plan.stacks] == [members] * 2


def test_cards_are_dealt_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-x,7")
    assert visible_cards() == ["4", "5", "GPU-x", "7"]
    plan = plan_fleet(settings_from({}), folder, 2)
    found = [stack.environment for stack in plan.stacks]
    assert found == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "GPU-x,7"}]
    for settings in (settings_from({"device": "cpu"}), settings_from({"model": MODEL})):
        assert not any(each.environment for each in plan_fleet(settings, folder, 5).stacks)
    with pytest.raises(BadRequestError, match=r"replicas: got 5, allowed: at most 4"):
        plan_fleet(settings_from({}), folder, 5)
    with pytest.raises(BadRequestError, match=r"replicas: got 3, allowed: at most 2"):
        plan_fleet(settings_from({"tensor_parallel_size": 2}), folder, 3)


@pytest.mark.parametrize(
    ("settings", "where", "num", "option"),
    [
        ({}, "", 0, "replicas"),
        ({}, "", 65, "replicas"),
        ({"trace": "/nowhere/a-trace.json"}, "", 2, "trace"),
        ({}, "a,b", 2, "runtime_dir"),
        ({"listen": "tcp://127.0.0.1:65535", "insecure": True}, "", 2, "listen"),
    ],
)
def test_what_a_fleet_cannot_have_is_refused(
    folder: Path, settings: dict[str, Any], where: str, num: int, option: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        plan_fleet(settings_from({"model": MODEL, **settings}), folder / where, num)
    assert refused.value.field == option
