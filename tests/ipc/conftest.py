"""A router and dealers on real sockets, stepped by the test.

Time is an argument of all calls, so tests pass their own. Only the passage of a message through the
sockets takes real time, and waits for it have a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zmq
from tests.helpers.patience import Patience

from slipstream_ipc.messages import Hello, ModelCard
from slipstream_ipc.transport.codec import Codec, client_codec, front_codec
from slipstream_ipc.transport.dealer import Dealer
from slipstream_ipc.transport.poller import Poller
from slipstream_ipc.transport.router import Router, Session
from slipstream_ipc.transport.sockets import ServerSockets, bind_router, listen

CARD = ModelCard("m", "p", 100, 64, (2,))


class Hop:
    """One `Router` (the acceptor) and any number of `Dealer`s (the attachers)."""

    def __init__(self, address: str, *, is_local: bool = False) -> None:
        """`is_local`: over local connections, else over ZeroMQ."""
        self.is_local = is_local
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = address
        self.now = 1000.0
        self.attachers: list[Dealer[Any, Any, Any]] = []
        self.received: list[Any] = []  # by the acceptor, without Hellos
        self.hellos: list[Hello] = []
        self.is_welcoming = True
        self.cleanup = ExitStack()
        self.answers: dict[Dealer[Any, Any, Any], list[Any]] = {}
        self.accept()

    def accept(self, window: int = 4) -> None:
        """(Re)start the acceptor."""
        if self.is_local:
            self.sockets = listen(self.context, self.address)
        else:
            self.sockets = ServerSockets(bind_router(self.context, self.address), None)
        self.router = self.sockets.router
        self.acceptor: Router[Any, Any, Any] = Router(
            self.router, front_codec(), window=window, local=self.sockets.local
        )

    def attacher(
        self, identity: bytes = b"me", codec: Codec[Any, Any] | None = None, **options: Any
    ) -> Dealer[Any, Any, Any]:
        attacher: Dealer[Any, Any, Any] = Dealer(
            self.context,
            self.address,
            client_codec() if codec is None else codec,
            Poller(),
            identity=identity,
            now=self.now,
            **options,
        )
        self.attachers.append(attacher)
        self.answers[attacher] = []
        return attacher

    def attached(self, identity: bytes = b"me", **options: Any) -> Dealer[Any, Any, Any]:
        attacher = self.attacher(identity, **options)
        self.until(lambda: attacher.is_attached)
        return attacher

    def session(self, identity: bytes = b"me") -> Session[Any]:
        return next(s for s in self.acceptor.sessions if s.identity == identity)

    def serve(self) -> None:
        """One turn of the acceptor."""
        for session, body in self.acceptor.receive(self.now):
            if isinstance(body, Hello):
                self.hellos.append(body)
                if self.is_welcoming:
                    self.acceptor.welcome(session, CARD)
            else:
                self.received.append(body)

    def turn(self) -> None:
        """One turn of the acceptor and all attachers."""
        self.serve()
        for attacher in self.attachers:
            self.answers[attacher] += attacher.receive(self.now)

    def until(self, is_done: Callable[[], Any], turn: Callable[[], None] | None = None) -> None:
        """Take turns until `is_done`, with a deadline."""
        poller = Poller()
        self.acceptor.register(poller)
        patience = Patience()
        while not is_done():
            patience.check()
            poller.poll(1)  # ms; bounds how long an attacher waits for its turn
            (turn or self.turn)()

    def close(self) -> None:
        for attacher in self.attachers:
            attacher.close()
        self.cleanup.close()
        self.sockets.close()
        self.context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    with TemporaryDirectory(prefix="s-") as folder:  # a Unix socket's path must be short
        yield f"ipc://{Path(folder).resolve()}/s"


@pytest.fixture(params=["zmq", "local"])
def hop(address: str, request: pytest.FixtureRequest) -> Iterator[Hop]:
    hop = Hop(address, is_local=request.param == "local")
    yield hop
    hop.close()
