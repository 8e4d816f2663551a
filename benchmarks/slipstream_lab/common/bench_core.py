"""An engine core in a benchmark's own process, and a runner whose calls can be observed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from slipstream_core.engine.build import Core
from slipstream_core.step.plan import Runner, StepPlan, StepResult
from slipstream_ipc.arrays import Int32s
from slipstream_ipc.messages import Status
from slipstream_ipc.process import StopSignal, report

Assemble = Callable[["zmq.Context[zmq.Socket[bytes]]", zmq.Poller], Core]


def run_core(
    stop: StopSignal, assemble: Assemble, record: Callable[[], object], record_file: str
) -> int:
    """Serve until SIGTERM, then write `record()` to `record_file` as JSON. Returns exit code 0."""
    context = zmq.Context()
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    core = assemble(context, poller)
    gc.collect()
    gc.freeze()
    report(Status(ready=True))
    while not stop.is_set:
        core.engine.run_once()
    Path(record_file).write_bytes(msgspec.json.encode(record()))
    core.close()
    context.destroy(linger=0)
    return 0


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
