"""`slipstream bench latency`: the duration of one batch of requests, as a client sees it. Names and
defaults are those of `vllm bench latency`.

A batch is submitted at once and ends with its last answer; then the next one begins. Every batch
has different prompts, so that none is answered from a cache. Times to first token and between
deltas come from the same batches.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

import numpy as np
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream.cli.server_choice import access_of, address_of, trace_of
from slipstream.client.async_client import AsyncClient
from slipstream_bench.common.load.random_load import (
    RandomLoad,
    add_random_load,
    print_lines,
    row_of,
)
from slipstream_bench.common.measures import RequestTimeline, Row, percentile_name, summary
from slipstream_bench.common.options import Option, fill_in, integer
from slipstream_ipc.messages import ModelCard

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
_SIZES = (
    Option("batch_size", integer(1), "requests at once", 8),
    Option("input_len", integer(1), "tokens of a prompt", 32),
    Option("output_len", integer(1), "tokens of an answer", 128, 16),
    Option("num_iters", integer(1), "batches", 30, 5),
    Option("num_iters_warmup", integer(0), "batches before them, not measured", 10, 1),
)
_SPREADS = (
    ("a batch", "latency", "s"),
    ("first token", "ttft", "ms"),
    ("between deltas", "itl", "ms"),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add_random_load(parser, _SIZES)
    parser.set_defaults(run=bench_latency)


def bench_latency(arguments: argparse.Namespace) -> int:
    """Run the batches and report. Raises: BadRequestError."""
    fill_in(arguments, _SIZES)
    with address_of(arguments) as address:
        card, seconds, timelines = uvloop.run(_measure(address, arguments))
    row: Row = {
        **row_of("latency", card, arguments, _SIZES),
        **_spread(seconds),
        **{
            name: value
            for name, value in summary(timelines, PERCENTILES).items()
            if name.startswith(("ttft_", "itl_")) and "_median_" not in name
        },
    }
    print_lines(row, _lines(row), arguments.json)
    return 0


async def _measure(
    address: str, arguments: argparse.Namespace
) -> tuple[ModelCard, list[float], list[RequestTimeline]]:
    """The model, the duration of each measured batch in seconds, and the requests' timelines."""
    async with AsyncClient(address, trace=trace_of(arguments), **access_of(arguments)) as client:
        load = RandomLoad(client, arguments)
        seconds: list[float] = []
        timelines: list[RequestTimeline] = []
        for number in range(-arguments.num_iters_warmup, arguments.num_iters):
            prompts = load.prompts(arguments.batch_size)
            gc.collect()
            begin_s = time.perf_counter()
            found = await asyncio.gather(*map(load.run, prompts))
            if number >= 0:
                seconds.append(time.perf_counter() - begin_s)
                timelines += found
        return client.model, seconds, timelines


def _spread(seconds: list[float]) -> Row:
    values = [float(np.mean(seconds)), *np.percentile(seconds, PERCENTILES).tolist()]
    names = ["mean", *map(percentile_name, PERCENTILES)]
    return {f"latency_{name}_s": round(value, 6) for name, value in zip(names, values, strict=True)}


def _lines(row: Row) -> list[str]:
    columns = ["mean", *map(percentile_name, PERCENTILES)]
    load = (
        "{num_iters} batches of {batch_size}, {input_len} + {output_len} tokens, after "
        "{num_iters_warmup} more"
    )
    lines = [load.format_map(row), f"{'':<16}" + "".join(f"{name:>10}" for name in columns)]
    for meaning, name, unit in _SPREADS:
        values = [row[f"{name}_{column}_{unit}"] for column in columns]
        shown = "".join(f"{'-' if value is None else value!s:>10}" for value in values)
        lines.append(f"{meaning:<16}{shown} {unit}")
    return lines
