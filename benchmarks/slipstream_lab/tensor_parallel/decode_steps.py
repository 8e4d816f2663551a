"""Decode steps of a model in some ranks: a program, as each number of ranks wants a fresh process.

It reads a `StepsWanted` from standard input and writes a `StepsTaken` for each batch, in JSON.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

import msgspec
import numpy as np

from slipstream_core.config import CoreConfig
from slipstream_core.ranks.processes import Ranks
from slipstream_core.runner.factory import import_runner, load_runner
from slipstream_core.step.plan import Runner, StepPlan
from slipstream_lab.common.bare_loop import (
    LoopRequest,
    decode_intervals_s,
    drive,
    random_prompts,
)
from slipstream_lab.common.bench_core import RunnerShell

_BLOCK_SIZE = 16


class StepsWanted(msgspec.Struct, frozen=True):
    """What to measure. threads: of each rank. On cards, of several ranks: records: steps
    are recorded; symm_mem: small sums are made in memory that they share.
    """

    model: str
    ranks: int
    threads: int
    batches: tuple[int, ...]
    prompt_len: int
    steps: int
    temperature: float
    top_p: float
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    records: bool = False
    symm_mem: bool = False


class StepsTaken(msgspec.Struct, frozen=True):
    """Medians over decode steps of `batch` rows. launch_us: CPU time in which the engine's thread
    hands a step over."""

    batch: int
    step_us: float
    launch_us: float
    steps: int


class _TimedLaunches(RunnerShell):
    def __init__(self, runner: Runner, batch: int) -> None:
        super().__init__(runner)
        self._batch = batch
        self.spent_ns: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        """Note the CPU time of handing over a decode step."""
        begin = time.thread_time_ns()
        super().launch(plan)
        if plan.num_decodes == plan.num_requests == self._batch:
            self.spent_ns.append(time.thread_time_ns() - begin)


def _runner(config: CoreConfig) -> Runner:
    if config.tensor_parallel_size == 1:
        import_runner(config)
        return load_runner(config)
    ranks = Ranks(config)
    import_runner(config)
    from slipstream_core.ranks.leader import load_lead

    return load_lead(config, ranks)


def measure(wanted: StepsWanted) -> list[StepsTaken]:
    """Load the model and decode."""
    longest = wanted.prompt_len + wanted.steps + 8
    blocks = -(-longest // _BLOCK_SIZE) + 1
    most = max(wanted.batches)
    runner = _runner(
        CoreConfig(
            model=wanted.model,
            address="unused",
            device=wanted.device,
            dtype=wanted.dtype,
            threads=wanted.threads,
            tensor_parallel_size=wanted.ranks,
            cuda_graphs_over_ranks=wanted.records,
            enable_torch_symm_mem=wanted.symm_mem,
            max_model_len=longest,
            max_num_seqs=most,
            max_num_batched_tokens=max(2048, most),
            block_size=_BLOCK_SIZE,
            num_blocks=most * blocks + 1,
        )
    )
    taken = []
    try:
        for batch in wanted.batches:
            shell = _TimedLaunches(runner, batch)
            prompts = random_prompts(batch, wanted.prompt_len, runner.info.vocab_size)
            requests = [
                LoopRequest(
                    prompt,
                    wanted.steps + 2,
                    temperature=wanted.temperature,
                    top_p=wanted.top_p,
                    seed=at,
                )
                for at, prompt in enumerate(prompts)
            ]
            steps = drive(shell, requests, budget=max(2048, most)).steps
            step_us = 1e6 * float(np.median(decode_intervals_s(steps, batch)))
            launch_us = float(np.median(shell.spent_ns)) / 1e3
            taken.append(StepsTaken(batch, step_us, launch_us, len(shell.spent_ns)))
    finally:
        runner.close()
    return taken


def main() -> int:
    """Measure what standard input says."""
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=StepsWanted)
    sys.stdout.buffer.write(msgspec.json.encode(measure(wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
