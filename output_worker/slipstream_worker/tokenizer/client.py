"""The worker's side of the tokenizer process: the child, its socket, and the unanswered prompts.

- A child that dies is restarted, and once ready is sent again what it had not answered. A prompt
  that was being rendered in two deaths is refused. The child's note (`render_note`) has the prompts
  that were being rendered; prompts that only waited are not charged. As one of each lane may be
  rendered at once (`long_prompts`), a long one is refused only if no such shorter one was.
- The child has of each lane only what has its turn (`TenantOrder`): one long prompt, or short ones
  of MAX_CHARS_IN_CHILD. So a tenant's short prompt waits for no more than these, however many
  another tenant has sent.
- A child that sends no beats for `hang_timeout_s` is killed. A restarted one that is loading may be
  silent for half of `wait_s`, which leaves its successor the other half, and may take LOAD_S. The
  first child may take as long as its tokenizer needs. Time in which the child's loop was ready to
  run and had no CPU does not count (`run_delay`).
- A long prompt that takes too long is refused, and its child killed, as the thread that renders it
  cannot be ended otherwise; no other prompt is charged. The time is counted in beats that the child
  notes meanwhile, so the time of a stopped process or machine does not count.
- A child that sends an undecodable answer is killed and so replaced, since its next answers could
  be wrong. So is a restarted one that cannot load the tokenizer, or loads a different one.
- `RestartBackoff` spaces restarts; prompts wait meanwhile. After `wait_s` without a
  ready child, waiting prompts are refused, as are new ones until a child is ready.
- Nothing blocks: what cannot be sent without a child is sent once there is one.
"""

from __future__ import annotations

import contextlib
import logging
import select
from collections.abc import Container, Iterable, Iterator
from typing import Protocol

import msgspec
import zmq

from slipstream_ipc.child import ChildProcess
from slipstream_ipc.messages import (
    ErrorCode,
    Fault,
    FromTokenizerProcess,
    OwnProcess,
    Render,
    Rendered,
    TokenizerReady,
)
from slipstream_ipc.process import BEAT_S, SILENT_S
from slipstream_ipc.restart_backoff import RestartBackoff
from slipstream_ipc.run_delay import RunDelay
from slipstream_ipc.transport.poller import EVENTS, POLLIN, Poller
from slipstream_worker.tokenizer.child import start_tokenizer_process
from slipstream_worker.tokenizer.fair_order import TenantOrder
from slipstream_worker.tokenizer.long_prompts import NUM_LANES, lane_of, size_of
from slipstream_worker.tokenizer.render_note import RenderNote

logger = logging.getLogger(__name__)

LOAD_S = 120.0
WAIT_S = 60.0
LONG_S = 60.0  # for any long prompt, and besides
LONG_CHARS_PER_S = 2**14  # an eighth of what the demo model's tokenizer does on a busy machine
# of short prompts, some 20 ms of work, which outlast a turn of the worker's loop
MAX_CHARS_IN_CHILD = 2**16
PROMPT_CHARS = 128  # what a prompt costs besides its text, in characters
_STOP_WITHIN_S = 1.0
_NO_PROCESS = "prompts cannot be tokenised at the moment: see the server's log"


class RenderSource(Protocol):
    """Renders prompts to token ids."""

    def ask(self, request: Render, tenant: bytes = b"") -> int:
        """Have a prompt rendered; returns the key of its answer (`request.key` is ignored).

        tenant: whose turn it is rendered in; empty: that of all queries.
        """

    def withdraw(self, key: int) -> bool:
        """Give up an answer. Returns whether none will come, because rendering has not begun."""

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes one of this source's sockets."""

    def receive(self) -> Iterable[Rendered | TokenizerReady]:
        """The answers that have arrived."""

    def beat(self, now: float) -> Iterable[Rendered]:
        """Check for signs of life; returns refusals of prompts that are given up."""


