"""Socket options, addresses and directories, on real sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.messages import (
    Abort,
    AttachRefused,
    Fault,
    Goodbye,
    Hello,
    ModelCard,
    Ping,
    Reattach,
    Report,
    Step,
    SyncDone,
    Welcome,
)
from slipstream_ipc.transport.sockets import (
    bind_router,
    check_address,
    is_numbered,
    new_dealer,
    private_directory,
)

POLL_MS = int(PATIENCE_S * 1e3)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_control_messages_take_no_number() -> None:
    fault = Fault("engine", "")
    card = ModelCard("m", "p", 1, 1, ())
    for body in (None, Hello(1, b""), Welcome(1, card), Reattach(), AttachRefused(fault), Ping()):
        assert not is_numbered(body)
    for body in (Abort(b""), Goodbye(), Report(1), Step(1, b"", b""), SyncDone()):
        assert is_numbered(body)


@pytest.mark.parametrize("path", ["/s", "/" + "a" * 99, "/tmp/é b"])
def test_addresses(path: str) -> None:
    assert check_address("ipc://" + path) == "ipc://" + path


@pytest.mark.parametrize(
    "address", ["", "/s", "ipc://s", "ipc://*", "tcp://127.0.0.1:1", "ipc:///" + "é" * 50]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"address: got .*, allowed: "):
        check_address(address)


@pytest.mark.parametrize("open_socket", [bind_router, lambda c, a: new_dealer(c, a, b"r")])
def test_a_bad_address_leaves_no_socket_behind(open_socket: object) -> None:
    """An open one would keep the context from ever ending."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1)
    for _ in range(3):
        with pytest.raises(ValueError, match="address"):
            open_socket(context, "tcp://127.0.0.1:1")  # type: ignore[operator]
    context.term()


def test_a_path_that_cannot_be_bound_leaves_no_socket_behind(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        bind_router(context, "ipc:///nowhere/s")
    context.term()


def test_a_route_may_be_any_16_bytes(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    """Routes are random: nothing is special about a leading zero."""
    router = bind_router(context, address)
    for route in (bytes(16), b"\0" + b"a" * 15, b"\xff" * 16):
        dealer = new_dealer(context, address, route)
        dealer.send(b"x")
        assert router.poll(POLL_MS)
        assert router.recv_multipart() == [route, b"x"]
        router.send_multipart([route, b"y"])
        assert dealer.poll(POLL_MS)
        assert dealer.recv() == b"y"


def test_a_router_says_that_a_route_is_gone(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    router = bind_router(context, address)
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_private_directory(tmp_path: Path) -> None:
    made = private_directory(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    assert private_directory(made) == made
    fresh = private_directory()
    assert fresh.stat().st_mode & 0o777 == 0o700
    fresh.rmdir()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_may_enter(mode: int) -> None:
    with TemporaryDirectory() as folder:
        os.chmod(folder, mode)
        with pytest.raises(PermissionError, match="0700"):
            private_directory(Path(folder))
