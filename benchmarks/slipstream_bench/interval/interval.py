"""`slipstream bench interval`: what a stream interval of n tokens gains, and what "auto" does.

`concurrency` requests run at a time, each followed by another when it ends, against an ordinary
stack; over ZeroMQ by `AsyncClient`, or with --http over the OpenAI-compatible front by the load
generator of `bench serve`. The client is this process, on the same cores. Fixed intervals are set
by the requests (`stream_interval`) on a server without one; "auto" is the server's default.

All numbers are those of the span in which all places are taken (`steady`): output tokens per
second, TTFT of the requests that start in it, gaps between two deltas of a stream, tokens per
delta, and CPU time per token of each process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import uvloop
from tqdm import tqdm

from slipstream.cli.parser import Parser
from slipstream.client.async_client import AsyncClient
from slipstream.errors import EngineError, wrong_option
from slipstream_bench.common.live_streams import CLIENT
from slipstream_bench.common.load.datasets import DatasetRequest, random_requests
from slipstream_bench.common.load.http_stream import HttpClient
from slipstream_bench.common.load.native_target import NativeTarget
from slipstream_bench.common.load.openai_target import Asking, OpenAITarget, first_model
from slipstream_bench.common.load.run_load import run_load
from slipstream_bench.common.measures import RequestTimeline
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report_options import add_common, check_common, tell
from slipstream_bench.common.simulated_stack import RunningStack, Simulated, note, product
from slipstream_bench.common.steady import CpuSamples, steady
from slipstream_bench.common.tables import Row, median_rows
from slipstream_ipc.messages import Fault

_STEP_MS = 10.0
_INPUT_LEN = 16
_SPREAD = 0.25  # spread of the output lengths, so that not all end at once
_WAVES = 2  # requests per place
_TIMEOUT_S = 600.0
_BY = ("transport", "concurrency", "interval")
_COLUMNS = (
    *_BY,
    "output_tokens_per_s",
    "over_interval_1",
    "efficiency",
    "ttft_median_ms",
    "ttft_p99_ms",
    "itl_median_ms",
    "itl_p99_ms",
    "tokens_per_delta",
    "core_cpu_us_per_token",
    "worker_cpu_us_per_token",
    "http_cpu_us_per_token",
    "client_cpu_us_per_token",
    "runs",
)

Interval = int | Literal["auto"]


class IntervalForm(NamedTuple):
    """What is measured."""

    intervals: tuple[Interval, ...]
    concurrencies: tuple[int, ...]
    output_len: int  # mean tokens of an answer


_FULL = IntervalForm((1, 2, 5, 10, "auto"), (64, 256, 1024), 256)
_QUICK = IntervalForm((1, 10, "auto"), (64, 256), 80)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("load")
    group.add_argument("--http", action="store_true", help="over HTTP, not over ZeroMQ")
    for name, parse, meaning in (
        ("intervals", _intervals, "tokens, or auto"),
        ("concurrencies", _integers, "requests at a time"),
    ):
        full, quick = (",".join(map(str, getattr(form, name))) for form in (_FULL, _QUICK))
        group.add_argument(
            f"--{name}",
            type=parse,
            metavar="N,...",
            help=f"{meaning}; default: {full}, with --quick {quick}",
        )
    group.add_argument(
        "--output-len",
        type=int,
        metavar="N",
        help=f"tokens of an answer, in the mean; default: {_FULL.output_len}, with --quick "
        f"{_QUICK.output_len}",
    )
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_interval)


def checked(arguments: argparse.Namespace) -> IntervalForm:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    form = _QUICK if arguments.quick else _FULL
    form = IntervalForm(
        arguments.intervals or form.intervals,
        arguments.concurrencies or form.concurrencies,
        form.output_len if arguments.output_len is None else arguments.output_len,
    )
    for interval in form.intervals:
        if interval != "auto" and not 1 <= interval <= 1000:
            raise wrong_option("intervals", interval, "integers in [1, 1000], or auto")
    for concurrency in form.concurrencies:
        if not 1 <= concurrency <= 4096:
            raise wrong_option("concurrencies", concurrency, "integers in [1, 4096]")
    if not 8 <= form.output_len <= 3000:
        raise wrong_option("output_len", form.output_len, "an integer in [8, 3000]")
    return form


def _intervals(text: str) -> tuple[Interval, ...]:
    return tuple("auto" if part == "auto" else int(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def bench_interval(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    form = checked(arguments)
    said = note()
    rows = median_rows(_measured(form, arguments), _BY)
    _compare(rows)
    way = "HTTP" if arguments.http else "ZeroMQ"
    print(
        f"{said} Steps of {_STEP_MS:g} ms, {_INPUT_LEN} + {form.output_len} tokens (+-"
        f"{100 * _SPREAD:g} %), over {way}, medians of {arguments.runs}."
    )
    tell(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, form, arguments.png, way)
    return 0


def _measured(form: IntervalForm, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    total = arguments.runs * len(form.intervals) * len(form.concurrencies)
    fixed = tuple(interval for interval in form.intervals if interval != "auto")
    kinds: list[tuple[Interval, tuple[Interval, ...]]] = [(1, fixed)] if fixed else []
    if "auto" in form.intervals:
        kinds.append(("auto", ("auto",)))
    with tqdm(total=total, unit="load", disable=None, leave=False) as bar:
        for _ in range(arguments.runs):
            for of_server, intervals in kinds:
                simulated = Simulated(_STEP_MS, max(form.concurrencies), stream_interval=of_server)
                with product(simulated, **({"http_port": 0} if arguments.http else {})) as stack:
                    for concurrency in form.concurrencies:
                        for interval in intervals:
                            load = measure_load(stack, interval, concurrency, form.output_len)
                            rows.append(uvloop.run(load))
                            bar.update()
    return rows


async def measure_load(
    stack: RunningStack, interval: Interval, concurrency: int, output_len: int
) -> Row:
    """The row of one load; its columns about the device describe the simulated one."""
    asking = Asking(
        "completions",
        True,
        0.0,
        None,
        True,
        _TIMEOUT_S,
        stream_interval=None if interval == "auto" else interval,
    )
    problems: dict[str, str] = {}
    requests = random_requests(
        _WAVES * concurrency,
        input_len=_INPUT_LEN,
        output_len=output_len,
        range_ratio=_SPREAD,
        vocab_size=1000,
        random=np.random.default_rng(concurrency),
    )
    async with _target(stack, asking, problems) as target:
        await target.settle(requests[0])
        asks = [target.prepared(request) for request in requests]
        with CpuSamples({**stack.pids, CLIENT: os.getpid()}) as samples:
            timelines = await run_load(asks, [0.0] * len(asks), concurrency, lambda _: None)
    if problems:
        name, what = next(iter(problems.items()))
        raise EngineError(Fault("engine", f"a request failed, {name}: {what}"))
    way = "zmq" if stack.http_address is None else "http"
    return _row(way, interval, concurrency, requests, timelines, samples)


@asynccontextmanager
async def _target(
    stack: RunningStack, asking: Asking, problems: dict[str, str]
) -> AsyncIterator[OpenAITarget | NativeTarget]:
    if stack.http_address is None:
        async with AsyncClient(stack.address) as client:
            yield NativeTarget(client, asking, problems)
        return
    http = HttpClient(urlsplit(stack.http_address), {"User-Agent": "slipstream-bench"})
    try:
        yield OpenAITarget(http, await first_model(http), asking, problems)
    finally:
        http.close()


def _row(
    way: str,
    interval: Interval,
    concurrency: int,
    requests: Sequence[DatasetRequest],
    timelines: Sequence[RequestTimeline],
    samples: CpuSamples,
) -> Row:
    span = steady(timelines, concurrency)
    if span is None:
        raise EngineError(Fault("engine", "answers are too short: not all places were ever taken"))
    cpu_s = samples.between(span.begin_s, span.end_s)
    row: Row = {
        "benchmark": "interval",
        "is_simulated": True,
        "transport": way,
        "interval": str(interval),
        "concurrency": concurrency,
        "step_ms": _STEP_MS,
        "num_requests": len(requests),
        "output_tokens_per_s": round(span.tokens_per_s, 1),
        "over_interval_1": None,
        "efficiency": round(span.tokens_per_s * _STEP_MS / 1e3 / concurrency, 4),
        "ttft_median_ms": _percentile(span.ttfts_ms, 50),
        "ttft_p99_ms": _percentile(span.ttfts_ms, 99),
        "itl_median_ms": _percentile(span.gaps_ms, 50),
        "itl_p99_ms": _percentile(span.gaps_ms, 99),
        "tokens_per_delta": round(span.num_tokens / span.num_chunks, 3)
        if span.num_chunks
        else None,
        "window_s": round(span.end_s - span.begin_s, 3),
    }
    for name, seconds in cpu_s.items():
        row[f"{name}_cpu_us_per_token"] = round(1e6 * seconds / span.num_tokens, 3)
    return row


def _compare(rows: Sequence[Row]) -> None:
    """Add throughput relative to interval 1 under the same load."""
    base = {
        (row["transport"], row["concurrency"]): float(row["output_tokens_per_s"] or 0)
        for row in rows
        if row["interval"] == "1"
    }
    for row in rows:
        first = base.get((row["transport"], row["concurrency"]))
        if first:
            row["over_interval_1"] = round(float(row["output_tokens_per_s"] or 0) / first, 3)


def _draw(rows: Sequence[Row], form: IntervalForm, file: str, way: str) -> None:
    found = {
        (row["concurrency"], row["interval"]): float(row["output_tokens_per_s"] or 0)
        for row in rows
    }
    grouped_bars(
        file,
        [str(interval) for interval in form.intervals],
        {
            f"{concurrency} at a time": [
                found.get((concurrency, str(interval))) for interval in form.intervals
            ]
            for concurrency in form.concurrencies
        },
        title=f"Throughput by stream interval over {way} (simulated device, {_STEP_MS:g} ms steps)",
        x_label="stream interval, tokens",
        y_label="output tokens a second",
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
