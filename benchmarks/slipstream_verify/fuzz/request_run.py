"""One run of hostile requests: a stack, an honest client and hostile readers.

- A delay is counted in steps of the core: how many were launched in a row without an honest stream
  that could have been in them. It is independent of the machine's load.
- Streams that want logprobs may legitimately wait for room until others are forgotten, which takes
  time rather than steps: that is reported separately, and has no bound here.
- A request follows from seed and number alone, so a run may take several sittings, each in a new
  stack and on any commit. A sitting is a range of numbers.
- From time to time everything is read to its end: then nothing may be held, and memory is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from slipstream.client.base import new_state
from slipstream.client.connection.link_session import ClientSession
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import BadRequestError
from slipstream_bench.common import process_census
from slipstream_bench.common.provenance import commit
from slipstream_core.scheduler.scheduler import Scheduler
from slipstream_verify.fuzz.fuzz_run import FuzzFailed, answers_alone
from slipstream_verify.fuzz.fuzz_stack import ErrorLog, FuzzStack
from slipstream_verify.fuzz.honest_client import HonestAnswer, HonestClient
from slipstream_verify.fuzz.hostile_requests import (
    MOST_ANSWERS,
    Bounds,
    HostileRequest,
    hostile_request,
)

AT_ONCE = 48  # hostile requests running at a time
_MAX_MODEL_LEN = 512
_BATCHED = 2048
_POSITIONS = 256  # prompt positions per step that get logprobs
_LOGPROBS_GIB = 0.125  # small enough to run out at times
# a stream may wait for the longest prompts of a quarter of the requests, with as many answers as
# they may have, and logprobs at every position; and as long again if it is preempted and queued
# behind those that arrived meanwhile
MOST_STEPS = 2 * AT_ONCE // 4 * MOST_ANSWERS * _MAX_MODEL_LEN // _POSITIONS
MOST_GROWTH_BYTES = 128 * 2**20
_CLIENT_TIMEOUT_S = 10.0  # no client falls silent, but all of them may wait for a busy machine
_GRACE_S = 0.2  # then an ended stream makes room for others' logprobs
_STALL_S = 120.0
_SETTLE_S = 60.0
_TIMEOUT_S = 3600.0
_MOST_SHOWN = 1000  # characters of a difference
_PART = 1000  # requests between two looks at what is held


class Sitting(Struct, frozen=True, kw_only=True):
    """The outcome of the requests `begin` to `end - 1`.

    commit: the tested code. longest_wait: most steps that an honest stream was passed over, and
    what ran then. longest_wait_for_room: the same for streams waiting for room for their logprobs.
    outcomes: of hostile streams, by finish reason or error. slowest: the longest turn of worker and
    core, in ms of CPU time, and the kinds of the requests that ran. held: the most that worker and
    core still held when all streams had ended; None: not looked at. own_bytes: anonymous memory of
    this process, without freed memory that its allocator keeps, at the first look and at the last.
    """

    commit: str | None
    begin: int
    end: int
    seconds: float = 0.0
    by_kind: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    steps: int = 0
    identical: int = 0
    total: int = 0
    differences: tuple[str, ...] = ()
    longest_wait: int = 0
    longest_wait_for_room: int = 0
    waited_for: tuple[str, ...] = ()
    longest_turn_ms: float = 0.0
    slowest: tuple[str, ...] = ()
    num_errors: int = 0
    errors: tuple[str, ...] = ()
    own_bytes: tuple[int, int] = (0, 0)
    held: dict[str, int] | None = None

    @property
    def is_good(self) -> bool:
        """Whether the requests had no effect on the stack and the honest client."""
        return (
            0 < self.total == self.identical
            and self.longest_wait <= MOST_STEPS
            and not self.num_errors
            and not any((self.held or {}).values())
            and self.own_bytes[1] <= self.own_bytes[0] + MOST_GROWTH_BYTES
        )


class RequestFuzzResult(Struct, frozen=True, kw_only=True):
    """The sittings so far, one behind the other."""

    seed: int
    sittings: tuple[Sitting, ...] = ()

    @property
    def done(self) -> int:
        """Number of requests."""
        return self.sittings[-1].end if self.sittings else 0

    @property
    def is_good(self) -> bool:
        """Whether every sitting is."""
        return all(sitting.is_good for sitting in self.sittings)


def fuzz_requests(seed: int, begin: int, end: int) -> Iterator[Sitting]:
    """Send the requests `begin` to `end - 1`; yields the sitting so far, time and again.

    Raises: FuzzFailed.
    """
    if begin == end:
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-fuzz-") as folder, ErrorLog() as log:
        alone = Path(folder) / "alone"
        alone.mkdir(mode=0o700)
        expected = answers_alone(_stack(alone), seed)
        target = Path(folder) / "target"
        target.mkdir(mode=0o700)
        run = _RequestFuzzRun(_stack(target), expected, seed, begin, log)
        try:
            for each in range(begin, end, _PART):
                yield run.run(range(each, min(each + _PART, end)))
        finally:
            run.close()


def _stack(folder: Path) -> FuzzStack:
    return FuzzStack(
        folder,
        client_timeout_s=_CLIENT_TIMEOUT_S,
        grace_s=_GRACE_S,
        max_num_batched_tokens=_BATCHED,
        max_model_len=_MAX_MODEL_LEN,
        max_logprobs=-1,
        logprobs_gib=_LOGPROBS_GIB,
    )


class _Waits:
    """Counts, at each launch of the core, the steps in which honest streams were passed over."""

    def __init__(self, stack: FuzzStack, honest: HonestClient) -> None:
        self._handler = stack.core.handler
        assert isinstance(stack.core.scheduler, Scheduler)
        self._scheduler = stack.core.scheduler
        self._honest = honest
        self._room = stack.core.logprob_budget
        self._waited: Counter[bytes] = Counter()
        self._for_room: Counter[bytes] = Counter()
        self.num_steps = 0
        self.longest = self.longest_for_room = 0
        self._inner = self._handler.launching
        self._handler.launching = self._launching  # type: ignore[method-assign]

    def _launching(self, step: int, rows: np.ndarray[Any, Any]) -> None:
        self.num_steps += 1
        waited: Counter[bytes] = Counter()
        for_room: Counter[bytes] = Counter()
        for stream_id in self._honest.stream_ids:
            stream = self._handler._streams.get(stream_id)
            held = self._handler._pending.get(stream_id)
            if held is None and (stream is None or stream.is_over):
                continue
            if stream is None or stream.row in self._room.waiting:
                self.longest_for_room = max(self.longest_for_room, 1 + self._for_room[stream_id])
                for_room[stream_id] = 1 + self._for_room[stream_id]
            elif stream.row not in rows and self._may_run(stream.row):
                waited[stream_id] = 1 + self._waited[stream_id]
                self.longest = max(self.longest, waited[stream_id])
        self._waited, self._for_room = waited, for_room
        self._inner(step, rows)

    def _may_run(self, row: int) -> bool:
        requests = self._scheduler._requests
        if self._scheduler._batch is not None:
            return True  # all rows of the batch may run
        if not requests.is_alive(row):
            return False  # it has all of its tokens
        known, acked = int(requests.known[row]), int(self._handler.acked[row])
        ahead = known - max(acked, int(requests.prompt_len[row]))
        return known < int(requests.limit[row]) and ahead < int(requests.run_ahead[row])


class _HostileStream:
    """A stream, and how many of its tokens were read."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.num_read = 0

    def read(self) -> None:
        """Read what has arrived."""
        while self.state.deltas:
            self.num_read += self.state.deltas.popleft().num_tokens


