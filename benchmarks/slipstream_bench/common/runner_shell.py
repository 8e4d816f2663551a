"""A runner that wraps another one and can observe the calls between engine and runner."""

from __future__ import annotations

from slipstream_core.step.plan import Int32s, Runner, StepPlan, StepResult


class RunnerShell:
    """Implements `Runner` by delegating every call."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.info = runner.info
        self.num_blocks = runner.num_blocks

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Returns at once."""
        self.runner.launch(plan)

    def sample(self, plan: StepPlan, masks: Int32s) -> None:
        """Sample a launched plan that waits for grammar masks."""
        self.runner.sample(plan, masks)

    def collect(self) -> StepResult:
        """The oldest launched step's result; waits for it. Raises StepFailed."""
        return self.runner.collect()

    def done(self) -> bool:
        """Whether collect() would return without waiting."""
        return self.runner.done()

    def fileno(self) -> int | None:
        """A descriptor that is readable while a finished step waits to be collected, if any."""
        return self.runner.fileno()

    def done_at(self) -> float | None:
        """time.monotonic() at which the oldest step will be done, where that is known."""
        return self.runner.done_at()

    def close(self) -> None:
        """Stop the device."""
        self.runner.close()
