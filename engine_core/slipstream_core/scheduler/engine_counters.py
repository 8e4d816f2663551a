"""Counts a core's steps, tokens, and the device's busy and idle time, and builds `CoreNumbers`.

- A step costs a few additions, however many requests are in it.
- The device is idle from the end of a step with none behind it to the next launch, while any
  request is present: it waits for the host, a worker, or a free block. The time from the arrival of
  a request at an empty core to the launch is not counted.
- A request's queue time is recorded once, however often it is preempted.
- Times are passed in by the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from slipstream_core.scheduler.scheduling import Scheduling
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.telemetry.histogram import BriefHistogramBuilder, HistogramBuilder
from slipstream_ipc.telemetry.statistics import (
    CoreCounters,
    CoreGauges,
    CoreNumbers,
)
from slipstream_ipc.telemetry.timeline import RecentSpans

_MOST_NAME_BYTES = 512  # of adapters; a process's numbers fit into a line


class EngineCounters:
    """The counters of one core. engine: name and version of another engine than ours. name_at:
    the name of the adapter at a place, of which it has `max_loras`.
    """

    def __init__(
        self, engine: str = "", name_at: Callable[[int], str] = str, max_loras: int = 0
    ) -> None:
        self._engine = engine
        self._name_at = name_at
        self._max_loras = max_loras
        self.recent = RecentSpans(has_nums=True)  # steps, added by the engine
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_sampled_tokens = 0
        self._num_overrun_tokens = 0
        self._busy_s = 0.0
        self._draft_s = 0.0  # of `_busy_s`, the draft model's
        self._idle_s = 0.0
        self._idle_since: float | None = None
        self._num_drafts = 0  # rows of steps
        self._num_draft_tokens = 0
        self._accepted: Int64s = np.zeros(0, np.int64)  # by place behind the known token
        self._step_s = HistogramBuilder()
        self._queue_s = HistogramBuilder()
        self._prefill_s = BriefHistogramBuilder()
        self._inference_s = BriefHistogramBuilder()
        self._queued_at: dict[int, float] = {}  # by row, of requests not yet in a step
        self._started_at: dict[int, float] = {}  # by row, of requests that have been in one
        self._tokenless: set[int] = set()  # rows of these that have no token yet

    def request_queued(self, row: int, now: float) -> None:
        """A request was admitted and waits."""
        self._queued_at[row] = now

    def request_started(self, row: int, now: float) -> None:
        """A request is in a step, for the first time or again."""
        since = self._queued_at.pop(row, None)
        if since is not None:
            self._queue_s.add(max(0.0, now - since))
            self._started_at[row] = now
            self._tokenless.add(row)

    @property
    def awaits_first_tokens(self) -> bool:
        """True if a request that has been in a step has no token yet."""
        return bool(self._tokenless)

    def tokens_came(self, rows: Iterable[int], now: float) -> None:
        """Record that these rows have tokens, some of them perhaps their first."""
        for row in self._tokenless.intersection(rows):
            self._tokenless.remove(row)
            self._prefill_s.add(max(0.0, now - self._started_at[row]))

    def request_ended(self, row: int, now: float) -> None:
        """A request is computed no more. Idempotent."""
        self._queued_at.pop(row, None)
        self._tokenless.discard(row)
        since = self._started_at.pop(row, None)
        if since is not None:
            self._inference_s.add(max(0.0, now - since))

    def device_busy(self, now: float) -> None:
        """A step is launched while none is in flight."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None

    def step(self, took_s: float, num_computed: int, num_sampled: int, num_taken: int) -> None:
        """Count an ended step: `num_computed` tokens in, `num_sampled` out, of which `num_taken`
        are used. The others overran the end of their requests.
        """
        self._num_steps += 1
        self._busy_s += took_s
        self._step_s.add(took_s)
        self._num_computed_tokens += num_computed
        self._num_sampled_tokens += num_taken
        self._num_overrun_tokens += num_sampled - num_taken

    def proposal(self, took_s: float) -> None:
        """Count an ended step of the draft model."""
        self._busy_s += took_s
        self._draft_s += took_s

    def drafts(self, lens: Int64s, accepted: Int64s) -> None:
        """Count the drafts of a step, and how many of each row's are right; both [S]."""
        self._num_drafts += int(np.count_nonzero(lens))
        self._num_draft_tokens += int(lens.sum())
        reached = np.bincount(accepted, minlength=len(self._accepted) + 1)
        by_place = reached[::-1].cumsum()[::-1][1:]  # rows with at least so many
        by_place[: len(self._accepted)] += self._accepted
        self._accepted = by_place

    def _of_adapters(self, scheduler: Scheduling[Any]) -> dict[str, Any]:
        """The gauges of adapters; none without any."""
        if not self._max_loras:
            return {}
        names = []
        for each in scheduler.adapters_in_use():
            by_name: Counter[str] = Counter()  # versions of one name together
            for place, num in each.items():
                by_name[self._name_at(place)] += num
            names.append(by_name)
        return {
            "max_loras": self._max_loras,
            "running_loras": _some(names[0]),
            "waiting_loras": _some(names[1]),
        }

    def device_idle(self, now: float) -> None:
        """No step is in flight, though there are requests."""
        self._idle_since = now

    def numbers(self, scheduler: Scheduling[Any], num_pending: int, now: float) -> CoreNumbers:
        """A snapshot of all counters and gauges, as of now."""
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = now if scheduler.has_work else None
        num_blocks, snapshots = scheduler.num_blocks - 1, scheduler.snapshots
        return CoreNumbers(
            CoreGauges(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting + num_pending,
                num_blocks=num_blocks,
                num_used_blocks=num_blocks - scheduler.num_free_blocks,
                block_size=scheduler.block_size,
                num_state_snapshots=snapshots.num,
                num_used_state_snapshots=snapshots.num_used,
                engine=self._engine,
                **self._of_adapters(scheduler),
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
                prefill_s=self._prefill_s.histogram(),
                inference_s=self._inference_s.histogram(),
                num_state_snapshots_loaded=snapshots.num_loads,
                num_state_snapshots_evicted=snapshots.num_evictions,
                num_drafts=self._num_drafts,
                num_draft_tokens=self._num_draft_tokens,
                draft_s=self._draft_s,
                num_accepted_tokens_per_pos=tuple(self._accepted.tolist()),
            ),
            self.recent.spans(now),
        )


def _some(by_name: dict[str, int]) -> dict[str, int]:
    """The adapters with the most requests, as many as a line has room for."""
    found, num_bytes = {}, 0
    for name in sorted(by_name, key=lambda name: (-by_name[name], name)):
        num_bytes += len(name.encode())
        if num_bytes > _MOST_NAME_BYTES:
            break
        found[name] = by_name[name]
    return found
