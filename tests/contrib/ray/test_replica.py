"""A replica's actor without Ray: its stack runs for real."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port

from slipstream import Client
from slipstream.stack.settings import SHORT_LIVED, settings_from
from slipstream_ray.actor_messages import (
    FleetSpec,
    ReplicaReport,
    ScaleGoal,
    decoded,
    encoded,
)
from slipstream_ray.replica import LOWEST_PORT, RayReplica, listen_address
from slipstream_ray.scaling import ReplicaBounds

pytestmark = pytest.mark.process

GOAL = ScaleGoal(ReplicaBounds(1, 3), version=4)


def replica(model: str = "simulated:step_ms=5", **settings: Any) -> tuple[RayReplica, Event]:
    """One on loopback, and whether its process would have ended."""
    has_ended = Event()
    given = settings_from({"model": model, "insecure": True, **SHORT_LIVED, **settings})
    spec = FleetSpec("demo", given, 1.0, 0.0, GOAL)
    made = RayReplica(encoded(spec), "replica-3.demo", "127.0.0.1", lambda _: has_ended.set())
    return made, has_ended


def said(made: RayReplica) -> ReplicaReport:
    return decoded(made.report(), ReplicaReport)


def test_it_serves_tells_its_load_and_drains() -> None:
    made, has_ended = replica(max_num_seqs=7)
    report = said(made)
    assert report.goal is None
    made.remember(encoded(GOAL))
    patience = Patience()
    while (report := said(made)).load is None or not report.load.max_seqs:
        patience.wait(report)  # the first one knows nothing of the core
    assert (report.load.state, report.load.max_seqs, report.goal) == ("serving", 7, GOAL)
    with Client(report.address, insecure=True) as client:
        assert client.generate("a", max_tokens=3).text
    made.drain()
    made.drain()
    while not (report := said(made)).has_ended:
        patience.wait(report)
    assert report.is_draining
    assert not has_ended.is_set()
    assert made._load is None  # nothing of it is left to the garbage collector


def test_its_process_ends_with_its_stack() -> None:
    made, has_ended = replica()
    assert made._stack is not None
    os.kill(made._stack.pids["supervisor"], signal.SIGKILL)
    assert has_ended.wait(PATIENCE_S)
    made.close()
    made.close()


def test_what_keeps_it_from_starting_is_in_its_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    made, has_ended = replica(str(tmp_path), device="cpu")
    report = said(made)
    assert "\n" not in report.error
    assert report.error
    assert (report.address, report.has_ended, has_ended.is_set()) == ("", False, False)


def test_ports_are_free_and_above_those_of_rays_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0, 1, 5, 1000])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        first = taken.getsockname()[1]
        monkeypatch.setattr("slipstream_ray.replica.LOWEST_PORT", first - 1)
        monkeypatch.setattr("secrets.randbelow", lambda _: next(draws))
        address = listen_address("127.0.0.1", 2)
    assert int(address.rpartition(":")[2]) in (first + 4, first + 999)
    assert LOWEST_PORT == 20_000


def test_ipv6_addresses_are_in_brackets() -> None:
    assert listen_address("::1", 1).startswith("tcp://[::1]:")
