"""Part: what the output path costs the device: the stack's steps against the bare loop's.

The core runs in this process, as its own `main` runs it; the worker (with its prompt process) and
the client are processes of their own. The runner is watched from within: when each step was
collected, and what the device did meanwhile. Nothing else differs from a stack that serves.

Each way is run twice: once for the times, and once for the device's idle share, since the profiler
takes time itself. The bare loop with log-probabilities shows what these cost the sampler; what is
left of the difference to the stack is the output path's.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from slipstream.bench.gpu_check import cudnn_attention
from slipstream.bench.gpu_check.device_use import device_use
from slipstream.bench.gpu_check.drive import Wanted, decode_intervals_s, drive, random_prompts
from slipstream.bench.gpu_check.models import saved_shape, shape_name
from slipstream.bench.gpu_check.report import Report
from slipstream.bench.gpu_check.setting import Setting
from slipstream.bench.gpu_check.throughput import core_config
from slipstream.bench.gpu_check.watched_runner import WatchedRunner
from slipstream.bench.measures import Row
from slipstream.processes import Child, ChildSpec
from slipstream_core.assembly import Core, assemble_core
from slipstream_core.runner.load import load_runner
from slipstream_ipc.child import Activate
from slipstream_worker.config import WorkerConfig

_WARM_UP = 8  # decode steps that are not counted
_SPAN_S = 0.25  # that is profiled; the trace of more takes long to read
_WITHIN_S = 60.0  # a run, or the worker's start, that takes longer has gone wrong


@dataclass(frozen=True, slots=True)
class _Load:
    num: int
    prompt_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Stack:
    core: Core
    client_address: str

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """The core's loop."""
        deadline = time.monotonic() + _WITHIN_S
        while not is_over():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not over within {_WITHIN_S:g} s")
            self.core.engine.run_once()

    def run_client(self, load: _Load, mode: str) -> dict[str, Any]:
        """Serve one load; what its client says of it."""
        command = [sys.executable, "-m", "slipstream.bench.gpu_check.overlap_client"]
        command += [self.client_address, str(load.num), str(load.prompt_len)]
        client = subprocess.Popen(
            [*command, str(load.num_tokens), mode], stdout=subprocess.PIPE, text=True
        )
        try:
            self.run_until(lambda: client.poll() is not None)
            assert client.stdout is not None
            said = client.stdout.read()
        finally:
            client.kill()
            client.wait()
        if client.returncode:
            raise RuntimeError(f"the client ended with code {client.returncode}")
        found: dict[str, Any] = json.loads(said)
        return found


def run(setting: Setting, report: Report) -> None:
    """A row for each way."""
    load = _Load(4, 16, 200) if setting.is_quick else _Load(256, 128, 96)
    cudnn_attention.rule_out()
    report.say(f"{shape_name(is_quick=setting.is_quick)}, {load}")
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        config = core_config(
            setting,
            num_requests=load.num,
            length=load.prompt_len + load.num_tokens,
            address=f"ipc://{folder}/core",
        )
        runner = WatchedRunner(load_runner(config))
        context = zmq.Context()
        try:
            bare = {mode: _run_bare(setting, report, runner, load, mode) for mode in _BARE}
            core = assemble_core(config, runner, context, zmq.Poller())
            with _worker(setting, folder, core) as stack:
                gc.collect()
                gc.freeze()  # as the core's own process does
                stack.run_client(_Load(1, load.prompt_len, 8), "all")
                for mode in _BARE:
                    _run_stack(setting, report, runner, load, stack, mode, bare[mode])
            core.socket.close()
        finally:
            runner.close()
            context.destroy(linger=0)


# By mode: what the bare loop's requests ask of the sampler, and how the bare and the stack's run
# are called.
_BARE = {
    "plain": (-1, "bare loop", "stack, text"),
    "all": (5, "bare loop, top-5", "stack, text, top-5, 2 stop strings"),
}


def _run_bare(
    setting: Setting, report: Report, runner: WatchedRunner, load: _Load, mode: str
) -> float | None:
    num_logprobs, case, _ = _BARE[mode]
    if not setting.has_time(report, case):
        return None
    prompts = random_prompts(load.num, load.prompt_len, runner.info.vocab_size)
    requests = [Wanted(prompt, load.num_tokens, num_logprobs=num_logprobs) for prompt in prompts]

    def once() -> None:
        drive(runner, requests, budget=8192)

    row = {"batch": load.num, **_measured(setting, runner, load, once)}
    report.add(case, **row)
    step_ms = row["step_median_ms"]
    assert isinstance(step_ms, float)
    return step_ms


def _run_stack(
    setting: Setting,
    report: Report,
    runner: WatchedRunner,
    load: _Load,
    stack: _Stack,
    mode: str,
    bare_ms: float | None,
) -> None:
    """Judged is only whether every token arrived."""
    case = _BARE[mode][2]
    if not setting.has_time(report, case):
        return
    said: list[dict[str, Any]] = []

    def once() -> None:
        said.append(stack.run_client(load, mode))

    row = _measured(setting, runner, load, once)
    step_ms = row["step_median_ms"]
    assert isinstance(step_ms, float)
    client = said[0]  # that of the times, not of the profile
    report.add(
        case,
        client["output_tokens"] == load.num * load.num_tokens,
        batch=load.num,
        **row,
        over_bare_loop_ms=None if bare_ms is None else round(step_ms - bare_ms, 3),
        client_itl_median_ms=client["itl_median_ms"],
        client_tpot_mean_ms=client["tpot_mean_ms"],
        client_output_tokens=client["output_tokens"],
        client_output_chars=client["output_chars"],
    )


def _measured(
    setting: Setting, runner: WatchedRunner, load: _Load, once: Callable[[], None]
) -> Row:
    """The times of steps in which all rows decode, and the device's idle share among such."""
    runner.watch(load.num)
    once()
    intervals = decode_intervals_s(runner.steps, load.num)[_WARM_UP:]
    if not intervals:
        raise RuntimeError(f"there was no step in which all {load.num} requests decoded")
    use = device_use(setting.device)
    runner.watch(load.num, warm_up=_WARM_UP, use=use, span_s=_SPAN_S)
    once()
    runner.finish()
    milliseconds = np.array(intervals) * 1e3
    return {
        "num_steps": len(intervals),
        "step_median_ms": round(float(np.median(milliseconds)), 3),
        "step_mean_ms": round(statistics.mean(milliseconds.tolist()), 3),
        "step_p99_ms": round(float(np.percentile(milliseconds, 99)), 3),
        "device_idle_share": None if runner.idle_share is None else round(runner.idle_share, 4),
    }


@contextmanager
def _worker(setting: Setting, folder: str, core: Core) -> Iterator[_Stack]:
    """A worker's process, ready to serve; ended with the block."""
    config = WorkerConfig(
        tokenizer=str(saved_shape(setting.folder, setting.device, is_quick=setting.is_quick)),
        client_address=f"ipc://{folder}/client",
        core_address=f"ipc://{folder}/core",
        runtime_dir=folder,
        cache_dir=str(Path(setting.folder, "tables")),
    )
    argv = (sys.executable, "-m", "slipstream_worker.main")
    child = Child(ChildSpec("worker", argv, msgspec.Raw(msgspec.json.encode(config))))
    child.activate(Activate(incarnation=1))
    stack = _Stack(core, config.client_address)

    def is_ready() -> bool:
        child.read_status()
        if child.has_ended():
            raise RuntimeError(f"the worker ended: {child.error}")
        return child.state == "ready"

    try:
        stack.run_until(is_ready)
        yield stack
    finally:
        child.kill()
        child.reap()
