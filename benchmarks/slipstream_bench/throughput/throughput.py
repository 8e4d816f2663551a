"""`slipstream bench throughput`: many requests at once against a stack, as a client sees them. One
unmeasured request runs first, so that connecting is not measured.
"""

from __future__ import annotations

import argparse
import asyncio

import uvloop

from slipstream.cli.options import access_of, address_of, trace_of
from slipstream.cli.parser import Parser
from slipstream.client.async_client import AsyncClient
from slipstream.errors import wrong_option
from slipstream_bench.common.load.random_load import (
    Prompt,
    RandomLoad,
    Size,
    add_random_load,
    fill_in,
    row_of,
    tell,
)
from slipstream_bench.common.measures import RequestTimeline, Row, summary
from slipstream_ipc.messages import ModelCard

_SIZES = (
    Size("num_requests", "how many", 64, 8),
    Size("input_len", "tokens of a prompt", 128, 16),
    Size("output_len", "tokens of an answer", 128, 16),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    load = add_random_load(parser, _SIZES)
    load.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at a time; default: all at once"
    )
    parser.set_defaults(run=throughput)


def throughput(arguments: argparse.Namespace) -> int:
    """Run the load and report. Raises: BadRequestError."""
    fill_in(arguments, _SIZES)
    if arguments.concurrency is None:
        arguments.concurrency = arguments.num_requests
    if arguments.concurrency < 1:
        raise wrong_option("concurrency", arguments.concurrency, "an integer >= 1")
    with address_of(arguments) as address:
        card, timelines = uvloop.run(_measure(address, arguments))
    row: Row = {
        **row_of("throughput", card, arguments, _SIZES),
        "concurrency": arguments.concurrency,
        **summary(timelines),
    }
    tell(row, _lines(row), arguments.json)
    return 0


async def _measure(
    address: str, arguments: argparse.Namespace
) -> tuple[ModelCard, list[RequestTimeline]]:
    async with AsyncClient(address, trace=trace_of(arguments), **access_of(arguments)) as client:
        load = RandomLoad(client, arguments)
        warm_up, *prompts = load.prompts(arguments.num_requests + 1)
        places = asyncio.Semaphore(arguments.concurrency)

        async def one(prompt: Prompt) -> RequestTimeline:
            async with places:
                return await load.run(prompt)

        await load.run(warm_up)
        return client.model, await asyncio.gather(*map(one, prompts))


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
