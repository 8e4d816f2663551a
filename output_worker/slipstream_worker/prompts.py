"""The worker's side of its prompt process.

Owns: the child, the socket to it, the prompts it has yet to answer. Does not know: streams.

Rules:
- A child that dies is started again, and asked again what it had not answered once it is ready; a
  prompt that was being rendered in two deaths is refused. As a short one and a long one are under
  way together (`long_prompts`), the long one is refused only where there was no such short one.
- A child that says what is no answer is ended, and so replaced: its next answers could be wrong.
- Nothing blocks: what cannot be sent while there is no child is sent when there is one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from typing import Protocol

import msgspec
import zmq

from slipstream_ipc.child import PARENT_PID_VARIABLE, STATUS_FD_VARIABLE
from slipstream_ipc.messages import Fault, FromPromptProcess, PromptReady, Render, Rendered
from slipstream_worker.long_prompts import is_long, size_of
from slipstream_worker.shorter_first import ShorterFirst

logger = logging.getLogger(__name__)

_STOP_WITHIN_S = 1.0


class PromptSource(Protocol):
    """Whoever turns prompts into token ids."""

    def ask(self, request: Render) -> int:
        """Have a prompt rendered; the key under which its ids will come (`request.key` is void)."""

    def withdraw(self, key: int) -> bool:
        """An answer is wanted no more; whether none will come, as nobody has begun with it."""

    def is_among(self, arrived: Container[object]) -> bool:
        """Whether a poller that has said this has something for `receive`."""

    def receive(self) -> Iterable[Rendered | PromptReady]:
        """What has arrived."""

    def beat(self) -> Iterable[Rendered]:
        """Look for signs of life; the prompts that will not be answered any more."""


class Prompts:
    """Sends prompts to be rendered, brings their ids back."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, config: dict[str, object]
    ) -> None:
        """`config`: the fields of a PromptConfig but the address."""
        self._config = msgspec.json.encode({**config, "address": address})
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # no high-water mark: `_waiting` holds what is unanswered anyway, and is sent only once
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder[FromPromptProcess](FromPromptProcess)
        self._waiting: dict[int, Render] = {}  # oldest first; of short ones the first is rendered
        self._long = ShorterFirst()  # those of them that are long, one at a time
        self._strikes: dict[int, int] = {}
        self._next_key = 0
        self._is_ready = False
        self._child = self._start()

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For the poller."""
        return self._socket

    def ask(self, request: Render) -> int:
        """Have a prompt rendered; the key under which its ids will come (`request.key` is void)."""
        self._next_key += 1
        request = msgspec.structs.replace(request, key=self._next_key)
        self._waiting[request.key] = request
        if is_long(request):
            self._long.add(request.key, size_of(request))
            self._send_long()
        elif self._is_ready:
            self._send(request)
        return request.key

    def withdraw(self, key: int) -> bool:
        """An answer is wanted no more; whether none will come, as nobody has begun with it."""
        request = self._waiting.get(key)
        if request is None:
            return True
        if self._is_ready and (not is_long(request) or key == self._long.current):
            return False  # it was sent
        del self._waiting[key]
        self._strikes.pop(key, None)
        self._long.discard(key)
        return True

    def is_among(self, arrived: Container[object]) -> bool:
        """Whether a poller that has said this has something for `receive`."""
        return self._socket in arrived

    def receive(self) -> Iterator[Rendered | PromptReady]:
        """What has arrived."""
        while self._socket.poll(0):
            data = self._socket.recv()
            try:
                answer = self._decoder.decode(data)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                logger.error(
                    "the prompt process said %d bytes that are no answer: %s", len(data), error
                )
                self._child.kill()
                continue
            if isinstance(answer, Rendered):
                self._strikes.pop(answer.key, None)
                if self._waiting.pop(answer.key, None) is None:
                    continue
                self._long.discard(answer.key)
                self._send_long()
            else:
                self._is_ready = True
                for request in self._waiting.values():
                    if not is_long(request) or request.key == self._long.current:
                        self._send(request)
                self._send_long()
            yield answer

    def beat(self) -> Iterator[Rendered]:
        """Start a dead child again; the prompts that it will not be asked any more."""
        if self._child.poll() is None:
            return
        logger.error("the prompt process died (code %s); starting another", self._child.returncode)
        for key in self._suspects():
            self._strikes[key] = self._strikes.get(key, 0) + 1
        for key in self._suspects():
            if self._strikes[key] > 1:
                del self._waiting[key], self._strikes[key]
                self._long.discard(key)
                fault = Fault("engine", "the prompt process died twice of this prompt")
                yield Rendered(key, fault=fault)
                break
        self._is_ready = False
        self._child = self._start()

    def close(self) -> None:
        """End the child and remove the socket."""
        self._child.terminate()
        try:
            self._child.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._socket.close()

    def _suspects(self) -> list[int]:
        """What was being rendered, perhaps: the first short one, and the long one."""
        short = (key for key, request in self._waiting.items() if not is_long(request))
        found = [next(short, None), self._long.current]
        return [key for key in found if key is not None]

    def _send_long(self) -> None:
        """Have the next long one rendered, where none is."""
        if self._is_ready and (key := self._long.next()) is not None:
            self._send(self._waiting[key])

    def _send(self, request: Render) -> None:
        # where the child is gone unnoticed, the request is sent again to the next one
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encode(request), zmq.NOBLOCK)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != STATUS_FD_VARIABLE}
        environment[PARENT_PID_VARIABLE] = str(os.getpid())  # it dies with us, however early
        child = subprocess.Popen(
            [sys.executable, "-m", "slipstream_worker.prompt_process"],
            stdin=subprocess.PIPE,
            env=environment,
        )
        assert child.stdin is not None
        child.stdin.write(self._config)
        child.stdin.close()
        return child
