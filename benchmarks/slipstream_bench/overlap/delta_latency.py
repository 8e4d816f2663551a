"""Measures the latency of a single stream: from a token's id on the host until its reader has it.

The core is the product's with a recording runner (`watched_core`), the worker is the product's
process, and the reader uses the public API: `for delta in client.stream()`, or `async for`. All
times come from the machine's monotonic clock.

An id reaches the host when the core has collected its step. `from_step_end` counts from the step's
end on the device, so it includes time that the core overslept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import Client
from slipstream_bench.common.live_streams import random_prompts
from slipstream_bench.common.report import Row, median_rows
from slipstream_bench.common.simulated_stack import Simulated
from slipstream_bench.overlap.watched_core import StepRecord, run_recorded
from slipstream_ipc.messages import SamplingParams

COLUMNS = (
    "batch",
    "step_ms",
    "reader",
    "num_tokens",
    "from_host_p50_us",
    "from_host_p99_us",
    "from_step_end_p50_us",
    "from_step_end_p99_us",
    "runs",
)

_STEP_MS = 5.0
_NUM_TOKENS, _QUICK_NUM_TOKENS = 1000, 300
_WARM_UP = 20  # tokens

Times = dict[int, float]  # arrival of each output's delta, by the output's number


def measure_latency(*, runs: int, is_quick: bool) -> list[Row]:
    """A row per way of reading: medians of the runs."""
    num_tokens = _QUICK_NUM_TOKENS if is_quick else _NUM_TOKENS
    rows = [
        _row(reader, num_tokens, *_run(read, num_tokens))
        for _ in range(runs)
        for reader, read in (("blocking", _read_blocking), ("asyncio", _read_async))
    ]
    return median_rows(rows, ("reader",))


def _run(read: Callable[[str, SamplingParams], Times], num_tokens: int) -> tuple[Times, StepRecord]:
    """Run one stream; returns the times seen by its reader and the core's record."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    return run_recorded(Simulated(_STEP_MS, 1), lambda stack: read(stack.address, params))


def _read_blocking(address: str, params: SamplingParams) -> Times:
    times: Times = {}
    num = 0
    with Client(address) as client:
        for delta in client.stream(random_prompts(1)[0], params):
            now = time.monotonic()
            for _ in range(delta.num_tokens):
                num += 1
                times[num] = now
    return times


def _read_async(address: str, params: SamplingParams) -> Times:
    async def read() -> Times:
        times: Times = {}
        num = 0
        async with AsyncClient(address) as client:
            async for delta in client.stream(random_prompts(1)[0], params):
                now = time.monotonic()
                for _ in range(delta.num_tokens):
                    num += 1
                    times[num] = now
        return times

    return asyncio.run(read())


def _row(reader: str, num_tokens: int, times: Times, record: StepRecord) -> Row:
    seen, collected, done = [], [], []
    for output, collected_s, done_s in zip(
        record.first_output, record.collected_s, record.done_s, strict=True
    ):
        if _WARM_UP < output < num_tokens:  # the last delta waits until the stream's end is settled
            seen.append(times[output])
            collected.append(collected_s)
            done.append(done_s)
    since_host = 1e6 * (np.array(seen) - np.array(collected))
    since_end = 1e6 * (np.array(seen) - np.array(done))
    return {
        "benchmark": "overlap",
        "part": "latency",
        "is_simulated": True,
        "batch": 1,
        "step_ms": _STEP_MS,
        "reader": reader,
        "num_tokens": len(seen),
        "from_host_p50_us": round(float(np.percentile(since_host, 50)), 1),
        "from_host_p99_us": round(float(np.percentile(since_host, 99)), 1),
        "from_step_end_p50_us": round(float(np.percentile(since_end, 50)), 1),
        "from_step_end_p99_us": round(float(np.percentile(since_end, 99)), 1),
    }
