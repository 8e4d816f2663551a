"""What a stack of real processes tells a client that routes: how its core has died."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque

import pytest
import zmq
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream_ipc.messages import WANTS_LOAD, ClientToWorker, Load, Welcome, WorkerToClient
from slipstream_ipc.transport.codec import client_codec
from slipstream_ipc.transport.dealer import Dealer, LinkOptions


class Router:
    """Hears a stack's loads."""

    def __init__(self, stack: Stack) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._dealer: Dealer[ClientToWorker, WorkerToClient, None] = Dealer(
            self._context,
            stack.address,
            client_codec(),
            self._poller,
            identity=secrets.token_bytes(16),
            now=time.monotonic(),
            options=LinkOptions(WANTS_LOAD),
        )
        self._unread: deque[Load] = deque()
        self.welcome: Welcome | None = None

    def await_state(self, state: str) -> Load:
        """The next load with this state; several may come at once."""
        patience = Patience()
        while True:
            while self._unread:
                load = self._unread.popleft()
                if load.state == state:
                    return load
            patience.check()
            self._poller.poll(50)
            now = time.monotonic()
            for body in self._dealer.receive(now):
                if isinstance(body, Load):
                    self._unread.append(body)
                elif isinstance(body, Welcome):
                    self.welcome = body
            self._dealer.beat(now)

    def close(self) -> None:
        self._dealer.close()
        self._context.destroy(linger=0)


@pytest.fixture
def stack():
    with spareless_stack("simulated:step_ms=1") as stack:
        yield stack


def test_a_death_of_the_core_is_told_with_whose_doing_it_was(stack: Stack) -> None:
    router = Router(stack)
    try:
        assert not router.await_state("serving").within
        for number, is_within in ((signal.SIGKILL, False), (signal.SIGABRT, True)):
            os.kill(stack.pids["core"], number)
            told = router.await_state("core_away")
            while told.within != is_within:  # the link breaks before the supervisor has looked
                told = router.await_state("core_away")
            assert not router.await_state("serving").within
        assert router.welcome is not None
        assert router.welcome.incarnation > 0
        assert len(router.welcome.model.fingerprint) == 16
    finally:
        router.close()
