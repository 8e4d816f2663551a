"""Sockets that several processes take connections from."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from contextlib import closing

import pytest
from tests.patience import PATIENCE_S

from slipstream import listening
from slipstream.listening import LISTEN_FDS_VARIABLE, Taker, handed_down, inherited, listen_at


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def test_every_address_of_a_host_has_the_same_port():
    sockets = listen_at("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
        assert len({one.getsockname()[0] for one in sockets}) == len(sockets)
    finally:
        listening.close_all(sockets)


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_open(monkeypatch):
    opened: list[socket.socket] = []
    here = threading.get_ident()

    class Noted(socket.socket):
        def __init__(self, *args):
            super().__init__(*args)
            if threading.get_ident() == here:
                opened.append(self)

    (taken,) = listen_at("127.0.0.1", 0)
    with closing(taken):
        monkeypatch.setattr(listening.socket, "socket", Noted)
        with pytest.raises(OSError) as caught:
            listen_at("127.0.0.1", listening.port_of(taken))
        assert caught.value.errno == errno.EADDRINUSE
    assert [one.fileno() for one in opened] == [-1]


def test_what_is_handed_down_is_inherited(monkeypatch):
    (one,) = listen_at("127.0.0.1", 0)
    port = listening.port_of(one)
    monkeypatch.setenv(LISTEN_FDS_VARIABLE, handed_down([one]))
    one.detach()
    found = inherited()
    assert found is not None
    assert [listening.port_of(each) for each in found] == [port]
    assert inherited() is None  # once
    listening.close_all(found)


def test_nothing_may_be_handed_down(monkeypatch):
    monkeypatch.setenv(LISTEN_FDS_VARIABLE, handed_down([]))
    assert inherited() == []
    assert inherited() is None


class Kept(asyncio.Protocol):
    """A connection that its taker counts."""

    def __init__(self, taken: list[Kept]) -> None:
        self._taken = taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._taken.append(self)


async def until(is_so) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)


def test_a_burst_is_spread_over_those_who_share_a_socket():
    """Both take from one queue; nobody takes all of it in one turn."""

    async def main() -> None:
        (one,) = listen_at("127.0.0.1", 0)
        other = one.dup()
        other.setblocking(False)
        port = listening.port_of(one)
        clients = [connected(port) for _ in range(64)]  # the kernel holds them
        shares: list[list[Kept]] = [[], []]
        takers = [
            Taker([each], lambda share=share: Kept(share))
            for each, share in zip((one, other), shares, strict=True)
        ]
        await until(lambda: sum(map(len, shares)) == 64)
        assert min(map(len, shares)) >= 16
        for taker in takers:
            taker.close()
            taker.close()  # once more is nothing
        for kept in [*shares[0], *shares[1]]:
            kept.transport.abort()
        for client in clients:
            client.close()

    asyncio.run(main())


def test_what_one_has_not_taken_waits_for_the_next():
    async def main() -> None:
        (one,) = listen_at("127.0.0.1", 0)
        held = one.dup()  # as the supervisor holds it
        taken: list[Kept] = []
        Taker([one], lambda: Kept(taken)).close()
        with connected(listening.port_of(held)):
            held.setblocking(False)
            second = Taker([held], lambda: Kept(taken))
            await until(lambda: len(taken) == 1)
            second.close()
            taken[0].transport.abort()

    asyncio.run(main())


def test_where_there_is_no_room_it_takes_more_after_a_while(monkeypatch, caplog):
    """A process out of descriptors must not turn in circles, nor stop for good."""
    monkeypatch.setattr(listening, "_PAUSE_S", 0.01)
    failures = [OSError(errno.EMFILE, "Too many open files")]

    class Listener(socket.socket):
        def accept(self):
            if failures:
                raise failures.pop()
            return super().accept()

    async def main() -> None:
        with Listener() as one:
            one.bind(("127.0.0.1", 0))
            one.listen()
            one.setblocking(False)
            taken: list[Kept] = []
            taker = Taker([one], lambda: Kept(taken))
            with connected(listening.port_of(one)):
                await until(lambda: len(taken) == 1)
                taken[0].transport.abort()
            taker.close()

    asyncio.run(main())
    assert "Too many open files" in caplog.text
