"""`slipstream bench throughput`: many requests at once against a stack, as a client sees them.

Owns: the load, and how it is told. The load is random prompts of one length and outputs of one
length (ends of sequence are ignored), the same for the same --seed; one request goes ahead of
them, unmeasured, so that connecting is not part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import uvloop
from msgspec import structs

from slipstream.async_client import AsyncClient
from slipstream.bench.measures import Row, Timeline, summary
from slipstream.bench.variants import VARIANTS, params_of
from slipstream.options import (
    Parser,
    access_of,
    add_connection,
    add_settings,
    address_of,
    trace_of,
)
from slipstream.plan import SIMULATED
from slipstream.settings import wrong_option
from slipstream_ipc.messages import ModelCard

_FULL = {"num_requests": 64, "input_len": 128, "output_len": 128}
_QUICK = {"num_requests": 8, "input_len": 16, "output_len": 16}
_NOTE = "The model is simulated: time passes, nothing is computed. This is no model's speed."


def add_throughput(parser: Parser) -> None:
    """The benchmark's options."""
    add_settings(parser)
    load = parser.add_argument_group("load")
    for name, meaning in (
        ("num_requests", "how many"),
        ("input_len", "tokens of a prompt"),
        ("output_len", "tokens of an answer"),
    ):
        load.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"{meaning}; default: {_FULL[name]}, with --quick {_QUICK[name]}",
        )
    load.add_argument(
        "--concurrency", type=int, metavar="N", help="requests at a time; default: all at once"
    )
    load.add_argument(
        "--variant",
        choices=VARIANTS,
        default="plain",
        help="stop2: two stop strings that never occur; logprobs5: of the five likeliest tokens; "
        "interval10: a delta for ten tokens; default: plain",
    )
    load.add_argument("--temperature", type=float, default=1.0, metavar="X", help="default: 1")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts; default: 0")
    load.add_argument("--quick", action="store_true", help="a load that takes seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, a list of objects")
    add_connection(parser)
    parser.set_defaults(run=throughput)


def throughput(arguments: argparse.Namespace) -> int:
    """Run the load, tell the result."""
    for name, default in (_QUICK if arguments.quick else _FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        if getattr(arguments, name) < 1:
            raise wrong_option(name, getattr(arguments, name), "an integer >= 1")
    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise wrong_option("concurrency", arguments.concurrency, "an integer >= 1")
    with address_of(arguments) as address:
        card, timelines = uvloop.run(_measure(address, arguments))
    row: Row = {
        "benchmark": "throughput",
        "model": card.name,
        "is_simulated": card.name.startswith(SIMULATED),
        "num_requests": arguments.num_requests,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "variant": arguments.variant,
        "concurrency": arguments.concurrency or arguments.num_requests,
        "num_cpus": os.cpu_count(),
        **summary(timelines),
    }
    _print(row)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps([row], indent=2) + "\n")
    return 0


async def _measure(address: str, arguments: argparse.Namespace) -> tuple[ModelCard, list[Timeline]]:
    async with AsyncClient(address, trace=trace_of(arguments), **access_of(arguments)) as client:
        card = await client.connect()
        length = arguments.input_len + arguments.output_len
        if length > card.max_model_len:
            allowed = f"together at most max_model_len, {card.max_model_len}"
            raise wrong_option("input_len + output_len", length, allowed)
        random = np.random.default_rng(arguments.seed)
        shape = (arguments.num_requests + 1, arguments.input_len)
        warm_up, *prompts = random.integers(0, card.vocab_size, shape, np.uint32)
        params = structs.replace(
            params_of(arguments.variant, arguments.output_len),
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        places = asyncio.Semaphore(arguments.concurrency or arguments.num_requests)

        async def one(prompt: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> Timeline:
            async with places:
                timeline = Timeline(time.perf_counter(), len(prompt))
                async for delta in client.stream(prompt, params):
                    if delta.num_tokens:
                        timeline.note(time.perf_counter(), delta.num_tokens)
                return timeline

        await one(warm_up)
        return card, await asyncio.gather(*(one(prompt) for prompt in prompts))


def _print(row: Row) -> None:
    def line(name: str, *values: object) -> None:
        print(f"{name:<22}" + "".join(f"{value!s:>12}" for value in values))

    print(f"model: {row['model']}")
    if row["is_simulated"]:
        print(_NOTE)
    load = "{num_requests} requests, {concurrency} at a time, {input_len} + {output_len} tokens"
    print(load.format_map(row))
    line("duration", row["duration_s"], "s")
    line("requests", row["requests_per_s"], "/s")
    line("output tokens", row["output_tokens_per_s"], "/s")
    line("", "mean", "median", "p99", "")
    for name, meaning in (
        ("ttft", "first token"),
        ("tpot", "per further token"),
        ("itl", "between deltas"),
    ):
        spread = (row[f"{name}_{which}_ms"] for which in ("mean", "median", "p99"))
        line(meaning, *("-" if value is None else value for value in spread), "ms")
    sys.stdout.flush()
