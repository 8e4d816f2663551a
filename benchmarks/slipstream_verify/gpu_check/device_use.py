"""How long the device was busy, and a runner that measures it over one span of its steps.

On a card the profiler records every kernel and copy, so idle time is what lies between them,
including gaps between two kernels of one step. On the CPU the device is the runner's thread, busy
while it computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream_core.step.plan import Runner, StepPlan, StepResult
from slipstream_lab.common.bare_loop import LoopStep
from slipstream_lab.common.bench_core import RunnerShell

DEVICE_THREAD = "device"  # name of the runner's thread


class DeviceUse(Protocol):
    """Measures one span."""

    def start(self) -> None:
        """Begin the span."""

    def stop(self) -> float:
        """End the span; returns the share of it, 0 to 1, in which the device was idle."""


def device_use(device: str) -> DeviceUse:
    """The implementation for the device."""
    return CardUse() if device == "cuda" else ThreadUse()


class CardUse:
    """Uses the profiler; its span is from the card's first activity to its last."""

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin the span, after the slow first profile of a process."""
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> float:
        """End the span and read the trace, which takes a while."""
        torch.cuda.synchronize()
        self._profile.stop()
        return idle_share(
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type.name == "CUDA"
        )


class ThreadUse:
    """Uses the CPU time of the runner's thread, whose name must be unique in the process."""

    def start(self) -> None:
        """Find the thread and read its clock."""
        (thread,) = (t for t in threading.enumerate() if t.name == DEVICE_THREAD)
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._begin = time.monotonic(), time.clock_gettime(self._clock)

    def stop(self) -> float:
        """Read the clock again; returns the idle share."""
        span = time.monotonic() - self._begin[0]
        return max(0.0, 1 - (time.clock_gettime(self._clock) - self._begin[1]) / span)


def idle_share(busy: Iterable[tuple[float, float]]) -> float:
    """The share of the whole span that no interval covers. Raises ValueError without intervals."""
    intervals = sorted(busy)
    if not intervals:
        raise ValueError("the profiler saw nothing on the device")
    first, end = intervals[0]
    idle = 0.0
    for start, stop in intervals:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - first) if end > first else 0.0


class MeasuredRunner(RunnerShell):
    """Records when its steps were collected, and measures the device's use in one span of them."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._launched: deque[StepPlan] = deque()
        self.watch(0)

    def watch(
        self, batch: int, *, warm_up: int = 0, use: DeviceUse | None = None, span_s: float = 0.0
    ) -> None:
        """Reset the record. Measure `use` for `span_s`, after `warm_up` steps that each decode
        `batch` rows and nothing else.
        """
        self.steps: list[LoopStep] = []
        self.idle_share: float | None = None  # of the measured span
        self._batch = batch
        self._warm_up = warm_up
        self._use = use
        self._span_s = span_s
        self._span_begin: float | None = None

    def finish(self) -> None:
        """End the span if it is still open."""
        if self._use is not None and self._span_begin is not None:
            self.idle_share = self._use.stop()
            self._use = None

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Returns at once."""
        self._launched.append(plan)
        self.runner.launch(plan)

    def collect(self) -> StepResult:
        """The oldest launched step's result; waits for it. Raises StepFailed."""
        plan = self._launched.popleft()
        result = self.runner.collect()
        now = time.perf_counter()
        self.steps.append(LoopStep(now, plan.num_decodes, plan.num_requests))
        if self._use is not None and plan.num_decodes == plan.num_requests == self._batch:
            self._warm_up -= 1
            if self._span_begin is None and self._warm_up < 0:
                self._use.start()
                self._span_begin = time.perf_counter()
            elif self._span_begin is not None and now - self._span_begin > self._span_s:
                self.finish()
        return result
