"""`slipstream bench interval`: what a stream interval of n tokens gains, and what "auto" does.

`concurrency` requests run at a time, each followed by another when it ends, against an ordinary
stack; by `AsyncClient`, or with --http over the OpenAI-compatible front by the load
generator of `bench serve`. The client is this process, on the same cores. Fixed intervals are set
by the requests (`stream_interval`) on a server without one; "auto" is the server's default.

All numbers are those of the span in which all places are taken (`steady`): output tokens per
second, TTFT of the requests that start in it, gaps between two deltas of a stream, tokens per
delta, and CPU time per token of each process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import uvloop
from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.load.datasets import DatasetRequest, random_requests
from slipstream_bench.common.load.native_target import open_target, run_at_once
from slipstream_bench.common.load.openai_target import LoadRequestOptions
from slipstream_bench.common.measures import RequestTimeline, cannot_measure, steady
from slipstream_bench.common.options import Option, OptionType, add, fill_in, integer, many
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.process_census import CpuSamples
from slipstream_bench.common.report import Row, add_common, check_common, median_rows, print_rows
from slipstream_lab.common.simulated_stack import (
    RunningStack,
    Simulated,
    product,
    simulation_note,
)

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


_INTERVAL = OptionType(
    lambda text: "auto" if text == "auto" else int(text),
    lambda value: value == "auto" or 1 <= value <= 1000,
    "an integer in [1, 1000], or auto",
    "N",
)


class IntervalPlan(NamedTuple):
    """What is measured."""

    intervals: tuple[Interval, ...]
    concurrencies: tuple[int, ...]
    output_len: int  # mean tokens of an answer


_OPTIONS = (
    Option("intervals", many(_INTERVAL), "tokens, or auto", (1, 2, 5, 10, "auto"), (1, 10, "auto")),
    Option(
        "concurrencies", many(integer(1, 4096)), "requests at a time", (64, 256, 1024), (64, 256)
    ),
    Option("output_len", integer(8, 3000), "tokens of an answer, in the mean", 256, 80),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("load")
    group.add_argument("--http", action="store_true", help="over HTTP, not by AsyncClient")
    add(group, _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_interval)


def bench_interval(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    plan = IntervalPlan(**fill_in(arguments, _OPTIONS))
    note = simulation_note()
    rows = median_rows(_measured(plan, arguments), _BY)
    _compare(rows)
    way = "HTTP" if arguments.http else "AsyncClient"
    print(
        f"{note} Steps of {_STEP_MS:g} ms, {_INPUT_LEN} + {plan.output_len} tokens (+-"
        f"{100 * _SPREAD:g} %), over {way}, medians of {arguments.runs}."
    )
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, plan, arguments.png, way)
    return 0


def _measured(plan: IntervalPlan, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    total = arguments.runs * len(plan.intervals) * len(plan.concurrencies)
    fixed = tuple(interval for interval in plan.intervals if interval != "auto")
    kinds: list[tuple[Interval, tuple[Interval, ...]]] = [(1, fixed)] if fixed else []
    if "auto" in plan.intervals:
        kinds.append(("auto", ("auto",)))
    with tqdm(total=total, unit="load", disable=None, leave=False) as bar:
        for _ in range(arguments.runs):
            for of_server, intervals in kinds:
                simulated = Simulated(_STEP_MS, max(plan.concurrencies), stream_interval=of_server)
                with product(simulated, **({"http_port": 0} if arguments.http else {})) as stack:
                    for concurrency in plan.concurrencies:
                        for interval in intervals:
                            load = measure_load(stack, interval, concurrency, plan.output_len)
                            rows.append(uvloop.run(load))
                            bar.update()
    return rows


async def measure_load(
    stack: RunningStack, interval: Interval, concurrency: int, output_len: int
) -> Row:
    """The row of one load; its columns about the device describe the simulated one."""
    request_options = LoadRequestOptions(
        "completions",
        True,
        0.0,
        None,
        True,
        _TIMEOUT_S,
        stream_interval=None if interval == "auto" else interval,
    )
    requests = random_requests(
        _WAVES * concurrency,
        input_len=_INPUT_LEN,
        output_len=output_len,
        range_ratio=_SPREAD,
        vocab_size=1000,
        random=np.random.default_rng(concurrency),
    )
    address = stack.address if stack.http_address is None else None
    async with open_target(
        request_options, address=address, url=stack.http_address or ""
    ) as target:
        await target.probe(requests[0])
        timelines, samples = await run_at_once(target, requests, concurrency, stack.pids)
    way = "zmq" if stack.http_address is None else "http"
    return _row(way, interval, concurrency, requests, timelines, samples)


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
        raise cannot_measure("answers are too short: not all places were ever taken")
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


def _draw(rows: Sequence[Row], plan: IntervalPlan, file: str, way: str) -> None:
    found = {
        (row["concurrency"], row["interval"]): float(row["output_tokens_per_s"] or 0)
        for row in rows
    }
    grouped_bars(
        file,
        [str(interval) for interval in plan.intervals],
        {
            f"{concurrency} at a time": [
                found.get((concurrency, str(interval))) for interval in plan.intervals
            ]
            for concurrency in plan.concurrencies
        },
        title=f"Throughput by stream interval over {way} (simulated device, {_STEP_MS:g} ms steps)",
        x_label="stream interval, tokens",
        y_label="output tokens a second",
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