class _Lane:
    """The prompts of a lane and, if they are long, the beats that the child has noted since it
    began the one that has its turn.
    """

    def __init__(self, order: TenantOrder) -> None:
        self.order = order
        self.num_beats = 0


class TokenizerClient:
    """Sends prompts to the tokenizer process and receives their ids."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        config: dict[str, object],
        *,
        name: str = "tokenizer",
        hang_timeout_s: float = 10.0,
        wait_s: float = WAIT_S,
        long_s: float = LONG_S,
    ) -> None:
        """`config`: the fields of a TokenizerConfig except address and note_fd. name: the child's.

        hang_timeout_s: silence after which the child is replaced. wait_s: how long prompts wait for
        a child that is ready. long_s: how long a long prompt may take, besides 1 s for each
        LONG_CHARS_PER_S characters.
        """
        self._config = {**config, "address": address}
        self._name = name
        self._hang_timeout_s = hang_timeout_s
        self._wait_s = wait_s
        self._long_s = long_s
        self._note = RenderNote()
        self._exits = select.epoll()
        # before the socket, whose threads would rule out a fork
        self._child: ChildProcess | None = self._start()
        # whether nothing was left unread when the socket was last asked, and nothing sent since:
        # then its descriptor reports what comes
        self._is_drained = False
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # no high-water mark: `_waiting` holds what is unanswered anyway, and is sent only once
        self._socket.setsockopt(zmq.SNDHWM, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            self._child.reap()
            self._exits.close()
            self._note.close()
            raise
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder[FromTokenizerProcess](FromTokenizerProcess)
        self._waiting: dict[int, Render] = {}  # oldest first
        short = TenantOrder(MAX_CHARS_IN_CHILD, by_arrival=True)
        self._lanes = [_Lane(short), *(_Lane(TenantOrder()) for _ in range(1, NUM_LANES))]
        self._num_beats = 0  # of all children, that were noted at the last beat of ours
        self._has_culprit = False  # the child was killed over a prompt that is refused already
        self._strikes: dict[int, int] = {}
        self._next_key = 0
        self._pauses = RestartBackoff()
        self._first: TokenizerReady | None = None  # which every restarted child has to match
        self._is_ready = False
        self._has_spoken = False  # since the last beat
        self._heard_at: float | None = None  # None: not checked since its start
        self._silent_delay = RunDelay()  # the child's since `_heard_at`
        self._started_at = 0.0
        self._load_delay = RunDelay()  # the child's since `_started_at`
        self._ready_at: float | None = None
        self._lost_at: float | None = None  # since when no child is ready, after one was
        self._start_at = 0.0  # when to start a child, if there is none
        self.num_failed = 0  # children in a row that ended before they were ready

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket."""
        return self._socket

    def register(self, poller: Poller) -> None:
        """Have the poller report what arrives, for `is_among`, and the child's death."""
        poller.register_input(self._fd, self._has_input)
        poller.register(self.exits)

    @property
    def exits(self) -> int:
        """A descriptor that is readable from the child's death until `beat` has noticed it."""
        return self._exits.fileno()

    def ask(self, request: Render, tenant: bytes = b"") -> int:
        """Have a prompt rendered; returns the key of its answer (`request.key` is ignored).

        tenant: whose turn it is rendered in; empty: that of all queries.
        """
        self._next_key += 1
        request = msgspec.structs.replace(request, key=self._next_key)
        self._waiting[request.key] = request
        lane = self._lane_of(request)
        lane.order.add(request.key, size_of(request) + PROMPT_CHARS, tenant)
        self._send_next(lane)
        return request.key

    def withdraw(self, key: int) -> bool:
        """Give up an answer. Returns whether none will come, because rendering has not begun."""
        request = self._waiting.get(key)
        if request is None:
            return True
        if self._is_ready and key in self._lane_of(request).order.turns:
            return False  # it was sent
        self._forget(key)
        return True

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes this client's socket."""
        return self._fd in arrived

    def receive(self) -> Iterator[Rendered | TokenizerReady]:
        """The answers that have arrived."""
        self._is_drained = False
        while self._has_input():
            data = self._socket.recv()
            try:
                answer = self._decoder.decode(data)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                logger.error(
                    "invalid answer of %d bytes from the tokenizer process: %s", len(data), error
                )
                self._kill()
                continue
            self._has_spoken = True
            if isinstance(answer, Rendered):
                if answer.key not in self._waiting:
                    continue
                lane = self._forget(answer.key)
                # several at once: each time that there is something to send costs a system call
                if lane.order.size <= MAX_CHARS_IN_CHILD // 2:
                    self._send_next(lane)
                yield answer
            else:
                if self._child is None or answer.pid != self._child.pid:
                    continue  # from an earlier child
                self._ready(answer)
                yield answer

    def beat(self, now: float) -> Iterator[Rendered]:
        """Restart a dead child, kill one that hangs; yields refusals of prompts given up."""
        self._count_beats()
        if self._child is None:
            if now >= self._start_at:
                self._restart(now)
        elif self._child.ended() is not None:
            yield from self._died(now, self._child.reap())
        elif self._heard_at is None:
            self._heard_at = self._started_at = now
            self._silent_delay.begin(self._child.pid)
            self._load_delay.begin(self._child.pid)
        else:
            self._is_drained = False
            if self._has_spoken or self._has_input():  # unread messages are signs of life, too
                self._heard_at = now
                self._silent_delay.begin(self._child.pid)
            if why := self._why_hung(now):
                logger.error("the tokenizer process hangs: %s", why)
                self._kill()
        yield from self._check_long()
        self._has_spoken = False
        if self._is_ready:
            self._ready_at = now if self._ready_at is None else self._ready_at
            self._lost_at = None
        elif self._first is not None:
            self._lost_at = now if self._lost_at is None else self._lost_at
            if now >= self._lost_at + self._wait_s:
                yield from self._refuse_all()

    def _count_beats(self) -> None:
        num_new = self._note.num_beats - self._num_beats
        self._num_beats += num_new
        self._has_spoken = self._has_spoken or num_new > 0
        in_progress = self._note.in_progress()
        for lane in self._lanes[1:]:
            if any(key in in_progress for key in lane.order.turns):
                lane.num_beats += num_new

    def condition(self, now: float) -> OwnProcess:
        """The child, for a `Status`."""
        pid = 0 if self._child is None else self._child.pid
        if self._first is None:
            return OwnProcess("starting", pid)
        if not self._is_ready:
            return OwnProcess("restarting", pid)
        is_silent = self._heard_at is not None and now >= self._heard_at + SILENT_S
        return OwnProcess("silent" if is_silent else "ready", pid)

    def close(self) -> None:
        """Terminate the child and close the socket."""
        if self._child is not None:
            self._child.terminate()
            self._child.reap(_STOP_WITHIN_S)
        self._exits.close()
        self._socket.close()
        self._note.close()

    def _ready(self, ready: TokenizerReady) -> None:
        """The child has loaded its tokenizer, or failed to."""
        said = msgspec.structs.replace(ready, pid=0, why_not="")
        if not ready.error and self._first is None:
            self._first = said
        if said != self._first:
            if self._first is not None:
                another = "its tokenizer differs from the one that text is decoded with"
                logger.error("the tokenizer process cannot serve: %s", ready.error or another)
            self._kill()
            return
        self._is_ready = True
        self.num_failed = 0
        for key in sorted(key for lane in self._lanes for key in lane.order.turns):
            self._send(self._waiting[key])
        for lane in self._lanes:
            lane.num_beats = 0
            self._send_next(lane)

    def _why_hung(self, now: float) -> str:
        """The reason why the child counts as hung; empty if it does not."""
        if not self._is_ready and self._first is None:
            return ""
        assert self._heard_at is not None
        most_s = self._hang_timeout_s if self._is_ready else self._wait_s / 2
        if now >= self._heard_at + most_s + self._silent_delay.lacked_s():
            return f"no sign of life for {most_s:g} s"
        if self._is_ready:
            return ""
        if now >= self._started_at + LOAD_S + self._load_delay.lacked_s():
            return f"it is not ready after {LOAD_S:g} s"
        return ""

    def _died(self, now: float, code: int) -> Iterator[Rendered]:
        served_s = 0.0 if self._ready_at is None else now - self._ready_at
        pause_s = self._pauses.after(served_s)
        more = f"; restarting it in {pause_s:g} s" if pause_s else "; restarting it"
        logger.error("the tokenizer process died (code %d)%s", code, more)
        yield from self._count_death()
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
            logger.error("cannot start the tokenizer process, retrying in %g s: %s", pause_s, error)

    def _kill(self) -> None:
        """Kill the child. Its unanswered prompts are sent to the next one; its exit is noticed by
        the next beat.
        """
        self._is_ready = False
        if self._child is not None:
            self._child.kill()

    def _check_long(self) -> Iterator[Rendered]:
        """Refuse a long prompt that has its turn and has taken too long, and end its thread."""
        for lane in self._lanes[1:]:
            key = next(iter(lane.order.turns), None)
            if key is None or not self._is_ready or not lane.num_beats:
                continue
            most_s = self._long_s + size_of(self._waiting[key]) / LONG_CHARS_PER_S
            if lane.num_beats * BEAT_S / 2 < most_s:  # beats are at least that far apart
                continue
            logger.error(
                "the tokenizer process hangs over a long prompt, for more than %g s", most_s
            )
            yield self._refuse(key, f"the prompt was not tokenised within {most_s:.0f} s")
            self._has_culprit = True
            self._kill()

    def _count_death(self) -> Iterator[Rendered]:
        """After a death: charge the prompts being rendered, and refuse one that has died twice."""
        suspects = [key for key in self._note.in_progress() if key in self._waiting]
        if self._has_culprit:
            suspects.clear()
        self._has_culprit = False
        self._note.clear()
        for key in suspects:
            self._strikes[key] = self._strikes.get(key, 0) + 1
        for key in suspects:
            # one of those charged twice, though an honest one may be among them (decision 017)
            if self._strikes[key] > 1:
                yield self._refuse(key, "this prompt crashed the tokenizer process twice")
                return

    def _refuse_all(self) -> Iterator[Rendered]:
        for key in list(self._waiting):
            yield self._refuse(key, _NO_PROCESS, "overloaded")  # the client may retry

    def _refuse(self, key: int, why: str, code: ErrorCode = "engine") -> Rendered:
        self._forget(key)
        return Rendered(key, fault=Fault(code, why))

    def _forget(self, key: int) -> _Lane:
        """A prompt that waits is answered, or will not be. Returns its lane."""
        lane = self._lane_of(self._waiting.pop(key))
        self._strikes.pop(key, None)
        lane.order.discard(key)
        return lane

    def _lane_of(self, request: Render) -> _Lane:
        return self._lanes[lane_of(request)]

    def _send_next(self, lane: _Lane) -> None:
        """Send the prompts that have their turn now."""
        while self._is_ready and (key := lane.order.next()) is not None:
            lane.num_beats = 0
            self._send(self._waiting[key])

    def _send(self, request: Render) -> None:
        self._is_drained = False
        # if the child has died unnoticed, the request is sent again to the next one
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encode(request), zmq.NOBLOCK)

    def _has_input(self) -> bool:
        """True if there is input that the descriptor does not report, or all of it is read."""
        if not self._is_drained:
            self._is_drained = not int(self._socket.getsockopt(EVENTS)) & POLLIN
        return not self._is_drained

    def _start(self) -> ChildProcess:
        child = start_tokenizer_process(self._config, self._note.fd, self._name)
        # without a pidfd its death is noticed by the next `beat`
        with contextlib.suppress(OSError):
            self._exits.register(child.fileno(), select.EPOLLIN)
        return child
