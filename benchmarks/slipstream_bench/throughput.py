"""`slipstream bench throughput`: many requests at once against a stack, as a client sees them. One
unmeasured request runs first, so that connecting is not measured.
"""

from __future__ import annotations

import argparse
from functools import partial

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
from slipstream_bench.common.load.run_load import run_load
from slipstream_bench.common.measures import RequestTimeline, Row, summary
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_ipc.messages import ModelCard

_SIZES = (
    Option("num_requests", integer(1), "how many", 64, 8),
    Option("input_len", integer(1), "tokens of a prompt", 128, 16),
    Option("output_len", integer(1), "tokens of an answer", 128, 16),
)


_CONCURRENCY = Option("concurrency", integer(1), "requests at a time; default: all at once")


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(add_random_load(parser, _SIZES), (_CONCURRENCY,))
    parser.set_defaults(run=throughput)


def throughput(arguments: argparse.Namespace) -> int:
    """Run the load and report. Raises: BadRequestError."""
    fill_in(arguments, (*_SIZES, _CONCURRENCY))
    arguments.concurrency = arguments.concurrency or arguments.num_requests
    with address_of(arguments) as address:
        card, timelines = uvloop.run(_measure(address, arguments))
    row: Row = {
        **row_of("throughput", card, arguments, _SIZES),
        "concurrency": arguments.concurrency,
        **summary(timelines),
    }
    print_lines(row, _lines(row), arguments.json)
    return 0


async def _measure(
    address: str, arguments: argparse.Namespace
) -> tuple[ModelCard, list[RequestTimeline]]:
    async with AsyncClient(address, trace=trace_of(arguments), **access_of(arguments)) as client:
        load = RandomLoad(client, arguments)
        warm_up, *prompts = load.prompts(arguments.num_requests + 1)
        await load.run(warm_up)
        sends = [partial(load.run, prompt) for prompt in prompts]
        starts_s = [0.0] * len(sends)
        timelines = await run_load(sends, starts_s, arguments.concurrency, lambda _: None)
        return client.model, timelines


def _lines(row: Row) -> list[str]:
    def line(name: str, *values: object) -> str:
        return f"{name:<22}" + "".join(f"{value!s:>12}" for value in values)

    load = "{num_requests} requests, {concurrency} at a time, {input_len} + {output_len} tokens"
    lines = [
        load.format_map(row),
        line("duration", row["duration_s"], "s"),
        line("requests", row["requests_per_s"], "/s"),
        line("output tokens", row["output_tokens_per_s"], "/s"),
        line("", "mean", "median", "p99", ""),
    ]
    for name, meaning in (
        ("ttft", "first token"),
        ("tpot", "per further token"),
        ("itl", "between deltas"),
    ):
        spread = (row[f"{name}_{which}_ms"] for which in ("mean", "median", "p99"))
        lines.append(line(meaning, *("-" if value is None else value for value in spread), "ms"))
    return lines
