"""The worker's side of its prompt process.

Owns: the child, the socket to it, the prompts it has yet to answer. Does not know: streams.

Rules:
- A child that dies is started again, and asked again what it had not answered once it is ready; a
  prompt that was being rendered in two deaths is refused. What was being rendered the child's note
  says (`render_note`): what only waited is not to blame. As a short one and a long one are under
  way together (`long_prompts`), the long one is refused only where there was no such short one.
- A child whose loop does not beat any more hangs, and is killed; so is a successor that takes
  longer than LOAD_S to load. The first one may take as long as its tokenizer needs.
- A child that says what is no answer is ended, and so replaced: its next answers could be wrong.
  So is a successor that cannot load the tokenizer, or loads another one than the first had.
- Between restarts are pauses (`slipstream_ipc.backoff`). Prompts wait meanwhile; where there has
  been no child for WAIT_S, those that wait are refused, as are those that come until there is one.
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

from slipstream_ipc.backoff import RestartBackoff
from slipstream_ipc.messages import (
    ErrorCode,
    Fault,
    FromPromptProcess,
    PromptReady,
    Render,
    Rendered,
    State,
)
from slipstream_ipc.process import PARENT_PID_VARIABLE, SILENT_S, STATUS_FD_VARIABLE
from slipstream_worker.tokenizer.fair_order import FairOrder
from slipstream_worker.tokenizer.long_prompts import is_long, size_of
from slipstream_worker.tokenizer.render_note import RenderNote

logger = logging.getLogger(__name__)

LOAD_S = 120.0
WAIT_S = 60.0
_STOP_WITHIN_S = 1.0
_NO_PROCESS = "no prompt can be tokenised at the moment: the server's log says why"


class RenderSource(Protocol):
    """Whoever turns prompts into token ids."""

    def ask(self, request: Render) -> int:
        """Have a prompt rendered; the key under which its ids will come (`request.key` is void)."""

    def withdraw(self, key: int) -> bool:
        """An answer is wanted no more; whether none will come, as nobody has begun with it."""

    def is_among(self, arrived: Container[object]) -> bool:
        """Whether a poller that has said this has something for `receive`."""

    def receive(self) -> Iterable[Rendered | PromptReady]:
        """What has arrived."""

    def beat(self, now: float) -> Iterable[Rendered]:
        """Look for signs of life; the prompts that will not be answered any more."""


class TokenizerClient:
    """Sends prompts to be rendered, brings their ids back."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        config: dict[str, object],
        *,
        hang_timeout_s: float = 10.0,
        wait_s: float = WAIT_S,
    ) -> None:
        """`config`: the fields of a TokenizerConfig but address and note.

        hang_timeout_s: silence after which the child is replaced. wait_s: how long prompts wait for
        a child that is ready.
        """
        self._config = {**config, "address": address}
        self._hang_timeout_s = hang_timeout_s
        self._wait_s = wait_s
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # no high-water mark: `_waiting` holds what is unanswered anyway, and is sent only once
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder[FromPromptProcess](FromPromptProcess)
        self._waiting: dict[int, Render] = {}  # oldest first
        self._long = FairOrder()  # those of them that are long, one at a time
        self._strikes: dict[int, int] = {}
        self._next_key = 0
        self._note = RenderNote()
        self._pauses = RestartBackoff()
        self._first: PromptReady | None = None  # what every successor has to say too
        self._is_ready = False
        self._has_spoken = False  # since the last beat
        self._heard_at: float | None = None  # None: not looked at since it was started
        self._ready_at: float | None = None
        self._lost_at: float | None = None  # since when there is none that is ready, but was one
        self._start_at = 0.0  # where there is no child
        self.num_failed = 0  # children in a row that ended before they were ready
        self._child: subprocess.Popen[bytes] | None = self._start()

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
                self._kill()
                continue
            self._has_spoken = True
            if isinstance(answer, Rendered):
                self._strikes.pop(answer.key, None)
                if self._waiting.pop(answer.key, None) is None:
                    continue
                self._long.discard(answer.key)
                self._send_long()
                yield answer
            elif isinstance(answer, PromptReady):
                if self._child is None or answer.pid != self._child.pid:
                    continue  # one that is dead said it
                self._ready(answer)
                yield answer

    def beat(self, now: float) -> Iterator[Rendered]:
        """Start a dead child again, end one that hangs; the prompts that it will not be asked any
        more.
        """
        if self._child is None:
            if now >= self._start_at:
                self._restart(now)
        elif self._child.poll() is not None:
            yield from self._died(now, f"the prompt process died (code {self._child.returncode})")
        elif self._heard_at is None or self._has_spoken or self._socket.poll(0):
            self._heard_at = now  # what lies unread says that it lives, too
        else:
            most_s = self._hang_timeout_s if self._is_ready else LOAD_S
            if (self._is_ready or self._first is not None) and now >= self._heard_at + most_s:
                logger.error("the prompt process hangs: no sign of life for %g s", most_s)
                self._kill()
        self._has_spoken = False
        if self._is_ready:
            self._ready_at = now if self._ready_at is None else self._ready_at
            self._lost_at = None
        elif self._first is not None:
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now >= self._lost_at + self._wait_s:
                yield from self._refuse_all()

    def condition(self, now: float) -> State:
        """How the child is, in the words of `Condition`."""
        if self._first is None:
            return "starting"
        if not self._is_ready:
            return "restarting"
        is_silent = self._heard_at is not None and now >= self._heard_at + SILENT_S
        return "silent" if is_silent else "ready"

    def close(self) -> None:
        """End the child and remove the socket."""
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._socket.close()
        self._note.close()

    def _ready(self, ready: PromptReady) -> None:
        """The child has loaded its tokenizer, or could not."""
        said = msgspec.structs.replace(ready, pid=0, why_not="")
        if not ready.error and self._first is None:
            self._first = said
        if said != self._first:
            if self._first is not None:
                another = "its tokenizer is another one than that which text is decoded with"
                logger.error("the prompt process cannot serve: %s", ready.error or another)
            self._kill()
            return
        self._is_ready = True
        self.num_failed = 0
        for request in self._waiting.values():
            if not is_long(request) or request.key == self._long.current:
                self._send(request)
        self._send_long()

    def _died(self, now: float, how: str) -> Iterator[Rendered]:
        served_s = 0.0 if self._ready_at is None else now - self._ready_at
        pause_s = self._pauses.after(served_s)
        more = f"; the next one is started in {pause_s:g} s" if pause_s else "; starting another"
        logger.error("%s%s", how, more)
        yield from self._strike()
        self.num_failed += self._ready_at is None
        self._child, self._ready_at, self._is_ready = None, None, False
        self._start_at = now + pause_s
        if not pause_s:
            self._restart(now)

    def _restart(self, now: float) -> None:
        self._heard_at = None
        try:
            self._child = self._start()
        except OSError as error:
            pause_s = self._pauses.after(0.0)
            self._start_at = now + pause_s
            logger.error("the prompt process cannot be started, again in %g s: %s", pause_s, error)

    def _kill(self) -> None:
        """What it was sent is sent to the next one; its end is seen with the next beat."""
        self._is_ready = False
        if self._child is not None:
            self._child.kill()

    def _strike(self) -> Iterator[Rendered]:
        """After a death: the prompt that is refused for it, if any."""
        suspects = [key for key in self._note.under_way() if key in self._waiting]
        self._note.clear()
        for key in suspects:
            self._strikes[key] = self._strikes.get(key, 0) + 1
        for key in suspects:
            if self._strikes[key] > 1:
                yield self._refuse(key, "the prompt process died twice of this prompt")
                return

    def _refuse_all(self) -> Iterator[Rendered]:
        for key in list(self._waiting):
            yield self._refuse(key, _NO_PROCESS, "overloaded")  # it may be asked for again

    def _refuse(self, key: int, why: str, code: ErrorCode = "engine") -> Rendered:
        del self._waiting[key]
        self._strikes.pop(key, None)
        self._long.discard(key)
        return Rendered(key, fault=Fault(code, why))

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
            [sys.executable, "-m", "slipstream_worker.tokenizer.process"],
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=(self._note.fd,),
        )
        assert child.stdin is not None
        config = msgspec.json.encode({**self._config, "note_fd": self._note.fd})
        with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
            stdin.write(config)  # a child that is gone already is noticed by its exit
        return child
