"""Sockets that several processes take connections from."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
from contextlib import closing

import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream.stack.children import listeners
from slipstream.stack.children.listeners import (
    LISTENERS_VARIABLE,
    Acceptor,
    ConnectionShares,
    Listeners,
)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def test_every_address_of_a_host_has_the_same_port():
    with closing(Listeners.at("localhost", 0)) as found:
        addresses = [one.getsockname() for one in found.sockets]
        assert {address[1] for address in addresses} == {found.port}
        assert len({address[0] for address in addresses}) == len(addresses)


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_open(monkeypatch):
    opened: list[socket.socket] = []
    here = threading.get_ident()

    class Noted(socket.socket):
        def __init__(self, *args):
            super().__init__(*args)
            if threading.get_ident() == here:
                opened.append(self)

    with closing(Listeners.at("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(listeners.socket, "socket", Noted)
        with pytest.raises(OSError) as caught:
            Listeners.at("127.0.0.1", taken.port)
        assert caught.value.errno == errno.EADDRINUSE
    assert [one.fileno() for one in opened] == [-1]


def test_what_is_handed_down_is_inherited(monkeypatch):
    ours = Listeners.at("127.0.0.1", 0)
    port = ours.port
    monkeypatch.setenv(LISTENERS_VARIABLE, ours.for_child(3))
    ours.shares().set(7)
    for one in ours.sockets:
        one.detach()  # this process is its own child
    found = Listeners.inherited()
    assert found is not None
    assert found.port == port
    assert not any(os.get_inheritable(fd) for fd in found.fds)
    assert Listeners.inherited() is None  # once
    theirs = found.shares()
    theirs.set(7 + 5)
    assert theirs.is_ahead  # it has seen the seven
    found.close()


def test_no_sockets_are_handed_down_once_they_are_closed(monkeypatch):
    with closing(Listeners.at("127.0.0.1", 0)) as ours:
        ours.stop()
        ours.stop()  # once more is nothing
        assert ours.port is None
        monkeypatch.setenv(LISTENERS_VARIABLE, ours.for_child(0))
        found = Listeners.inherited()
        assert found is not None
        assert found.sockets == []


def shares_of(*counts: int) -> list[ConnectionShares]:
    fd = ConnectionShares.new_file()
    found = [ConnectionShares(fd, front_index) for front_index in range(len(counts))]
    os.close(fd)
    for one, count in zip(found, counts, strict=True):
        one.set(count)
    return found


def test_who_has_more_than_others():
    assert [one.is_ahead for one in shares_of(100)] == [False]  # there are no others
    assert [one.is_ahead for one in shares_of(4, 0)] == [False, False]
    assert [one.is_ahead for one in shares_of(5, 3, 0)] == [True, False, False]
    first, second = shares_of(9, 0)
    second.clear()
    assert not first.is_ahead


class Kept(asyncio.Protocol):
    """A connection that its acceptor counts."""

    def __init__(self, taken: list[Kept]) -> None:
        self._taken = taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._taken.append(self)


async def until(is_so) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)


def second_of(listeners: Listeners) -> Listeners:
    """As another process has them, which shares them."""
    held = json.loads(listeners.for_child(1))
    sockets = [one.dup() for one in listeners.sockets]
    for one in sockets:
        one.setblocking(False)
    return Listeners(sockets, os.dup(held["shares"]), 1)


def burst(port: int | None, num: int) -> list[socket.socket]:
    """So many connections that the kernel holds."""
    assert port is not None
    return [connected(port) for _ in range(num)]


def end(acceptors: list[Acceptor], shares: list[list[Kept]], clients: list[socket.socket]) -> None:
    for acceptor in acceptors:
        acceptor.close()
        acceptor.close()  # once more is nothing
    for share in shares:
        for kept in share:
            kept.transport.abort()
    for client in clients:
        client.close()


def test_who_has_more_leaves_a_burst_to_who_has_less(monkeypatch):
    monkeypatch.setattr(listeners, "_YIELD_S", 10 * PATIENCE_S)

    async def main() -> None:
        first = Listeners.at("127.0.0.1", 0)
        port, second = first.port, second_of(first)
        shares: list[list[Kept]] = [[], []]
        acceptors = [Acceptor(first, lambda: Kept(shares[0]), 1000)]
        clients = burst(port, 40)
        await until(lambda: len(shares[0]) == 40)
        acceptors.append(Acceptor(second, lambda: Kept(shares[1]), 1000))
        clients += burst(port, 36)
        await until(lambda: sum(map(len, shares)) == 76)
        assert [len(one) for one in shares] == [40, 36]
        for kept in shares[0][:8]:
            kept.transport.abort()
            acceptors[0].release()
        assert not acceptors[0]._shares.is_ahead
        end(acceptors, shares, clients)

    asyncio.run(main())


def test_nobody_waits_for_one_that_hangs():
    async def main() -> None:
        first = Listeners.at("127.0.0.1", 0)
        second = second_of(first)
        second.shares().set(0)  # and takes nothing
        shares: list[list[Kept]] = [[], []]
        clients = burst(first.port, 64)
        acceptor = Acceptor(first, lambda: Kept(shares[0]), 1000)
        await until(lambda: len(shares[0]) == 64)
        end([acceptor], shares, clients)
        second.close()

    asyncio.run(main())


def test_there_are_no_more_than_there_may_be(monkeypatch, caplog):
    monkeypatch.setattr(listeners, "_PAUSE_S", 0.01)

    async def main() -> None:
        listeners = Listeners.at("127.0.0.1", 0)
        taken: list[Kept] = []
        clients = burst(listeners.port, 5)
        acceptor = Acceptor(listeners, lambda: Kept(taken), 3)
        await until(lambda: caplog.text)
        assert len(taken) <= 3
        await until(lambda: len(taken) == 3)
        acceptor.release()
        await until(lambda: len(taken) == 4)
        end([acceptor], [taken], clients)

    asyncio.run(main())
    assert "the limit of connections is reached" in caplog.text


def test_what_one_has_not_taken_waits_for_the_next():
    async def main() -> None:
        first = Listeners.at("127.0.0.1", 0)
        held = second_of(first)  # as the supervisor holds it
        taken: list[Kept] = []
        Acceptor(first, lambda: Kept(taken), 1000).close()
        clients = burst(held.port, 1)
        second = Acceptor(held, lambda: Kept(taken), 1000)
        await until(lambda: len(taken) == 1)
        end([second], [taken], clients)

    asyncio.run(main())


def test_where_there_is_no_room_it_takes_more_after_a_while(monkeypatch, caplog):
    """A process out of descriptors must not turn in circles, nor stop for good."""
    monkeypatch.setattr(listeners, "_PAUSE_S", 0.01)
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
            acceptor = Acceptor(
                Listeners([one], ConnectionShares.new_file()), lambda: Kept(taken), 1000
            )
            with connected(listeners.port_of(one)):
                await until(lambda: len(taken) == 1)
                taken[0].transport.abort()
            acceptor.close()

    asyncio.run(main())
    assert "Too many open files" in caplog.text
