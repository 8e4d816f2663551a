"""A runner that records when its steps are collected and measures the device's use in one span, for
the bare loop and a whole stack alike.
"""

from __future__ import annotations

import time
from collections import deque

from slipstream_bench.common.runner_shell import RunnerShell
from slipstream_bench.gpu_check.device_use import DeviceUse
from slipstream_bench.gpu_check.drive import Ended
from slipstream_core.step.plan import Runner, StepPlan, StepResult


class WatchedRunner(RunnerShell):
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
        self.steps: list[Ended] = []
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
        self.steps.append(Ended(now, plan.num_decodes, plan.num_requests))
        if self._use is not None and plan.num_decodes == plan.num_requests == self._batch:
            self._warm_up -= 1
            if self._span_begin is None and self._warm_up < 0:
                self._use.start()
                self._span_begin = time.perf_counter()
            elif self._span_begin is not None and now - self._span_begin > self._span_s:
                self.finish()
        return result
