"""Measures the points of the overlap benchmark's table: each mode's stack under each load.

Modes:
- `in_loop`: one process, one thread, strictly sequential (the module of that name).
- `in_loop_async`: the same thread, with one step launched ahead.
- `worker`: the product, an ordinary stack.
- `vllm_in_loop`: vLLM's output path in the engine's place, in vLLM's own interpreter, with the
  reader in the loop as well.

In every mode but the last, a client in this process reads every delta, on the same cores:
`columns` counts tokens, `materialised` makes each text, id and candidate a Python object, as the
last mode has them anyway.
`efficiency` is its token rate over that of a device that never waits, batch / step_ms;
`device_idle_share` is 1 minus that, and `host_ms` is the part of a step beyond its time on the
device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product as pairs
from typing import Literal, NamedTuple, get_args

from slipstream.demo_model import MODEL_PATH
from slipstream_bench.common.live_streams import CLIENT, LiveStreams, Window, random_prompts
from slipstream_bench.common.measures import cannot_measure
from slipstream_bench.common.report import Row
from slipstream_bench.common.variants import Variant, params_of
from slipstream_lab.common.simulated_stack import (
    Program,
    RunningStack,
    ServedDevice,
    Simulated,
    assembled,
    product,
)
from slipstream_lab.peers.peer_process import run_peer

Mode = Literal["in_loop", "in_loop_async", "worker"]
MODES: tuple[Mode, ...] = get_args(Mode)
Read = Literal["columns", "materialised"]
READS: tuple[Read, ...] = get_args(Read)
VARIANTS: tuple[Variant, ...] = ("plain", "stop2", "logprobs5", "stop2_logprobs5")


class OverlapPlan(NamedTuple):
    """What is measured, and for how long."""

    batches: tuple[int, ...]
    steps_ms: tuple[float, ...]
    variants: tuple[Variant, ...]
    modes: tuple[Mode, ...]
    settle_s: float
    window_s: float
    reads: tuple[Read, ...] = ("columns",)


_VLLM = "vllm_in_loop"
MAX_MODEL_LEN = 8192


def num_points(plan: OverlapPlan, *, is_against: bool) -> int:
    """The number of points of one run."""
    modes = len(plan.modes) * len(plan.reads) + is_against
    return modes * len(plan.steps_ms) * len(plan.batches) * len(plan.variants)


def measure_points(
    plan: OverlapPlan, vllm_python: str | None, on_point: Callable[[], object]
) -> list[Row]:
    """One row per point. Modes take turns at each step time, so that other load on the machine
    affects all of them.
    """
    rows: list[Row] = []
    loads = [(batch, variant) for batch in plan.batches for variant in plan.variants]
    for step_ms in plan.steps_ms:
        for mode in plan.modes:
            simulated = Simulated(step_ms, max(plan.batches), max_model_len=MAX_MODEL_LEN)
            with stack_of(mode, simulated) as stack:
                for (batch, variant), read in pairs(loads, plan.reads):
                    window = window_of(stack, batch, variant, plan, read)
                    rows.append(_row(mode, batch, step_ms, variant, read, window))
                    on_point()
        if vllm_python is not None:
            for row in _vllm(vllm_python, step_ms, loads, plan.window_s):
                rows.append(row)
                on_point()
    return rows


@contextmanager
def stack_of(mode: Mode, device: ServedDevice) -> Iterator[RunningStack]:
    """The processes of a mode."""
    if mode == "worker":
        with product(device) as running:
            yield running
        return
    module = "slipstream_lab.overlap.in_loop"
    with assembled(
        device, [Program("engine", module, ("core", "worker"), {"mode": mode})]
    ) as running:
        yield running


def window_of(
    stack: RunningStack, batch: int, variant: Variant, plan: OverlapPlan, read: Read = "columns"
) -> Window:
    """Run a load and measure a window in which all of it runs."""
    prompts = random_prompts(batch)
    params = params_of(variant, MAX_MODEL_LEN - len(prompts[0]))
    requests = [(prompt, params) for prompt in prompts]
    with LiveStreams(stack.address, requests, is_materialised=read == "materialised") as live:
        live.wait_until_running(plan.settle_s)
        return live.window(plan.window_s, stack.pids)


def _row(
    mode: Mode, batch: int, step_ms: float, variant: Variant, read: Read, window: Window
) -> Row:
    if not window.tokens_per_s:
        why = f"no tokens came: mode {mode}, batch {batch}, {step_ms:g} ms, {variant}"
        raise cannot_measure(why)
    row = _columns(mode, batch, step_ms, variant, read, 1e3 * batch / window.tokens_per_s)
    row |= {
        "output_tokens_per_s": round(window.tokens_per_s, 1),
        "tokens_per_delta": round(window.coalescing, 3),
        "window_s": round(window.end_s - window.begin_s, 3),
    }
    sides = {"engine": "core", "worker": "worker"} if mode == "worker" else {"engine": "engine"}
    for side, name in (sides | {"client": CLIENT}).items():
        row[f"{side}_cpu_us_per_token"] = round(window.cpu_us_per_token(name), 3)
    return row


def _columns(
    mode: str, batch: int, step_ms: float, variant: str, read: Read, tpot_ms: float
) -> Row:
    efficiency = step_ms / tpot_ms
    return {
        "benchmark": "overlap",
        "is_simulated": True,
        "mode": mode,
        "batch": batch,
        "step_ms": step_ms,
        "variant": variant,
        "read": read,
        "tpot_ms": round(tpot_ms, 4),
        "host_ms": round(max(0.0, tpot_ms - step_ms), 4),
        "efficiency": round(efficiency, 4),
        "device_idle_share": round(max(0.0, 1 - efficiency), 4),
    }


def _vllm(
    python: str, step_ms: float, loads: Sequence[tuple[int, Variant]], window_s: float
) -> list[Row]:
    """Rows of the peer's program. Raises: SlipstreamError if it fails."""
    wanted = json.dumps([(variant, batch, step_ms) for batch, variant in loads])
    arguments = [str(MODEL_PATH), "--points", wanted, "--window", f"{window_s:g}"]
    lines = run_peer("vllm", "vllm_overlap.py", python, arguments)
    rows = []
    for point in map(json.loads, lines.splitlines()):
        load = (point["batch"], point["step_ms"], point["variant"])
        row = _columns(_VLLM, *load, "materialised", point["tpot_ms"])
        row |= {
            "engine": point["engine"],
            "output_tokens_per_s": round(1e3 * point["batch"] / point["tpot_ms"], 1),
            "tokens_per_delta": 1.0,
            "engine_cpu_us_per_token": point["cpu_us_per_token"],
        }
        rows.append(row)
    return rows
