"""Runs many streams of one client at the same time and measures them over a window.

- Deltas are read as `Client.stream_many` reads them, but in the call in which they arrive; token
  ids and logprobs stay in their columns, unless all of them are looked at (`is_materialised`). The
  client is a thread of this process.
- A window begins when every stream that can run has its first token and a settling time has passed,
  and ends while all of them still run: it contains neither admission nor tails.
- Throughput is the least-squares slope of received tokens over time, so a message just inside or
  outside the window's edge does not count as a whole step.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.client.base import new_state, open_io
from slipstream.client.endpoints import server_endpoint
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.outputs import Delta
from slipstream_bench.common.measures import cannot_measure
from slipstream_bench.common.process_census import process_cpu_s
from slipstream_ipc.messages import SamplingParams

Prompt = npt.NDArray[np.uint32]
CLIENT = "client"  # name of this process among those whose CPU time is measured

_START_S = 120.0
_PROMPT_LEN = 16
_FIRST_ID, _LAST_ID = 100, 999  # above the special tokens, in the vocabulary of any model


@dataclass(frozen=True, slots=True)
class Window:
    """A span in which all streams ran; times are time.monotonic seconds."""

    begin_s: float
    end_s: float
    num_tokens: int
    num_deltas: int
    tokens_per_s: float
    cpu_s: dict[str, float]  # by process name

    @property
    def coalescing(self) -> float:
        """Tokens per delta."""
        return self.num_tokens / self.num_deltas if self.num_deltas else 0.0

    def cpu_us_per_token(self, name: str) -> float:
        """CPU microseconds per token of the named process; the window must contain tokens."""
        return 1e6 * self.cpu_s[name] / self.num_tokens


class StreamTally:
    """Token count of one stream and, if requested, the arrival time of each delta."""

    __slots__ = ("num_tokens", "state", "times_s", "tokens_at")

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.num_tokens = 0
        self.times_s: list[float] = []  # arrival of each delta
        self.tokens_at: list[int] = []  # tokens received up to and including that delta


class LiveStreams:
    """A context manager that submits all `requests` at once and ends their streams on exit.

    running: how many run at a time, if the server queues the rest; default: all.
    """

    def __init__(
        self,
        address: str,
        requests: Sequence[tuple[Prompt, SamplingParams]],
        *,
        running: int | None = None,
        keeps_times: bool = False,
        is_materialised: bool = False,
    ) -> None:
        self._keeps_times = keeps_times
        self._is_materialised = is_materialised
        self._running = len(requests) if running is None else running
        self._num = len(requests)
        self._is_running = threading.Event()
        self._is_draining = threading.Event()  # no request is waiting, or one failed
        self._is_over = threading.Event()
        self._num_begun = 0
        self._num_over = 0
        self._num_tokens = 0
        self._num_deltas = 0
        self._error: SlipstreamError | None = None
        self._points: list[tuple[float, int]] = []  # (time, tokens received so far)
        self._io = open_io(server_endpoint(address), _START_S)
        try:
            model = self._io.connect().result()
            self.tallies = [
                StreamTally(new_state(model, prompt, params, kind="delta"))
                for prompt, params in requests
            ]
            self._group = StreamGroup([tally.state for tally in self.tallies])
            self._group.wake = self._read
            for tally in self.tallies:
                self._io.submit(tally.state)
        except BaseException:
            self._io.close()
            raise

    def __enter__(self) -> LiveStreams:
        return self

    def __exit__(self, *_error: object) -> None:
        self._io.close()

    def wait_until_running(self, settle_s: float) -> None:
        """Wait until `running` streams have a token, then `settle_s`. Raises: SlipstreamError."""
        self._wait(self._is_running, _START_S, "not all streams had a token")
        self._is_over.wait(settle_s)
        self._check()

    def window(self, seconds: float, pids: Mapping[str, int]) -> Window:
        """Measure for `seconds`, or until fewer streams run. Raises: SlipstreamError."""
        pids = {**pids, CLIENT: os.getpid()}
        before = {name: process_cpu_s(pid) for name, pid in pids.items()}
        begin_s, tokens, deltas = time.monotonic(), self._num_tokens, self._num_deltas
        self._is_draining.wait(seconds)
        self._check()
        end_s = time.monotonic()
        num_tokens, num_deltas = self._num_tokens - tokens, self._num_deltas - deltas
        cpu_s = {name: process_cpu_s(pid) - before[name] for name, pid in pids.items()}
        points = [point for point in self._points if begin_s <= point[0] <= end_s]
        slope = _slope(points)
        return Window(begin_s, end_s, num_tokens, num_deltas, slope, cpu_s)

    def wait_until_over(self, within_s: float) -> None:
        """Wait until every stream has ended. Raises: SlipstreamError."""
        self._wait(self._is_over, within_s, "not all streams ended")

    # ---- in the client's I/O thread --------------------------------------------------------------

    def _read(self) -> None:
        """Count the deltas that arrived and the streams that ended."""
        unread, tallies = self._group.unread, self.tallies
        now, keeps_times = time.monotonic(), self._keeps_times
        num_tokens = num_deltas = 0
        while unread:
            for index, delta in unread.popleft():
                tally = tallies[index]
                num = delta.num_tokens
                if not num:
                    continue
                num_deltas += 1
                num_tokens += num
                if self._is_materialised:
                    look_at(delta)
                if not tally.num_tokens:
                    self._num_begun += 1
                tally.num_tokens += num
                if keeps_times:
                    tally.times_s.append(now)
                    tally.tokens_at.append(tally.num_tokens)
        if num_tokens:
            self._note(now, num_tokens, num_deltas)
        if self._group.num_over != self._num_over:
            self._note_ends()

    def _note(self, now: float, num_tokens: int, num_deltas: int) -> None:
        self._num_tokens += num_tokens
        self._num_deltas += num_deltas
        points = self._points
        if points and now - points[-1][0] < 2e-4:  # of the same message
            points[-1] = (points[-1][0], self._num_tokens)
        else:
            points.append((now, self._num_tokens))
        if self._num_begun >= self._running:
            self._is_running.set()
        if self._num_begun == self._num and self._num > self._running:
            self._is_draining.set()

    def _note_ends(self) -> None:
        self._num_over = self._group.num_over
        self._error = self._group.error
        if self._num - self._num_over < self._running:
            self._is_draining.set()
        if self._error is not None or self._num_over == self._num:
            for event in (self._is_running, self._is_draining, self._is_over):
                event.set()

    # ---- waiting -------------------------------------------------------------------------------

    def _wait(self, event: threading.Event, within_s: float, why: str) -> None:
        if not event.wait(within_s):
            raise cannot_measure(f"{why} within {within_s:g} s")
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def look_at(delta: Delta) -> int:
    """Make a Python object of the text, the ids and every candidate; returns the text's length."""
    _ids = delta.token_ids
    positions = delta.logprobs
    if positions is not None:
        for candidates in positions:
            for candidate in candidates.values():
                _value, _rank = candidate.logprob, candidate.rank
    return len(delta.text)


def random_prompts(num: int, length: int = _PROMPT_LEN) -> list[Prompt]:
    """Prompts of random token ids, uint32[length] each; seeded by the arguments."""
    random = np.random.default_rng((num, length))
    return list(random.integers(_FIRST_ID, _LAST_ID + 1, (num, length)).astype(np.uint32))


def _slope(points: Sequence[tuple[float, int]]) -> float:
    """Tokens per second; 0 with fewer than two points."""
    if len(points) < 2:
        return 0.0
    times, tokens = np.array(points, np.float64).T
    return float(np.polyfit(times - times[0], tokens - tokens[0], 1)[0])
