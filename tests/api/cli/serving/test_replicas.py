"""`slipstream replicas`: all replicas of the fleet that one address belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.fake_worker import MODEL, FakeWorker

from slipstream.cli.main import main


@dataclass
class Fleet:
    """The addresses of replicas."""

    addresses: list[str]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Three replicas, each of which names all of them."""
    tmp_path.chmod(0o700)
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in "abc"]
    workers = [FakeWorker(each, _nothing, MODEL, members=tuple(addresses)) for each in addresses]
    yield Fleet(addresses)
    for worker in workers:
        worker.stop()


def _nothing(_worker: FakeWorker, _body: Any) -> None:
    pass


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The addresses in the table."""
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "ADDRESS"
    return [line.split()[-1] for line in lines]


@pytest.mark.parametrize("which", [0, 2])
def test_one_address_of_a_fleet_shows_all(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], which: int
) -> None:
    assert main(["replicas", fleet.addresses[which]]) == 0
    assert sorted(shown(capsys)) == fleet.addresses


def test_several_addresses_show_these(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", *fleet.addresses[:2]]) == 0
    assert sorted(shown(capsys)) == fleet.addresses[:2]


def test_a_server_alone_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    worker = FakeWorker(f"ipc://{tmp_path}/d.sock", _nothing, replace(MODEL, name="d"))
    try:
        assert main(["replicas", worker.address]) == 0
    finally:
        worker.stop()
    assert shown(capsys) == [worker.address]