class _HostileReaders:
    """The hostile client: keeps requests running, reads them or abandons them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._session = ClientSession(context, address, _TIMEOUT_S, zmq.Poller(), time.monotonic())
        self._running: dict[int, tuple[HostileRequest, list[_HostileStream]]] = {}
        self.outcomes: Counter[str] = Counter()

    @property
    def running(self) -> list[HostileRequest]:
        return [request for request, _ in self._running.values()]

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, request: HostileRequest) -> None:
        streams: list[_HostileStream] = []
        now = time.monotonic()
        for _ in range(request.answers):
            try:
                prompt = request.prompt
                if not isinstance(prompt, str):
                    prompt = np.array(prompt, np.uint32)  # type: ignore[assignment]
                state = new_state(self._session.model, prompt, request.params, kind="delta")
            except BadRequestError as error:
                self.outcomes[f"refused at the client: {error.fault.field}"] += 1
                continue
            self._session.submit(state, now)
            streams.append(_HostileStream(state))
        if streams:
            self._running[request.index] = request, streams

    def turn(self) -> None:
        self._session.turn(time.monotonic())
        for index, (request, streams) in list(self._running.items()):
            for stream in streams:
                stream.read()
                if request.reads is not None and stream.num_read >= request.reads:
                    self._session.abort(stream.state)
            if all(stream.state.is_over for stream in streams):
                del self._running[index]
                for stream in streams:
                    self.outcomes[_outcome(stream.state)] += 1

    def close(self) -> None:
        self._session.close()


def _outcome(state: StreamState) -> str:
    if state.error is None:
        return "ended" if state.end is None else str(state.end.reason)
    name = type(state.error).__name__
    if isinstance(state.error, BadRequestError):
        return f"refused: {state.error.fault.field}"
    return f"{name}: {state.error}"[:200]


class _RequestFuzzRun:
    """The state of a sitting."""

    def __init__(
        self, stack: FuzzStack, expected: list[HonestAnswer], seed: int, begin: int, log: ErrorLog
    ) -> None:
        self._stack = stack
        self._seed = seed
        self._log = log
        self._honest = HonestClient(stack.context, stack.client_address, seed)
        self._honest.expect(expected)
        self._waits = _Waits(stack, self._honest)
        self._hostile = _HostileReaders(stack.context, stack.client_address)
        self._sitting = Sitting(commit=commit(), begin=begin, end=begin)
        self._by_kind: Counter[str] = Counter()
        self._started_at = time.monotonic()

    def run(self, indices: range) -> Sitting:
        """Send these requests, read all to their ends; returns the sitting so far."""
        hostile = self._hostile
        info = self._stack.core.runner.info
        bounds = Bounds(info.vocab_size, info.max_model_len)
        self._honest.start()
        left = iter(indices)
        request = next(left, None)
        while request is not None or hostile.num_running:
            while request is not None and hostile.num_running < AT_ONCE:
                sent = hostile_request(self._seed, request, bounds)
                self._by_kind.update(sent.kinds)
                hostile.start(sent)
                request = next(left, None)
            self._turn()
        self._sitting = self._result(indices.stop, self._drain())
        return self._sitting

    def close(self) -> None:
        self._hostile.close()
        self._honest.close()
        self._stack.close()

    def _turn(self) -> None:
        stack, sitting = self._stack, self._sitting
        stack.longest_turn_s, self._waits.longest = 0.0, 0
        stack.turn()
        took_ms = stack.longest_turn_s * 1e3
        if took_ms > sitting.longest_turn_ms:
            sitting = msgspec.structs.replace(
                sitting, longest_turn_ms=took_ms, slowest=_descriptions(self._hostile.running)
            )
        if self._waits.longest > sitting.longest_wait:
            sitting = msgspec.structs.replace(
                sitting,
                longest_wait=self._waits.longest,
                waited_for=_descriptions(self._hostile.running),
            )
        self._sitting = sitting
        self._hostile.turn()
        self._honest.turn()
        if time.monotonic() - self._honest.last_end_at > _STALL_S:
            ran = ", ".join(_descriptions(self._hostile.running))
            raise FuzzFailed(
                f"no honest stream has ended for {_STALL_S:g} s beside {ran} (seed "
                f"{self._seed}); held: {stack.held}"
            )

    def _drain(self) -> dict[str, int]:
        """What is left once all streams are over and the grace time has passed."""
        self._honest.stop()
        deadline = time.monotonic() + _SETTLE_S
        while any((held := self._held()).values()) and time.monotonic() < deadline:
            self._stack.turn()
            self._hostile.turn()
            self._honest.turn()
            self._stack.wait()
        return held

    def _held(self) -> dict[str, int]:
        core, held = self._stack.core, self._stack.held
        held["worker_clients"] -= 2  # the honest and the hostile client
        held["on_hold"] = core.handler.num_pending
        held["logprob_pages"] = core.logprobs.num_pages_used
        held["logprob_bytes_promised"] = core.logprob_budget.num_reserved
        return held

    def _result(self, end: int, held: dict[str, int]) -> Sitting:
        """The sitting so far."""
        honest, log, before = self._honest, self._log, self._sitting
        own = own_bytes()
        return msgspec.structs.replace(
            before,
            end=end,
            seconds=time.monotonic() - self._started_at,
            by_kind=dict(self._by_kind),
            outcomes=dict(self._hostile.outcomes),
            longest_wait_for_room=self._waits.longest_for_room,
            steps=self._waits.num_steps,
            identical=honest.num_identical,
            total=honest.num_identical + len(honest.differences),
            differences=tuple(each[:_MOST_SHOWN] for each in honest.differences[:10]),
            num_errors=log.num_errors,
            errors=tuple(log.errors[:10]),
            own_bytes=(before.own_bytes[0] or own, own),
            held={name: max(num, (before.held or {}).get(name, 0)) for name, num in held.items()},
        )


def _descriptions(requests: list[HostileRequest]) -> tuple[str, ...]:
    return tuple(f"{each.index} ({', '.join(each.kinds)})" for each in requests)


def own_bytes() -> int:
    """Anonymous memory of this process without freed memory that its allocator keeps, which is most
    of a run's apparent growth.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # an allocator other than glibc's
        ctypes.CDLL(None).malloc_trim(0)
    held = process_census.holding(os.getpid())
    assert held is not None
    return held.own_bytes
