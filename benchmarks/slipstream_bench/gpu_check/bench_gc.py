"""Section: `slipstream bench gc` on the real device, where each step is computed and its ids
fetched before the host's work on them.

As on the simulated device nothing overlaps: a step is enqueued only when the host is done with the
one before. Rows repeatedly decode at one length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slipstream_bench.common.measures import Row
from slipstream_bench.gc_pauses.shape_measure import SHAPES, WARM_UP_STEPS, measure, with_gains
from slipstream_bench.gpu_check.gpu_report import GpuReport
from slipstream_bench.gpu_check.gpu_stack import core_config
from slipstream_bench.gpu_check.models import shape_name
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_core.runner.factory import load_runner
from slipstream_core.runner.memory import largest_plan
from slipstream_core.step.plan import Runner, StepPlan

_NOT_HERE = ("benchmark", "version", "python", "shape", "is_frozen", "wall_s")
_GUESS_S = 0.004  # of a step with the host's work


class _Steps:
    """Decode steps of a runner, one after the other."""

    def __init__(self, runner: Runner, batch: int, context: int) -> None:
        self._runner = runner
        self._plan = _decoding(runner, batch, context)
        self.seconds: list[float] = []

    def ids(self) -> Iterator[npt.NDArray[np.int64]]:
        """The ids of one step each, int64 [batch]; a step runs when its ids are requested."""
        while True:
            began = time.perf_counter()
            self._plan = replace(self._plan, step=self._plan.step + 1)
            self._runner.launch(self._plan)
            token_ids = self._runner.collect().token_ids
            self.seconds.append(time.perf_counter() - began)
            yield token_ids


def run(setting: GpuSetting, report: GpuReport, shape: str) -> None:
    """A row per shape of ids, with the heap frozen and not."""
    batch, steps, context = (4, 20, 16) if setting.is_quick else (256, 200, 128)
    config = core_config(
        setting,
        shape,
        num_requests=batch,
        max_model_len=context + 16,
        num_tokens=batch * (context + 16),
        graph_sizes=(batch,),
    )
    runner = load_runner(config)
    try:
        device_steps = _Steps(runner, batch, context)
        ids = device_steps.ids()
        for is_frozen in (True, False):
            found: list[Row] = []
            for name in SHAPES:
                case = _case(name, is_frozen=is_frozen)
                if not setting.has_time(report, case, (WARM_UP_STEPS + steps) * _GUESS_S):
                    continue
                device_steps.seconds.clear()
                row = measure(name, batch, steps, ids, is_frozen=is_frozen)
                step_ms = 1e3 * statistics.median(device_steps.seconds)
                tokens_per_s = batch * steps / float(row["wall_s"] or 1)
                found.append(
                    row | {"step_ms": round(step_ms, 3), "tokens_per_s": round(tokens_per_s, 1)}
                )
            if found and found[0]["shape"] == SHAPES[0]:
                found = with_gains(found)
            for row in found:
                report.add(
                    _case(str(row["shape"]), is_frozen=is_frozen),
                    model=shape_name(shape, is_quick=setting.is_quick),
                    **{name: value for name, value in row.items() if name not in _NOT_HERE},
                )
    finally:
        runner.close()


def _case(shape: str, *, is_frozen: bool) -> str:
    return f"{shape}, heap {'frozen' if is_frozen else 'not frozen'}"


def _decoding(runner: Runner, batch: int, context: int) -> StepPlan:
    """A greedy decode step of `batch` rows, each with `context` tokens in separate blocks."""
    size = runner.info.block_size
    plan = largest_plan(
        batch,
        batch,
        max_model_len=runner.info.max_model_len,
        block_size=size,
        vocab_size=runner.info.vocab_size,
    )
    per_row = -(-context // size)
    tables = 1 + np.arange(batch * per_row, dtype=np.int32).reshape(batch, per_row)
    return replace(
        plan,
        positions=np.full(batch, context - 1),
        kv_slots=tables[:, -1].astype(np.int64) * size + (context - 1) % size,
        kv_lens=np.full(batch, context, np.int32),
        prompt_lens=np.full(batch, context - 1, np.int32),
        block_tables=tables,
        temperatures=np.zeros(batch, np.float32),
        top_ks=np.zeros(batch, np.int32),
        top_ps=np.ones(batch, np.float32),
        num_logprobs=np.full(batch, -1, np.int32),
        all_greedy=True,
        any_truncation=False,
        max_logprobs=-1,
    )
