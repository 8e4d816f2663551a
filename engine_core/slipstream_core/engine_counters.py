"""What a core counts of its own work: steps, tokens, how long the device ran and had to wait.

Owns: the numbers that nobody else keeps, and how all of them become `CoreNumbers`. Does not know:
clocks (whoever calls has looked already), who is told.

Rules:
- A step costs a few additions, however many requests are in it.
- The device is idle from a step's end, where there is no other, to the next launch, as long as any
  request is here: what it waits for then is the host, the worker, or a free place in the cache.
  Where a request comes while there was none, its way to the launch is not counted.
- A request's queue time is told once, however often it is preempted.
"""

from __future__ import annotations

from slipstream_core.scheduler.scheduler import Scheduler
from slipstream_ipc.telemetry.histogram import HistogramBuilder
from slipstream_ipc.telemetry.statistics import CoreCounters, CoreGauges, CoreNumbers
from slipstream_ipc.telemetry.timeline import RecentSpans


class EngineCounters:
    """One core's."""

    def __init__(self) -> None:
        self.recent = RecentSpans(has_nums=True)  # steps, added by who knows when they were
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_sampled_tokens = 0
        self._num_overrun_tokens = 0
        self._busy_s = 0.0
        self._idle_s = 0.0
        self._idle_since: float | None = None
        self._step_s = HistogramBuilder()
        self._queue_s = HistogramBuilder()
        self._waits_since: dict[int, float] = {}  # by row

    def waits(self, row: int, now: float) -> None:
        """A request was admitted."""
        self._waits_since[row] = now

    def runs(self, row: int, now: float) -> None:
        """It is in a step, for the first time or again."""
        since = self._waits_since.pop(row, None)
        if since is not None:
            self._queue_s.add(max(0.0, now - since))

    def wakes(self, now: float) -> None:
        """A step is launched, and none is under way."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def step(self, took_s: float, num_computed: int, num_sampled: int, num_taken: int) -> None:
        """A step has ended: tokens that went in, that came out, that were still wanted."""
        self._num_steps += 1
        self._busy_s += took_s
        self._step_s.add(took_s)
        self._num_computed_tokens += num_computed
        self._num_sampled_tokens += num_taken
        self._num_overrun_tokens += num_sampled - num_taken

    def rests(self, now: float) -> None:
        """No step is under way, though there are requests."""
        self._idle_since = now

    def numbers(self, scheduler: Scheduler, num_pending: int, now: float) -> CoreNumbers:
        """All of it, as of now."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = now if scheduler.has_work else None
        num_blocks = scheduler.num_blocks - 1
        return CoreNumbers(
            CoreGauges(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting + num_pending,
                num_blocks=num_blocks,
                num_used_blocks=num_blocks - scheduler.num_free_blocks,
            ),
            CoreCounters(
                num_steps=self._num_steps,
                num_computed_tokens=self._num_computed_tokens,
                num_sampled_tokens=self._num_sampled_tokens,
                num_overrun_tokens=self._num_overrun_tokens,
                num_preemptions=scheduler.num_preemptions,
                num_prefix_queries=scheduler.prefix_cache_queries,
                num_prefix_hits=scheduler.prefix_cache_hits,
                device_busy_s=self._busy_s,
                device_idle_s=self._idle_s,
                step_s=self._step_s.histogram(),
                queue_s=self._queue_s.histogram(),
            ),
            self.recent.spans(now),
        )
