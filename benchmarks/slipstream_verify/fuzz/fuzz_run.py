"""One fuzz run: a stack, an honest client and attackers, their turns and the measurements.

- Messages follow from the seed, except for numbers that answer received messages (see `attacker`).
- The honest client's expected answers come from a stack without attackers.
- The last messages of each hop are kept; if a loop dies they are in the error.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from random import Random

from msgspec import Struct

from slipstream_bench.common import process_census
from slipstream_bench.common.provenance import commit
from slipstream_ipc.messages import CORE_HOP_VERSION, PROTOCOL_VERSION
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_verify.fuzz.attacker import Attacker
from slipstream_verify.fuzz.fuzz_stack import ErrorLog, FuzzStack, SuccessorWorker
from slipstream_verify.fuzz.honest_client import HonestAnswer, HonestClient
from slipstream_verify.fuzz.hostile_client import HostileClient
from slipstream_verify.fuzz.hostile_worker import HostileWorker

_MOST_SHOWN = 10
_NUM_CLIENTS = 12
_NUM_WORKERS = 3
_MESSAGES_A_TURN = 12  # messages per attacker between two turns of the stack
_WARM_UP = 0.1  # share of the messages before memory is measured first
_STALL_S = 120.0  # longest time without the end of an honest stream
_SETTLE_S = 30.0
_NUM_LAST = 400
_REFUSAL, _ACCEPTED, _REJECTED, _ADMITTED, _REFUSED = 3, 20, 21, 40, 42  # tags


class FuzzResult(Struct, frozen=True, kw_only=True):
    """The result of a run.

    wanted: total number of messages, if this is the state of a run in parts. admitted, refused:
    streams that attackers were given, and their messages that were refused, as far as they read the
    answers. identical, total: the honest client's streams. errors: internal errors that worker and
    core survived, with tracebacks. held: what worker and core still hold at the end. commits: of
    the code, one per part where they differ.
    """

    seed: int
    messages: int = 0
    by_kind: dict[str, int] = {}
    seconds: float = 0.0
    admitted: int = 0
    refused: int = 0
    identical: int = 0
    total: int = 0
    differences: tuple[str, ...] = ()
    num_errors: int = 0
    errors: tuple[str, ...] = ()
    longest_turn_ms: float = 0.0
    rss_start: int = 0
    rss_end: int = 0
    held: dict[str, int] = {}
    wanted: int = 0
    num_parts: int = 1
    commits: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the run had no effect on the stack and the honest client."""
        return (
            0 < self.total == self.identical and not self.num_errors and not any(self.held.values())
        )

    def and_then(self, part: FuzzResult) -> FuzzResult:
        """This result combined with that of the following part."""
        return FuzzResult(
            seed=self.seed,
            messages=self.messages + part.messages,
            by_kind=_sum(self.by_kind, part.by_kind),
            seconds=self.seconds + part.seconds,
            admitted=self.admitted + part.admitted,
            refused=self.refused + part.refused,
            identical=self.identical + part.identical,
            total=self.total + part.total,
            differences=(*self.differences, *part.differences)[:_MOST_SHOWN],
            num_errors=self.num_errors + part.num_errors,
            errors=(*self.errors, *part.errors)[:_MOST_SHOWN],
            longest_turn_ms=max(self.longest_turn_ms, part.longest_turn_ms),
            rss_start=self.rss_start or part.rss_start,
            rss_end=part.rss_end,
            held=_sum(self.held, part.held),
            wanted=self.wanted,
            num_parts=self.num_parts + 1,
            commits=tuple(dict.fromkeys((*self.commits, *part.commits))),
        )


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    names = dict.fromkeys([*one, *other])
    total = Counter(one)
    total.update(other)
    return {name: total[name] for name in names}


class FuzzFailed(Exception):  # noqa: N818  (what happened)
    """A loop died or stalled."""


def fuzz(
    num_messages: int, seed: int, on_progress: Callable[[int], object] = lambda _num: None
) -> FuzzResult:
    """Run it and return the result. Raises: FuzzFailed."""
    with tempfile.TemporaryDirectory(prefix="slipstream-fuzz-") as folder, ErrorLog() as log:
        alone = Path(folder) / "alone"
        alone.mkdir(mode=0o700)
        expected = answers_alone(FuzzStack(alone), seed)
        target = Path(folder) / "target"
        target.mkdir(mode=0o700)
        run = _FuzzRun(FuzzStack(target), expected, seed)
        try:
            return run.run(num_messages, log, on_progress)
        finally:
            run.close()


def answers_alone(stack: FuzzStack, seed: int) -> list[HonestAnswer]:
    """The answers that the honest client gets when alone; closes the stack.

    Raises: FuzzFailed.
    """
    client = HonestClient(stack.context, stack.client_address, seed)
    try:
        deadline = time.monotonic() + _STALL_S
        while (expected := client.expected_answers()) is None:
            stack.turn()
            if time.monotonic() > deadline:
                raise FuzzFailed("a stack that serves the honest client alone does not answer")
        return expected
    finally:
        client.close()
        stack.close()


