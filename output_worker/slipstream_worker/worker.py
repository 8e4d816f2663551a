"""The worker's loop: what has arrived is handled, what is due is sent.

Owns: the order of things in one turn. Does not know: what any message means.

Rules:
- The report to the core leaves before the deltas to the clients: the device may wait for it.
- Nobody is heard before the core has told everything it knows: what clients send until then lies
  unread in the socket, and the poller does not look at it.
- A core that breaks the protocol is attached anew; no stream suffers from it.
"""

from __future__ import annotations

import logging
from typing import Literal

import zmq

from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import Fault, ModelCard, Rendered
from slipstream_worker.clients import FrontAcceptor
from slipstream_worker.core_hop import CoreHop
from slipstream_worker.detokenizer import DetokenizerFactory
from slipstream_worker.from_clients import FromClients
from slipstream_worker.from_core import FromCore
from slipstream_worker.lives import Lives
from slipstream_worker.prompts import PromptSource

logger = logging.getLogger(__name__)


class Worker:
    """One worker, between its core and its clients."""

    def __init__(
        self,
        core: CoreHop,
        socket: zmq.Socket[bytes],
        front: FrontAcceptor,
        prompts: PromptSource,
        detokenizers: DetokenizerFactory,
        poller: zmq.Poller,
        *,
        tokenizer: str,
        stream_interval: int | Literal["auto"],
        grace_s: float,
    ) -> None:
        """`socket` is the one that `front` accepts on; `tokenizer` is where clients find it."""
        self._poller = poller
        self._is_open = False
        self._core = core
        self._socket = socket
        self._front = front
        self._prompts = prompts
        self.lives = Lives(core, front, grace_s, stream_interval)
        self._from_core = FromCore(core, self.lives, detokenizers, tokenizer=tokenizer)
        self._from_clients = FromClients(front, self.lives, prompts, detokenizers)

    @property
    def card(self) -> ModelCard | None:
        """What is served, once the core has said so."""
        return self._from_core.card

    def run_once(self, now: float) -> None:
        """Take in everything that has arrived, send everything that is due."""
        try:
            for message in self._core.receive(now):
                self._from_core.handle(message)
        except ProtocolError:
            logger.exception("the core broke the protocol; attaching anew")
            self._core.attach(now)
        card = self.card
        if card is not None and self._from_core.is_synced:
            if not self._is_open:
                self._is_open = True
                self._poller.register(self._socket, zmq.POLLIN)
            for session, body in self._front.receive(now):
                self._from_clients.handle(session, body, card)
            for answer in self._prompts.receive():
                if isinstance(answer, Rendered):
                    self._from_clients.rendered(answer, card)
        self._core.flush()
        self.lives.flush(now)

    def beat(self, now: float) -> None:
        """What only the clock brings: signs of life, and what is to be forgotten."""
        self._core.beat(now)
        self._front.beat(now)
        for answer in self._prompts.beat():
            if self.card is not None:
                self._from_clients.rendered(answer, self.card)
        self.lives.beat(now)

    def say_goodbye(self) -> None:
        """Tell the clients that the stack stops, so that they need not find out by waiting."""
        self._front.refuse_all(Fault("engine", "the server is shutting down"))

    def close(self, linger_ms: int = 0) -> None:
        """Leave: whoever comes next is told everything by the neighbours."""
        self._core.close()
        if self._is_open:
            self._poller.unregister(self._socket)
        self._socket.close(linger=linger_ms)
