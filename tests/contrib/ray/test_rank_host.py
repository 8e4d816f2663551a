"""Ranks of a replica's other machine without Ray: they and the replica's stack run for real."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.rank_streams import once_under_way, texts
from tests.helpers.stacks import spareless_stack

from slipstream import Client
from slipstream.stack.settings import SHORT_LIVED, StackSettings, settings_from
from slipstream_ray.actor_messages import (
    FleetSpec,
    ReplicaReport,
    ScaleGoal,
    decoded,
    encoded,
)
from slipstream_ray.rank_host import RankHost
from slipstream_ray.replica import RayReplica, at_host
from slipstream_ray.scaling import ReplicaBounds

HOST = "127.0.0.1"
SPREAD = {
    "device": "cpu",
    "tensor_parallel_size": 2,
    "nnodes": 2,
    "insecure": True,
    "spare_core": False,
}


class OtherMachine:
    """Starts its ranks as the replica's actor would, and again when they have ended."""

    def __init__(self) -> None:
        self.hosts: list[RankHost] = []
        self.has_ended = Event()
        self._settings = b""

    def start(self, settings: StackSettings) -> None:
        assert (settings.nnodes, settings.master_addr) == (2, HOST)
        self._settings = encoded(settings_from({**as_given(settings), "node_rank": 1}))
        self.start_again()

    def end(self, number: signal.Signals) -> None:
        pid = self.hosts[-1].pid
        assert pid is not None
        os.kill(pid, number)
        assert self.has_ended.wait(PATIENCE_S)

    def start_again(self) -> None:
        self.has_ended.clear()
        self.hosts.append(RankHost(self._settings, lambda _: self.has_ended.set(), pause_s=0.0))


def as_given(settings: StackSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


@pytest.fixture
def machine() -> Iterator[OtherMachine]:
    made = OtherMachine()
    yield made
    made.end(signal.SIGTERM)


@pytest.mark.process
def test_streams_outlive_ranks_that_are_started_again(machine: OtherMachine) -> None:
    with spareless_stack(device="cpu") as stack, stack.client() as client:
        expected = texts(client, lambda _: None)
    settings = settings_from({**SHORT_LIVED, **SPREAD})
    spec = FleetSpec("demo", settings, 1.0, 0.0, ScaleGoal(ReplicaBounds(1, 1)))
    replica = RayReplica(encoded(spec), "replica-0.demo", HOST, lambda _: None, machine.start)

    def kill_and_start_again() -> None:
        machine.end(signal.SIGKILL)
        machine.start_again()

    with contextlib.closing(replica):
        report = decoded(replica.report(), ReplicaReport)
        assert (report.error, bool(report.address)) == ("", True)
        with Client(report.address, insecure=True) as client:
            assert texts(client, lambda _: None) == expected
            assert texts(client, once_under_way(kill_and_start_again)) == expected


def test_ranks_that_cannot_be_planned_end_their_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = at_host(settings_from({**SPREAD, "node_rank": 1}), HOST)
    for given in (
        encoded(settings_from({**as_given(settings), "model": str(tmp_path / "none")})),
        b"\x80garbage",
    ):
        caplog.clear()
        has_ended = Event()
        RankHost(given, lambda _, has_ended=has_ended: has_ended.set(), pause_s=0.0)
        assert has_ended.wait(PATIENCE_S)
        assert "these ranks cannot take part" in caplog.text


def test_a_replica_on_one_machine_has_no_port_for_ranks() -> None:
    alone = at_host(settings_from({"output_workers": 2}), HOST)
    assert (alone.master_addr, str(alone.listen).startswith(f"tcp://{HOST}:")) == (None, True)
    spread = at_host(settings_from({**SPREAD, "output_workers": 2}), HOST)
    port = int(str(spread.listen).rpartition(":")[2])
    assert (spread.master_addr, spread.master_port) == (HOST, port + 2)
