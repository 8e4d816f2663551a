"""Measures the points of the overlap benchmark's table: each mode's stack under each load.

Modes:
- `in_loop`: one process, one thread, strictly sequential (the module of that name).
- `in_loop_async`: the same thread, with one step launched ahead.
- `worker`: the product, an ordinary stack.
- `vllm_in_loop`: vLLM's output path in the engine's place, in vLLM's own interpreter, with the
  reader in the loop as well.

In every mode but the last, a client in this process reads every delta, on the same cores.
`efficiency` is its token rate over that of a device that never waits, batch / step_ms;
`device_idle_share` is 1 minus that, and `host_ms` is the part of a step beyond its time on the
device.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.demo_model import MODEL_PATH
from slipstream.errors import EngineError
from slipstream_bench.common.live_streams import CLIENT, LiveStreams, Window, random_prompts
from slipstream_bench.common.simulated_stack import (
    Device,
    Program,
    RunningStack,
    Simulated,
    assembled,
    product,
)
from slipstream_bench.common.tables import Row
from slipstream_bench.common.variants import Variant, params_of
from slipstream_bench.overlap.overlap_options import Mode, OverlapForm
from slipstream_ipc.messages import Fault

_VLLM = "vllm_in_loop"
_PEER = Path(__file__).resolve().parents[3] / "scripts" / "peers" / "vllm_overlap.py"
MAX_MODEL_LEN = 8192


def num_points(form: OverlapForm, *, is_against: bool) -> int:
    """The number of points of one run."""
    modes = len(form.modes) + is_against
    return modes * len(form.steps_ms) * len(form.batches) * len(form.variants)


def measure_points(
    form: OverlapForm, vllm_python: str | None, on_point: Callable[[], object]
) -> list[Row]:
    """One row per point. Modes take turns at each step time, so that other load on the machine
    affects all of them.
    """
    rows: list[Row] = []
    loads = [(batch, variant) for batch in form.batches for variant in form.variants]
    for step_ms in form.steps_ms:
        for mode in form.modes:
            simulated = Simulated(step_ms, max(form.batches), max_model_len=MAX_MODEL_LEN)
            with stack_of(mode, simulated) as stack:
                for batch, variant in loads:
                    window = window_of(stack, batch, variant, form)
                    rows.append(_row(mode, batch, step_ms, variant, window))
                    on_point()
        if vllm_python is not None:
            for row in _vllm(vllm_python, step_ms, loads, form.window_s):
                rows.append(row)
                on_point()
    return rows


@contextmanager
def stack_of(mode: Mode, device: Device) -> Iterator[RunningStack]:
    """The processes of a mode."""
    if mode == "worker":
        with product(device) as running:
            yield running
        return
    module = "slipstream_bench.overlap.in_loop"
    with assembled(
        device, [Program("engine", module, ("core", "worker"), {"mode": mode})]
    ) as running:
        yield running


def window_of(stack: RunningStack, batch: int, variant: Variant, form: OverlapForm) -> Window:
    """Run a load and measure a window in which all of it runs."""
    prompts = random_prompts(batch)
    params = params_of(variant, MAX_MODEL_LEN - len(prompts[0]))
    with LiveStreams(stack.address, [(prompt, params) for prompt in prompts]) as live:
        live.wait_until_running(form.settle_s)
        return live.window(form.window_s, stack.pids)


def _row(mode: Mode, batch: int, step_ms: float, variant: Variant, window: Window) -> Row:
    if not window.tokens_per_s:
        why = f"no tokens came: mode {mode}, batch {batch}, {step_ms:g} ms, {variant}"
        raise EngineError(Fault("engine", why))
    row = _told(mode, batch, step_ms, variant, 1e3 * batch / window.tokens_per_s)
    row |= {
        "output_tokens_per_s": round(window.tokens_per_s, 1),
        "tokens_per_delta": round(window.coalescing, 3),
        "window_s": round(window.end_s - window.begin_s, 3),
    }
    sides = {"engine": "core", "worker": "worker"} if mode == "worker" else {"engine": "engine"}
    for side, name in (sides | {"client": CLIENT}).items():
        row[f"{side}_cpu_us_per_token"] = round(window.cpu_us_per_token(name), 3)
    return row


def _told(mode: str, batch: int, step_ms: float, variant: str, tpot_ms: float) -> Row:
    efficiency = step_ms / tpot_ms
    return {
        "benchmark": "overlap",
        "is_simulated": True,
        "mode": mode,
        "batch": batch,
        "step_ms": step_ms,
        "variant": variant,
        "tpot_ms": round(tpot_ms, 4),
        "host_ms": round(max(0.0, tpot_ms - step_ms), 4),
        "efficiency": round(efficiency, 4),
        "device_idle_share": round(max(0.0, 1 - efficiency), 4),
    }


def _vllm(
    python: str, step_ms: float, loads: Sequence[tuple[int, Variant]], window_s: float
) -> list[Row]:
    """Rows of the peer's script. Raises: EngineError if it fails."""
    wanted = json.dumps([(variant, batch, step_ms) for batch, variant in loads])
    command = [python, str(_PEER), str(MODEL_PATH), "--points", wanted, "--window", f"{window_s:g}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise EngineError(Fault("engine", f"{_PEER.name} failed: {last[0]}"))
    rows = []
    for line in done.stdout.splitlines():
        said = json.loads(line)
        row = _told(_VLLM, said["batch"], said["step_ms"], said["variant"], said["tpot_ms"])
        row |= {
            "engine": said["engine"],
            "output_tokens_per_s": round(1e3 * said["batch"] / said["tpot_ms"], 1),
            "tokens_per_delta": 1.0,
            "engine_cpu_us_per_token": said["cpu_us_per_token"],
        }
        rows.append(row)
    return rows
