"""`slipstream ray`: what is refused before Ray is asked for anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.errors import ConnectionLostError
from slipstream_ray.cluster_address import check_reachable


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["ray", *words]) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_ray.commands.has_ray", lambda: False)
    monkeypatch.delenv("SLIPSTREAM_KEYS", raising=False)


@pytest.mark.parametrize("number", ["0", "x", "3:2", "65", "1:65", "-1", "1:", "1:2:3"])
def test_numbers_of_replicas(capsys, number: str) -> None:
    said = refused(capsys, "up", "--insecure", f"--replicas={number}")
    assert f"--replicas: got '{number}', allowed: N or MIN:MAX, from 1 to 64" in said
    if not number.startswith("-"):
        assert "N: got" in refused(capsys, "scale", number)


def test_replicas_need_keys_or_to_be_asked_for_without(capsys) -> None:
    said = refused(capsys, "up", "simulated:")
    assert "--keys is missing: a folder of `slipstream keys`" in said


def test_what_would_keep_each_replica_from_starting(capsys, tmp_path: Path) -> None:
    assert "--model" in refused(capsys, "up", "--insecure", "--model", str(tmp_path))
    assert "--keys" in refused(capsys, "up", "--keys", str(tmp_path / "none"))
    assert "--num-cpus" in refused(capsys, "up", "--insecure", "--num-cpus=-1")


@pytest.mark.parametrize("words", [["up", "--insecure"], ["status"], ["scale", "2"], ["down"]])
def test_ray_has_to_be_installed(capsys, words: list[str]) -> None:
    assert "pip install 'slipstream[ray]'" in refused(capsys, *words)
    assert "letters, digits" in refused(capsys, *words, "--name", "a/b")


@pytest.mark.parametrize("words", [["up", "--insecure"], ["status"], ["scale", "2"], ["down"]])
@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_dead_cluster_is_named_before_ray_is_asked(
    capsys, monkeypatch: pytest.MonkeyPatch, words: list[str], form: str
) -> None:
    """Ray goes on trying for minutes."""
    monkeypatch.setattr("slipstream_ray.commands.has_ray", lambda: True)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = form.format(f"127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert main(["ray", *words]) == 1
        said = capsys.readouterr().err
        assert f"no Ray cluster at {address}: " in said
        assert "Connection refused" in said
        assert "--ray-address" in said
        monkeypatch.delenv("RAY_ADDRESS")
        assert main(["ray", *words, "--ray-address", address]) == 1
        assert address in capsys.readouterr().err


@pytest.mark.parametrize("address", ["auto", "local", "nonsense", "host:", ":6379"])
def test_what_ray_knows_better_is_left_to_it(address: str) -> None:
    check_reachable(address)


def test_an_unknown_host_is_no_cluster() -> None:
    with pytest.raises(ConnectionLostError, match=r"no Ray cluster at no\.such\.invalid:6379"):
        check_reachable("no.such.invalid:6379")


def test_what_listens_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
