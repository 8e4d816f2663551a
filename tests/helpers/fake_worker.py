"""A fake worker that a test controls, and the messages it sends."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import zmq
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Accepted,
    AnswerEvent,
    AttachRefused,
    Deltas,
    End,
    Fault,
    Goodbye,
    Hello,
    LogprobColumns,
    ModelCard,
    Reattach,
    Rejected,
    Submit,
    TurnChanges,
)
from slipstream_ipc.transport.codec import front_codec
from slipstream_ipc.transport.router import Router
from slipstream_ipc.transport.sockets import bind_router
from slipstream_worker.streams.registration import answers_of

MODEL = ModelCard("fake", "/nowhere", vocab_size=1000, max_model_len=2048, eos_token_ids=(2,))


Body = TypeVar("Body")


@dataclass(frozen=True)
class Entry:
    """One entry of a Deltas message. ids: by default one token per character.

    kind: an EventKind and, from bit 8 on, a call. events: the entry's own; None if none are listed.
    """

    handle: int
    text: str
    chars: int = 0
    tokens: int | None = None
    ids: Sequence[int] | None = None
    end: End | None = None
    kind: int = 0
    events: tuple[AnswerEvent, ...] | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """The entry's part of the column of token ids."""
        return [ord(char) for char in self.text] if self.ids is None else self.ids


def deltas(*entries: Entry, logprobs: LogprobColumns | None = None) -> Deltas:
    """A Deltas message of `entries`."""
    ended = [index for index, entry in enumerate(entries) if entry.end is not None]
    counts = [len(entry.token_ids) for entry in entries]
    kinds = [entry.kind for entry in entries]
    listed = [index for index, entry in enumerate(entries) if entry.events is not None]
    starts = [entry.chars if entry.tokens is None else entry.tokens for entry in entries]
    return Deltas(
        pack_u32([entry.handle for entry in entries]),
        pack_u32([entry.chars for entry in entries]),
        pack_u32(starts),
        [entry.text for entry in entries],
        pack_u32([token_id for entry in entries for token_id in entry.token_ids]),
        pack_u32(counts) if set(counts) != {1} else b"",
        pack_u32(ended),
        tuple(entry.end for entry in entries if entry.end is not None),
        logprobs,
        pack_u32(kinds) if any(kinds) else b"",
        pack_u32(listed) if listed else b"",
        tuple(entry.events for entry in entries if entry.events is not None),
    )


def end_of(text: str, reason: Any = "stop", **fields: Any) -> End:
    """The end of a stream whose output is `text`, with one token per character."""
    return End(reason, len(text), **fields)


class FakeWorker:
    """Answers each Hello in a thread; other messages go to `script`, or else to `expect`.

    A script runs in the worker's thread and must not wait for it: it uses `post`, not `send`.
    """

    def __init__(
        self,
        address: str,
        script: Callable[[FakeWorker, Any], None] | None = None,
        model: ModelCard = MODEL,
        members: tuple[str, ...] = (),
    ) -> None:
        self.address = address
        self.script = script
        self.model = model
        self.members = members
        self.is_silent = False  # leave Hellos unanswered
        self.hellos: queue.Queue[Hello] = queue.Queue()  # of attaches after a client's first
        self._received: queue.Queue[Any] = queue.Queue()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # a test may send further ahead of its client than a worker's window allows
        with patch("slipstream_ipc.transport.sockets._PEER_HWM", 0):
            self._router = bind_router(self._context, address)
        self._acceptor: Router[Any, Any, None] = Router(self._router, front_codec(), window=1000)
        self._is_done = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ---- for the test ----------------------------------------------------------------------

    def expect(self, kind: type[Body]) -> Body:
        """The next message of a client; asserts its type."""
        body = self._received.get(timeout=PATIENCE_S)
        assert isinstance(body, kind), body
        return body

    def accept(
        self,
        submit: Submit,
        prompt_ids: Sequence[int] = (1, 2),
        changed_turns: TurnChanges = (),
    ) -> int:
        """Accept a Submit. Returns the stream's handle."""
        self.send(Accepted(submit.handle, pack_u32(list(prompt_ids)), changed_turns))
        return submit.handle

    def expect_and_accept(self) -> int:
        """Accept the next message, a Submit. Returns the stream's handle."""
        return self.accept(self.expect(Submit))

    def accept_from_script(self, submit: Submit, prompt_ids: Sequence[int] = (1, 2)) -> None:
        """`accept`, from a script."""
        self.post(Accepted(submit.handle, pack_u32(list(prompt_ids))))

    def reject(self, submit: Submit, fault: Fault) -> None:
        """Reject a Submit."""
        self.send(Rejected(submit.handle, fault))

    def send(self, *bodies: Any) -> None:
        """Send messages to the latest client."""
        self.do(lambda: self.post(*bodies))

    def post(self, *bodies: Any) -> None:
        """`send`, from a script."""
        for body in bodies:
            assert self._acceptor.send(self._acceptor.sessions[-1], body, None)

    def tell_to_attach(self) -> None:
        """End the session, so that the client has to attach again."""
        self.do(self.interrupt)

    def interrupt(self) -> None:
        """`tell_to_attach`, from a script."""
        self._control(Reattach())
        self._acceptor.close(self._acceptor.sessions[-1])

    def refuse(self, fault: Fault, *, is_leaving: bool = False) -> None:
        """Send the latest client an AttachRefused."""
        self.do(lambda: self._control(AttachRefused(fault, is_leaving)))

    def acknowledged(self) -> bool:
        """Whether the client has acknowledged everything."""
        return self.do(lambda: not self._acceptor.sessions[-1].link.num_unacked)

    @property
    def has_session(self) -> bool:
        """Whether a client is attached. To be called from a script or in `do`."""
        return bool(self._acceptor.sessions)

    def do(self, action: Callable[[], Any]) -> Any:
        """Run `action` in the worker's thread and return its result."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(run)
        self._rope.send(b"!")
        return future.result(PATIENCE_S)

    def stop(self) -> None:
        """Stop without a message to clients."""
        if not self._is_done:
            self._is_done = True
            self._rope.send(b"!")
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive(), "its script waits for something"
            self._context.destroy(linger=0)
            self._bell.close()
            self._rope.close()

    # ---- the thread --------------------------------------------------------------------------

    def _control(self, body: Any) -> None:
        session = self._acceptor.sessions[-1]
        self._acceptor._send(
            session.route, self._acceptor._codec.encode(session.link.control(body))
        )

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._bell.fileno(), zmq.POLLIN)
        while not self._is_done:
            ready = dict(poller.poll())
            if self._bell.fileno() in ready:
                for _ in self._bell.recv(64):
                    if not self._is_done:
                        self._commands.get()()
            for session, body in self._acceptor.receive(time.monotonic()):
                if isinstance(body, Hello):
                    if not self.is_silent:
                        self._acceptor.welcome(session, self.model, members=self.members)
                    if not body.fresh:
                        self.hellos.put(body)
                elif isinstance(body, Goodbye):
                    self._received.put(body)
                else:
                    # one Submit for several answers becomes one per answer
                    for each in answers_of(body) if isinstance(body, Submit) else (body,):
                        if self.script is not None:
                            self.script(self, each)
                        else:
                            self._received.put(each)
