"""One model over two machines: it says what one rank says, whatever happens to either of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tests.helpers.namespaces import skip_without_namespaces
from tests.helpers.other_machine import command_of, nodes_of, other_machine
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port
from tests.helpers.rank_streams import core_ends, once_under_way, texts
from tests.helpers.stacks import spareless_stack

from slipstream import Client, Stack
from slipstream.cli.keys import add_rank, make_folder
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

HOST = "127.0.0.1"


class TwoMachines(NamedTuple):
    stack: Stack
    client: Client
    node: psutil.Process  # the supervisor of the other machine
    command: list[str]  # that started it
    port: int
    expected: list[str]  # of one rank

    def process(self, name: str, parent: psutil.Process | None = None) -> psutil.Process:
        """The process of this name that serves."""
        patience = Patience()
        while True:
            for each in (parent or psutil.Process()).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if each.name() == f"slip:{name}":
                        return each
            patience.wait(f"no {name} serves")

    def rank(self) -> psutil.Process:
        return self.process("rank-1", self.node)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    folder, port = tmp_path_factory.mktemp("node"), free_port()
    make_folder(folder / "keys")
    add_rank(folder / "keys", "machine-1")
    settings = nodes_of(HOST, port, folder / "keys")
    command = command_of(settings, folder, MODEL_PATH)
    with spareless_stack(device="cpu") as stack, stack.client() as client:
        expected = texts(client, lambda _: None)
    with (
        other_machine(command) as node,
        spareless_stack(**settings, spare_core=True) as stack,
        stack.client() as client,
    ):
        yield TwoMachines(stack, client, psutil.Process(node.pid), command, port, expected)
        node.send_signal(signal.SIGTERM)
        assert node.wait(PATIENCE_S) == 0


def test_two_machines_say_what_one_rank_says(machines: TwoMachines) -> None:
    assert texts(machines.client, lambda _: None) == machines.expected


def test_nothing_listens_beyond_the_address_that_was_named(machines: TwoMachines) -> None:
    core, rank = machines.process("core"), machines.rank()
    at = {
        process.pid: {
            each.laddr
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
        for process in (machines.node, *machines.node.children(recursive=True), core)
    }
    assert {pid for pid, found in at.items() if found} == {core.pid, rank.pid}
    assert {each.ip for found in at.values() for each in found} == {HOST}
    assert machines.port in {each.port for each in at[core.pid]}


def test_remote_rank_killed_streams_identical(machines: TwoMachines) -> None:
    core_ends(machines.stack)
    rank = machines.rank()
    assert texts(machines.client, once_under_way(rank.kill)) == machines.expected
    assert core_ends(machines.stack) == ["signal SIGKILL"]


def test_core_killed_its_remote_rank_joins_the_next_one(machines: TwoMachines) -> None:
    core, rank = machines.process("core"), machines.rank()
    assert texts(machines.client, once_under_way(core.kill)) == machines.expected
    assert rank.wait(PATIENCE_S) is None or not rank.is_running()
    assert machines.node.is_running()


def test_stopped_remote_rank_is_replaced_and_charged_to_no_request(machines: TwoMachines) -> None:
    core_ends(machines.stack)
    os.kill(machines.rank().pid, signal.SIGSTOP)
    assert texts(machines.client, lambda _: None) == machines.expected
    assert core_ends(machines.stack) == ["signal SIGKILL"]


def test_garbage_to_the_port_harms_nothing(machines: TwoMachines) -> None:
    core_ends(machines.stack)

    def send_garbage() -> None:
        for size in (0, 1, 64, 1 << 16):
            with socket.create_connection((HOST, machines.port)) as raw:
                raw.sendall(secrets.token_bytes(size))

    assert texts(machines.client, once_under_way(send_garbage)) == machines.expected
    assert not core_ends(machines.stack)


def test_a_machine_with_another_model_is_told_so(machines: TwoMachines, tmp_path: Path) -> None:
    other = tmp_path / "model"
    other.mkdir()
    for path in MODEL_PATH.iterdir():
        (other / path.name).symlink_to(path)
    (other / "more.txt").write_text("of another revision")
    command = [str(other) if word == str(MODEL_PATH) else word for word in machines.command]
    at = command.index("--runtime-dir") + 1
    command[at] = str(tmp_path / "node")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert "the files of its model are not those of the core's" in done.stderr
    assert texts(machines.client, lambda _: None) == machines.expected


def test_two_machines_whose_link_is_lost() -> None:
    skip_without_namespaces("one model over two machines")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", "tests.helpers.two_machines"],
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["together"] == told["alone"]
    assert told["meanwhile"] == told["alone"]
    assert told["ends"] == ["signal SIGKILL"]
    assert told["listening"] == [["10.78.0.1"], ["10.78.0.2"]]
