"""Where a client finds the server of a folder."""

from __future__ import annotations

from pathlib import Path

from slipstream.client.endpoints import address_in


def test_a_server_without_replicas_is_at_its_own_socket(tmp_path: Path) -> None:
    own = f"ipc://{tmp_path}/client.sock"
    assert address_in(tmp_path / "nowhere") == f"ipc://{tmp_path}/nowhere/client.sock"
    (tmp_path / "replica-x").mkdir()
    assert address_in(tmp_path) == own


def test_replicas_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        (tmp_path / f"replica-{number}").mkdir()
    addresses = [f"ipc://{tmp_path}/replica-{number}/client.sock" for number in (0, 2, 10)]
    assert address_in(tmp_path) == ",".join(addresses)


def test_what_a_killed_fleet_has_left_does_not_hide_the_server_that_runs(tmp_path: Path) -> None:
    (tmp_path / "replica-0").mkdir()
    (tmp_path / "client.sock").touch()
    assert address_in(tmp_path) == f"ipc://{tmp_path}/client.sock"
