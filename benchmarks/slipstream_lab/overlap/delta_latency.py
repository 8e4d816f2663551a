"""Measures the latency of a delta: from its ids on the host until the reader has it.

The core is the product's with a recording runner (`watched_core`), the worker is the product's
process, and the reader uses the public API: `stream_many` for all streams together, and, for a
single one, `for delta in client.stream()` and `async for` too. All times come from the machine's
monotonic clock.

An id reaches the host when the core has collected its step. `from_step_end` counts from the step's
end on the device, so it includes time that the core overslept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import Client
from slipstream.outputs import Delta
from slipstream_bench.common.live_streams import Prompt, random_prompts
from slipstream_bench.common.measures import cannot_measure
from slipstream_bench.common.report import Row, median_rows
from slipstream_ipc.messages import SamplingParams
from slipstream_lab.common.simulated_stack import Simulated
from slipstream_lab.overlap.watched_core import StepRecord, run_recorded

COLUMNS = (
    "batch",
    "step_ms",
    "reader",
    "num_tokens",
    "tokens_per_delta",
    "from_host_p50_us",
    "from_host_p99_us",
    "from_step_end_p50_us",
    "from_step_end_p99_us",
    "runs",
)

_STEP_MS = 5.0
_BATCHES = (1, 32, 256)
_NUM_TOKENS, _QUICK_NUM_TOKENS = 1000, 300
_WARM_UP = 20  # steps

Reader = Literal["stream_many", "blocking", "asyncio"]


class Arrivals:
    """The arrival of every output: `times_s[stream][number of the output, from 0]`."""

    def __init__(self, num_streams: int) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(num_streams)]
        self.num_deltas = 0

    def note(self, stream: int, delta: Delta) -> None:
        """A delta was read."""
        self.times_s[stream] += [time.monotonic()] * delta.num_tokens
        self.num_deltas += 1


Read = Callable[[str, Sequence[Prompt], Sequence[SamplingParams]], Arrivals]


def measure_latency(*, runs: int, is_quick: bool) -> list[Row]:
    """A row per number of streams and way of reading: medians of the runs."""
    num_tokens = _QUICK_NUM_TOKENS if is_quick else _NUM_TOKENS
    points = [(batch, reader) for batch in _BATCHES for reader in get_args(Reader)]
    rows = [
        _row(reader, num_tokens, *_run(_READS[reader], batch, num_tokens))
        for _ in range(runs)
        for batch, reader in points
        if batch == 1 or reader == "stream_many"
    ]
    return median_rows(rows, ("batch", "reader"))


def _run(read: Read, batch: int, num_tokens: int) -> tuple[Arrivals, StepRecord]:
    """Run all streams; returns what their reader saw, and the core's record."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=seed)
        for seed in range(batch)
    ]
    return run_recorded(
        Simulated(_STEP_MS, batch),
        lambda stack: read(stack.address, random_prompts(batch), params),
        keeps_seeds=True,
    )


def _read_many(
    address: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Arrivals:
    arrivals = Arrivals(len(prompts))
    with Client(address) as client:
        for stream, delta in client.stream_many(prompts, params):
            arrivals.note(stream, delta)
    return arrivals


def _read_blocking(
    address: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Arrivals:
    arrivals = Arrivals(1)
    with Client(address) as client:
        for delta in client.stream(prompts[0], params[0]):
            arrivals.note(0, delta)
    return arrivals


def _read_async(
    address: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Arrivals:
    arrivals = Arrivals(1)

    async def read() -> None:
        async with AsyncClient(address) as client:
            async for delta in client.stream(prompts[0], params[0]):
                arrivals.note(0, delta)

    asyncio.run(read())
    return arrivals


_READS: dict[Reader, Read] = {
    "stream_many": _read_many,
    "blocking": _read_blocking,
    "asyncio": _read_async,
}


def _row(reader: Reader, num_tokens: int, arrivals: Arrivals, record: StepRecord) -> Row:
    batch = len(arrivals.times_s)
    since_host = _since(record.collected_s, num_tokens, arrivals, record)
    since_end = _since(record.done_s, num_tokens, arrivals, record)
    return {
        "benchmark": "overlap",
        "part": "latency",
        "is_simulated": True,
        "batch": batch,
        "step_ms": _STEP_MS,
        "reader": reader,
        "num_tokens": since_host.size,
        "tokens_per_delta": round(batch * num_tokens / arrivals.num_deltas, 3),
        "from_host_p50_us": round(float(np.percentile(since_host, 50)), 1),
        "from_host_p99_us": round(float(np.percentile(since_host, 99)), 1),
        "from_step_end_p50_us": round(float(np.percentile(since_end, 50)), 1),
        "from_step_end_p99_us": round(float(np.percentile(since_end, 99)), 1),
    }


def _since(
    begun_s: Sequence[float], num_tokens: int, arrivals: Arrivals, record: StepRecord
) -> npt.NDArray[np.float64]:
    """Microseconds from `begun_s` of each output's step to its arrival, while all streams run."""
    steps: list[list[int]] = [[] for _ in arrivals.times_s]  # of each stream's outputs
    for step, seeds in enumerate(record.seeds):
        for seed in seeds:
            steps[seed].append(step)
    begin = max(found[0] for found in steps) + _WARM_UP
    # the last delta waits until the stream's end is settled
    end = min(found[num_tokens - 1] for found in steps)
    since_s = [
        time_s - begun_s[step]
        for found, times_s in zip(steps, arrivals.times_s, strict=True)
        for step, time_s in zip(found, times_s, strict=False)
        if begin <= step < end
    ]
    if not since_s:
        raise cannot_measure("the streams never ran all at once")
    return np.multiply(since_s, 1e6)
