"""A simulated replica: a queue of prompts, running answers and a cache, in slices of time.

Its figures are roughly those of a model of 8 billion parameters on one large card: 20,000 tokens of
prompts a second, steps of 12 ms and 40 µs more for each running answer, 400,000 tokens of cache.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.fleet.member_load import MemberLoad, SentRequest
from slipstream_bench.fleet.chat_workload import CHUNK, Conversation, SimulatedKey

SLICE_S = 0.05
CACHE_CHUNKS = 3125
_PREFILL_PER_S = 20_000.0
_STEP_S = 0.012
_STEP_S_PER_ANSWER = 0.00004
_MAX_RUNNING = 256


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A turn of a conversation on its way."""

    conversation: Conversation
    key: SimulatedKey
    answer_len: int
    cell: int
    front: int
    submitted_at: float
    sent: SentRequest
    produced: int = 0  # tokens that earlier replicas have computed of the answer
    started_at: float | None = None  # when its first token came
    cached: int = 0
    to_compute: float | None = None  # tokens; None while it waits untouched
    expected: int = 0  # the same, as the queue counts it
    starts_at: float = 0.0  # the replica's progress when the answer began there


class SimulatedReplica:
    """One replica. speed: of a full one."""

    def __init__(self, name: bytes, speed: float = 1.0) -> None:
        self.name = name
        self.is_up = True
        self.num_requests = 0
        self.queued_tokens = 0.0
        self._speed = speed
        self._cache: OrderedDict[int, float] = OrderedDict()
        self._evicted_at: float | None = None  # when it was last used
        self._queue: deque[SimulatedRequest] = deque()
        self._running: list[tuple[float, int, SimulatedRequest]] = []  # a heap, by progress at end
        self._progress = 0.0  # tokens that an answer would have that runs since the start
        self._num_started = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests, waiting ones included."""
        return len(self._queue) + len(self._running)

    def tell(self, load: MemberLoad, now: float) -> None:
        """Tell a front how busy the replica is."""
        kept = None if self._evicted_at is None else now - self._evicted_at
        tokens = int(self.queued_tokens)
        load.note_load(now, running=self.num_running, queued_tokens=tokens, kept_since_s=kept)

    def cached_tokens(self, chunks: list[int]) -> int:
        """Of a prompt's beginning, the tokens that are in the cache."""
        for depth, chunk in enumerate(chunks):
            if chunk not in self._cache:
                return CHUNK * depth
        return CHUNK * len(chunks)

    def submit(self, request: SimulatedRequest) -> None:
        """Put a request into the queue."""
        length = request.key.prompt_len + request.produced
        request.to_compute = None
        request.expected = length - min(self.cached_tokens(request.key.chunks), length - 1)
        self.queued_tokens += request.expected
        self.num_requests += 1
        self._queue.append(request)

    def run(self, now: float, ended: Callable[[SimulatedRequest, float], None]) -> None:
        """Compute for one slice."""
        num = len(self._running)
        budget = _PREFILL_PER_S * SLICE_S * self._speed * (1 - min(0.6, 0.0015 * num))
        while self._queue and budget > 0 and len(self._running) < _MAX_RUNNING:
            budget = self._prefill(self._queue[0], budget, now)
        if not self._running:
            return
        self._progress += SLICE_S * self._speed / (_STEP_S + _STEP_S_PER_ANSWER * num)
        while self._running and self._running[0][0] <= self._progress:
            request = heapq.heappop(self._running)[2]
            length = request.key.prompt_len + request.answer_len
            self._use(request.conversation.chunks_of(length), now)
            ended(request, now)

    def lose_all(self) -> list[SimulatedRequest]:
        """End: the cache is lost, and the requests are returned with what has been computed."""
        for _, _, request in self._running:
            request.produced += int(self._progress - request.starts_at)
        lost = [*self._queue, *(entry[2] for entry in self._running)]
        self._queue.clear()
        self._running.clear()
        self._cache.clear()
        self._evicted_at = None
        self.queued_tokens = 0.0
        return lost

    def _prefill(self, request: SimulatedRequest, budget: float, now: float) -> float:
        """Compute tokens of a prompt; what is left of the budget."""
        if request.to_compute is None:
            length = request.key.prompt_len + request.produced
            cached = min(self.cached_tokens(request.key.chunks), length - 1)
            if request.started_at is None:
                request.cached = cached
            request.to_compute = float(length - cached)
            self.queued_tokens += request.to_compute - request.expected
            self._use(request.key.chunks, now)
        computed = min(budget, request.to_compute)
        request.to_compute -= computed
        self.queued_tokens -= computed
        if request.to_compute <= 0:
            self._queue.popleft()
            if request.started_at is None:
                request.started_at = now + SLICE_S
            request.starts_at = self._progress
            self._num_started += 1
            end = self._progress + request.answer_len - request.produced
            heapq.heappush(self._running, (end, self._num_started, request))
        return budget - computed

    def _use(self, chunks: list[int], now: float) -> None:
        cache = self._cache
        for chunk in reversed(chunks):
            cache[chunk] = now
            cache.move_to_end(chunk)
        while len(cache) > CACHE_CHUNKS:
            self._evicted_at = cache.popitem(last=False)[1]