class _FuzzRun:
    """The state of a run."""

    def __init__(self, stack: FuzzStack, expected: list[HonestAnswer], seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self._honest = HonestClient(stack.context, stack.client_address, seed)
        self._honest.expect(expected)
        self._last: deque[list[bytes]] = deque(maxlen=_NUM_LAST)
        self._attackers = self._make_attackers()

    def run(
        self, num_messages: int, log: ErrorLog, on_progress: Callable[[int], object]
    ) -> FuzzResult:
        begin = time.monotonic()
        num_sent = 0
        rss_start = 0
        try:
            while num_sent < num_messages:
                for attacker in self._attackers:
                    num = min(_MESSAGES_A_TURN, num_messages - num_sent)
                    num_sent += attacker.turn(num, self._last.append)
                self._turn()
                on_progress(num_sent)
                if not rss_start and num_sent >= _WARM_UP * num_messages:
                    rss_start = self._resident()
            seconds = time.monotonic() - begin
            held = self._drain()
        except FuzzFailed:
            raise
        except Exception as error:
            raise FuzzFailed(self._describe_crash(error)) from error
        honest = self._honest
        sent = sum((attacker.sent for attacker in self._attackers), Counter())
        heard = sum((attacker.heard for attacker in self._attackers), Counter())
        return FuzzResult(
            seed=self._seed,
            messages=num_sent,
            by_kind={str(kind): num for kind, num in sent.items()},
            seconds=seconds,
            admitted=heard[_ACCEPTED] + heard[_ADMITTED],
            refused=heard[_REFUSAL] + heard[_REJECTED] + heard[_REFUSED],
            identical=honest.num_identical,
            total=honest.num_identical + len(honest.differences),
            differences=tuple(honest.differences[:10]),
            num_errors=log.num_errors,
            errors=tuple(log.errors),
            longest_turn_ms=self._stack.longest_turn_s * 1e3,
            rss_start=rss_start,
            rss_end=self._resident(),
            held=held,
            wanted=num_messages,
            commits=(commit() or "unknown",),
        )

    def close(self) -> None:
        for attacker in self._attackers:
            attacker.close()
        self._honest.close()
        self._stack.close()

    def _make_attackers(self) -> list[Attacker]:
        random = Random(self._seed)  # noqa: S311  (attacks are to be repeated)
        stack = self._stack
        vocab_size = stack.core.runner.info.vocab_size
        shared: list[bytes] = []
        attackers = []
        for index in range(_NUM_CLIENTS + _NUM_WORKERS):
            own = Random(random.getrandbits(64))  # noqa: S311
            is_client = index < _NUM_CLIENTS
            attackers.append(
                Attacker(
                    stack.context,
                    stack.client_address if is_client else stack.core_address,
                    own,
                    HostileClient(own, shared, vocab_size)
                    if is_client
                    else HostileWorker(own, vocab_size),
                    max_message_bytes=MAX_MESSAGE_BYTES,
                    version=PROTOCOL_VERSION if is_client else CORE_HOP_VERSION,
                )
            )
        return attackers

    def _turn(self) -> None:
        self._stack.turn()
        self._honest.turn()
        if time.monotonic() - self._honest.last_end_at > _STALL_S:
            why = f"no honest stream has ended for {_STALL_S:g} s; held: {self._stack.held}"
            raise FuzzFailed(why)

    def _drain(self) -> dict[str, int]:
        """Close the attackers; returns what they leave after the grace time."""
        for attacker in self._attackers:
            attacker.close()
        self._honest.stop()
        deadline = time.monotonic() + _SETTLE_S
        successors: list[SuccessorWorker] = []
        while any((held := self._held()).values()) and time.monotonic() < deadline:
            if all(successor.is_done for successor in successors):
                successors = [
                    SuccessorWorker(self._stack, name) for name in self._stack.deserted_workers()
                ]
            for successor in successors:
                successor.turn()
            self._stack.turn()
            self._honest.turn()
            self._stack.wait()
        for successor in successors:
            successor.close()
        return held

    def _held(self) -> dict[str, int]:
        held = self._stack.held
        held["worker_clients"] -= 1  # the honest client
        return held

    def _resident(self) -> int:
        gc.collect()
        held = process_census.holding(os.getpid())
        assert held is not None
        return held.rss_bytes

    def _describe_crash(self, error: Exception) -> str:
        shown = "\n".join(" ".join(part.hex() for part in parts) for parts in self._last)
        with tempfile.NamedTemporaryFile(
            "w", prefix="slipstream-fuzz-", suffix=".txt", delete=False
        ) as file:
            file.write(f"{''.join(traceback.format_exception(error))}\n{shown}\n")
        return (
            f"a loop died of {type(error).__name__}: {error} (seed {self._seed}; its traceback and "
            f"the last {len(self._last)} messages are in {file.name})"
        )
