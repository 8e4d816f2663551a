"""Where the CPU time of a real model's decode steps goes: the core's parts, and those inside the
device. Timers wrap functions of the runner for the duration of the measurement.

- The core's parts are those of `core_parts`; handing a step over is part of `launch`.
- Inside the device it is wall time on its thread, as the parts use several threads: `model`, the
  forward pass, which may be one call (`program`); `sampling`; `device`, the whole step.
- Steps that compute prompts are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream_core.config import CoreConfig
from slipstream_core.runner import sample_stage, torch_factory
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_lab.common import core_parts
from slipstream_lab.common.core_parts import DEVICE, CoreParts

PARTS = ("model", "sampling", DEVICE)


def load(
    model: str, *, batches: Sequence[int], prompt_len: int, steps: int, threads: int | None
) -> TorchRunner:
    """Load the model with room for the largest batch. Raises: ModelLoadError."""
    longest = prompt_len + max(
        core_parts.num_outputs(batch, prompt_len, steps, _budget(batch)) for batch in batches
    )
    blocks = -(-longest // 16) + 2  # a prompt may be a block longer
    return torch_factory.load_runner(
        CoreConfig(
            model=model,
            address="none",
            device="cpu",
            max_num_seqs=max(batches),
            max_model_len=16 * blocks,
            num_blocks=max(batches) * blocks + 1,
            threads=threads,
        )
    )


def _budget(batch: int) -> int:
    return max(2048, 2 * batch)


def measure(
    runner: TorchRunner, batch: int, *, prompt_len: int, steps: int, enable_prefix_caching: bool
) -> dict[str, list[float]]:
    """Microseconds of each part, the core's and the device's, by step."""
    with _clocks() as spent:
        parts = CoreParts(
            batch,
            prompt_len=prompt_len,
            steps=steps,
            enable_prefix_caching=enable_prefix_caching,
            runner=runner,
            budget=_budget(batch),
        )
        try:
            for _ in range(steps):
                assert parts.step(), "not every request decodes"
            parts.check_whole()
            us = parts.measured_us()
        finally:
            parts.close()
    us["launch"] = [sum(both) for both in zip(us["launch"], us.pop(DEVICE), strict=True)]
    measured = spent[-steps:]
    us["model"] = [step["_forward"] / 1e3 for step in measured]
    us["sampling"] = [step["sample"] / 1e3 for step in measured]
    us[DEVICE] = [step["_step"] / 1e3 for step in measured]
    return us


@contextmanager
def _clocks() -> Iterator[list[dict[str, int]]]:
    """Nanoseconds spent in the runner's parts, by function, for each completed step."""
    steps: list[dict[str, int]] = []
    running: dict[str, int] = {}  # of the device thread's current step
    timed: tuple[tuple[Any, str], ...] = (
        (TorchRunner, "_forward"),
        (sample_stage, "sample"),
        (TorchRunner, "_step"),
    )

    def ended() -> None:
        steps.append(running.copy())
        running.clear()

    originals = [getattr(owner, name) for owner, name in timed]
    try:
        for (owner, name), original in zip(timed, originals, strict=True):
            setattr(owner, name, _timed(original, name, running, ended))
        yield steps
    finally:
        for (owner, name), original in zip(timed, originals, strict=True):
            setattr(owner, name, original)


def _timed(
    original: Callable[..., Any], name: str, spent: dict[str, int], ended: Callable[[], None]
) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return original(*arguments, **options)
        finally:
            spent[name] = spent.get(name, 0) + time.perf_counter_ns() - begin
            if name == "_step":
                ended()

    return call
