"""An engine core that records its steps: the product's core with a wrapped runner.

`python -m slipstream_lab.overlap.watched_core`, started like every child in place of
`slipstream_core.main`. It writes its record on SIGTERM. Recording the calls between engine and
runner is enough: a plan gives, by seed, which output of which request each row samples, so outputs
that were computed can be compared with those that the reader received.

The runner must be simulated, and seeds must be small, distinct integers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core
from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner, load_simulated
from slipstream_core.step.plan import StepPlan, StepResult
from slipstream_ipc.process import start_child
from slipstream_lab.common.bench_core import RunnerShell, run_core
from slipstream_lab.common.simulated_stack import (
    WORKER,
    Program,
    RunningStack,
    ServedDevice,
    assembled,
)

_MAX_SEED = 2**20

Ints = np.ndarray[tuple[int], np.dtype[Any]]
Result = TypeVar("Result")


class WatchedConfig(Struct, frozen=True):
    """A core's config, the file of its record, and whether it is to have each step's seeds."""

    core: CoreConfig
    record: str
    keeps_seeds: bool


class StepRecord(Struct):
    """Columns with an entry per step, but for `computed`; times are time.monotonic in seconds."""

    launched_s: list[float]
    done_s: list[float]  # the step's end on the device
    collected_s: list[float]  # its ids on the host
    num_sampled: list[int]
    idle_s: list[float]  # the device's idle time until this step began
    busy_s: list[float]  # the device's busy time, this step included
    computed: list[int]  # outputs by the request's seed
    seeds: list[list[int]]  # of the requests sampled; empty unless they are kept

    def idle_share(self, begin_s: float, end_s: float) -> float:
        """Idle share of the device over the steps launched in that time."""
        inside = [i for i, at in enumerate(self.launched_s) if begin_s <= at <= end_s]
        if len(inside) < 2:
            return 0.0
        first, last = inside[0], inside[-1]
        idle = self.idle_s[last] - self.idle_s[first]
        busy = self.busy_s[last] - self.busy_s[first]
        return idle / (idle + busy)


def run_recorded(
    device: ServedDevice, load: Callable[[RunningStack], Result], *, keeps_seeds: bool = False
) -> tuple[Result, StepRecord]:
    """Run a load on a stack with this core; returns what it gave, and the core's record."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = Path(folder) / "record.json"
        module = "slipstream_lab.overlap.watched_core"
        more = {"record": str(path), "keeps_seeds": keeps_seeds}
        core = Program("core", module, ("core",), more)
        with assembled(device, [core, WORKER]) as stack:
            result = load(stack)
        return result, msgspec.json.decode(path.read_bytes(), type=StepRecord)


def main() -> int:
    """Run until SIGTERM and write the record; exit code 0."""
    config, stop = start_child("watched core", WatchedConfig)
    runner = RecordedRunner(load_simulated(config.core), keeps_seeds=config.keeps_seeds)
    assemble = partial(assemble_core, config.core, runner)
    return run_core(stop, assemble, runner.record, config.record)


class RecordedRunner(RunnerShell):
    """A runner that records its steps."""

    def __init__(self, runner: SimulatedRunner, *, keeps_seeds: bool = False) -> None:
        super().__init__(runner)
        self._simulated = runner
        self._record = StepRecord([], [], [], [], [], [], [], [])
        self._computed = np.zeros(64, np.int64)
        self._keeps_seeds = keeps_seeds
        self._seeds: list[Ints] = []

    def record(self) -> StepRecord:
        """The record so far."""
        record = self._record
        num = len(record.collected_s)  # drop steps that were not collected
        for column in (record.launched_s, record.num_sampled, record.idle_s, record.busy_s):
            del column[num:]
        record.computed = self._computed.tolist()
        record.seeds = [seeds.tolist() for seeds in self._seeds[:num]]
        return record

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Returns at once."""
        record, runner = self._record, self._simulated
        record.launched_s.append(time.monotonic())
        runner.launch(plan)
        outputs = (plan.kv_lens - plan.prompt_lens)[plan.samples] + 1
        record.num_sampled.append(len(outputs))
        record.idle_s.append(runner.idle_s)
        record.busy_s.append(runner.busy_s)
        if len(outputs):
            self._note(plan.seeds, outputs)
        if self._keeps_seeds:
            self._seeds.append(plan.seeds.copy())

    def collect(self) -> StepResult:
        """The oldest step's result; waits for it. Raises StepFailed."""
        done_s = self.runner.done_at()
        result = self.runner.collect()
        self._record.collected_s.append(time.monotonic())
        self._record.done_s.append(0.0 if done_s is None else done_s)
        return result

    def _note(self, seeds: Ints, outputs: Ints) -> None:
        largest = int(seeds.max())
        assert 0 <= int(seeds.min()) <= largest < _MAX_SEED, "seeds are to be small integers"
        if largest >= len(self._computed):
            self._computed = np.pad(self._computed, (0, largest))
        self._computed[seeds] = np.maximum(self._computed[seeds], outputs)


if __name__ == "__main__":
    raise SystemExit(main())
