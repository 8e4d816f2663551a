"""An engine core that keeps a record of its steps: the product's core but for its runner's shell.

`python -m slipstream_bench.overlap.watched_core`, started as every child; it takes the place of
`slipstream_core.main`. The record is written when it is told to stop. Watched is only what passes
between engine and runner, which is enough: a plan says which request, by its seed, samples which of
its outputs, so what a request was computed is told apart from what its reader ever got.

The runner is to be simulated, and seeds are to be small integers, all different.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from msgspec import Struct

from slipstream_bench.common.core_process import run_core
from slipstream_bench.common.runner_shell import RunnerShell
from slipstream_core.build import assemble_core
from slipstream_core.config import CoreConfig
from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner, load_simulated
from slipstream_core.step.plan import StepPlan, StepResult
from slipstream_ipc.process import start_child

_MAX_SEED = 2**20


class WatchedConfig(Struct, frozen=True):
    """A core's config, and where its record goes."""

    core: CoreConfig
    record: str


class Record(Struct):
    """What happened; a column for each thing that is known of a step, time.monotonic in seconds."""

    launched_s: list[float]
    done_s: list[float]  # its end on the device
    collected_s: list[float]  # its ids were on the host
    num_sampled: list[int]
    first_output: list[int]  # which output of its request the first sampled row was; 1 is the first
    idle_s: list[float]  # the device's, until this step began
    busy_s: list[float]  # the device's, this step included
    computed: list[int]  # outputs, by a request's seed

    def idle_share(self, begin_s: float, end_s: float) -> float:
        """Of the device, over the steps launched in that time."""
        inside = [i for i, at in enumerate(self.launched_s) if begin_s <= at <= end_s]
        if len(inside) < 2:
            return 0.0
        first, last = inside[0], inside[-1]
        idle = self.idle_s[last] - self.idle_s[first]
        busy = self.busy_s[last] - self.busy_s[first]
        return idle / (idle + busy)


def main() -> int:
    """Run until SIGTERM, write the record; exit code 0."""
    config, stop = start_child("watched core", WatchedConfig)
    runner = RecordedRunner(load_simulated(config.core))
    assemble = partial(assemble_core, config.core, runner)
    return run_core(stop, assemble, runner.record, config.record)


class RecordedRunner(RunnerShell):
    """Records its steps."""

    def __init__(self, runner: SimulatedRunner) -> None:
        super().__init__(runner)
        self._simulated = runner
        self._record = Record([], [], [], [], [], [], [], [])
        self._computed = np.zeros(64, np.int64)

    def record(self) -> Record:
        """What happened so far."""
        record = self._record
        num = len(record.collected_s)  # steps that nobody collected are in no column
        for column in (record.launched_s, record.num_sampled, record.first_output):
            del column[num:]
        del record.idle_s[num:], record.busy_s[num:]
        record.computed = self._computed.tolist()
        return record

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Returns at once."""
        record, runner = self._record, self._simulated
        record.launched_s.append(time.monotonic())
        runner.launch(plan)
        outputs = (plan.kv_lens - plan.prompt_lens)[plan.samples] + 1
        record.num_sampled.append(len(outputs))
        record.first_output.append(int(outputs[0]) if len(outputs) else 0)
        record.idle_s.append(runner.idle_s)
        record.busy_s.append(runner.busy_s)
        if len(outputs):
            self._note(plan.seeds, outputs)

    def collect(self) -> StepResult:
        """The oldest step's result; waits for it. Raises StepFailed."""
        done_s = self.runner.done_at()
        result = self.runner.collect()
        self._record.collected_s.append(time.monotonic())
        self._record.done_s.append(0.0 if done_s is None else done_s)
        return result

    def _note(self, seeds: np.ndarray[tuple[int], np.dtype[np.int64]], outputs: object) -> None:
        largest = int(seeds.max())
        assert 0 <= int(seeds.min()) <= largest < _MAX_SEED, "seeds are to be small integers"
        if largest >= len(self._computed):
            self._computed = np.pad(self._computed, (0, largest))
        self._computed[seeds] = np.maximum(self._computed[seeds], np.asarray(outputs))


if __name__ == "__main__":
    raise SystemExit(main())
