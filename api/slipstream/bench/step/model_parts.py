"""A real model's parts of a decode step on the CPU.

Owns: the bare loop of scheduler and runner, and the clocks inside the runner: they are put around
its functions for as long as it is measured. Does not know: how the parts work.

Rules:
- Wall time on the device's thread: the parts use several threads.
- The parts: `attention`, storing into the cache and reading it, all layers; `matmul`, which is the
  rest of the forward pass (projections, norms, the logits); `sampling`; `device`, the whole step.
- Steps that compute prompts are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from slipstream.bench.gpu_check.drive import Wanted, new_scheduler, random_prompts
from slipstream_core.config import CoreConfig
from slipstream_core.runner import torch_runner
from slipstream_core.runner.attention.native import NativeContext
from slipstream_core.runner.context import ForwardContext
from slipstream_core.runner.torch_runner import TorchRunner

PARTS = ("attention", "matmul", "sampling", "device")


def load(model: str, *, batches: Sequence[int], longest: int, threads: int | None) -> TorchRunner:
    """The model, with room for the largest batch. Raises: ModelLoadError."""
    blocks = -(-longest // 16) + 1
    return torch_runner.load_runner(
        CoreConfig(
            model=model,
            address="none",
            device="cpu",
            max_num_seqs=max(batches),
            max_model_len=longest,
            num_blocks=max(batches) * blocks + 1,
            threads=threads,
        )
    )


def num_outputs(batch: int, prompt_len: int, steps: int) -> int:
    """Tokens that each request is to have, so that all of them decode together for `steps`."""
    room = _budget(batch) - batch  # beside those that decode already
    return steps + -(-batch * prompt_len // room) + 2


def _budget(batch: int) -> int:
    return max(2048, 2 * batch)


def measure(
    runner: TorchRunner, batch: int, *, prompt_len: int, steps: int
) -> dict[str, list[float]]:
    """Microseconds of each part, by step."""
    budget = _budget(batch)
    prompts = random_prompts(batch, prompt_len, runner.info.vocab_size)
    scheduler = new_scheduler(
        [Wanted(prompt, num_outputs(batch, prompt_len, steps)) for prompt in prompts],
        num_blocks=runner.num_blocks,
        block_size=runner.info.block_size,
        budget=budget,
        max_model_len=runner.info.max_model_len,
    )
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    acked = np.zeros(batch, np.int64)  # nobody reads along
    with _clocks() as spent:
        while len(found["device"]) < steps:
            plan = scheduler.schedule(acked)
            assert plan is not None
            spent.clear()
            runner.launch(plan)
            result = runner.collect()
            scheduler.complete(plan, result.token_ids)
            scheduler.settle()
            if plan.num_decodes == plan.num_requests == batch:
                us = {name: ns / 1e3 for name, ns in spent.items()}
                found["attention"].append(us["attend"])
                found["matmul"].append(us["_forward"] - us["attend"])
                found["sampling"].append(us["sample"])
                found["device"].append(us["_step"])
    return found


@contextmanager
def _clocks() -> Iterator[dict[str, int]]:
    """Nanoseconds spent in the runner's parts since this was last cleared, by function."""
    spent: dict[str, int] = {}
    timed: tuple[tuple[Any, str], ...] = (
        (TorchRunner, "_step"),
        (TorchRunner, "_forward"),
        (ForwardContext, "attend"),
        (NativeContext, "attend"),
        (torch_runner, "sample"),
    )
    originals = [getattr(owner, name) for owner, name in timed]
    try:
        for (owner, name), original in zip(timed, originals, strict=True):
            setattr(owner, name, _timed(original, name, spent))
        yield spent
    finally:
        for (owner, name), original in zip(timed, originals, strict=True):
            setattr(owner, name, original)


def _timed(original: Callable[..., Any], name: str, spent: dict[str, int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return original(*arguments, **options)
        finally:
            spent[name] = spent.get(name, 0) + time.perf_counter_ns() - begin

    return call
