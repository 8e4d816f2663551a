"""`slipstream bench scale`: throughput of several replicas behind one client, against one alone.

Each replica is a stack of its own over a simulated device, whose steps take 50 ms however many
requests run; all of them and the client, an `AsyncClient` with all addresses, share this machine.
What is lost against n times one replica is lost in placing, in the client, or for want of cores.
Numbers are those of the span in which all requests run (`steady`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.load.datasets import random_requests
from slipstream_bench.common.load.native_target import open_target, run_at_once
from slipstream_bench.common.load.openai_target import LoadRequestOptions
from slipstream_bench.common.measures import Row, cannot_measure, steady
from slipstream_bench.common.options import Option, add, fill_in, integer, many
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_lab.common.simulated_stack import Simulated, product, simulation_note

_STEP_MS = 50.0
_MAX_NUM_SEQS = 256  # of a replica: no request waits for another one
_INPUT_LEN = 16
_SPREAD = 0.25
_WAVES = 2
_TIMEOUT_S = 300.0
_BY = ("replicas",)
_COLUMNS = (
    *(*_BY, "streams", "output_tokens_per_s", "over_n_times_one", "itl_p99_ms"),
    *("client_cpu_us_per_token", "stacks_cpu_us_per_token", "runs"),
)
_OPTIONS = (
    Option("replicas", many(integer(1, 64)), "how many there are", (1, 2, 4, 8), (1, 2)),
    Option("streams", integer(1, 1024), "requests at a time for each replica", 64, 16),
    Option("output_len", integer(8, 3000), "tokens of an answer, in the mean", 128, 40),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("load"), _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_scale)


def bench_scale(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    given = fill_in(arguments, _OPTIONS)
    note = simulation_note()

    def measure(num_replicas: int) -> list[Row]:
        return [measure_scale(num_replicas, given["streams"], given["output_len"])]

    rows = median_rows(in_rounds(arguments.runs, given["replicas"], measure), _BY)
    _compare(rows)
    print(f"{note} Steps of {_STEP_MS:g} ms; medians of {arguments.runs}.")
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def measure_scale(num_replicas: int, num_streams: int, output_len: int) -> Row:
    """The row of one load. num_streams: for each replica."""
    device = Simulated(_STEP_MS, _MAX_NUM_SEQS, stream_interval=1)
    with ExitStack() as stacks:
        running = [stacks.enter_context(product(device)) for _ in range(num_replicas)]
        pids = {
            f"{name}_{number}": pid
            for number, stack in enumerate(running)
            for name, pid in stack.pids.items()
        }
        addresses = ",".join([stack.address for stack in running])
        return uvloop.run(_measure(addresses, pids, num_replicas, num_streams, output_len))


async def _measure(
    addresses: str, pids: dict[str, int], num_replicas: int, num_streams: int, output_len: int
) -> Row:
    request_options = LoadRequestOptions("completions", True, 0.0, None, True, _TIMEOUT_S)
    concurrency = num_replicas * num_streams
    requests = random_requests(
        _WAVES * concurrency,
        input_len=_INPUT_LEN,
        output_len=output_len,
        range_ratio=_SPREAD,
        vocab_size=1000,
        random=np.random.default_rng(concurrency),
    )
    async with open_target(request_options, address=addresses, url="") as target:
        await target.probe(requests[0])
        timelines, samples = await run_at_once(target, requests, concurrency, pids)
    span = steady(timelines, concurrency)
    if span is None:
        raise cannot_measure("answers are too short: not all requests ever ran at once")
    cpu_s = samples.between(span.begin_s, span.end_s)
    of_stacks = sum(seconds for name, seconds in cpu_s.items() if name in pids)
    of_client = sum(cpu_s.values()) - of_stacks
    return {
        "benchmark": "scale",
        "is_simulated": True,
        "replicas": num_replicas,
        "streams": num_streams,
        "step_ms": _STEP_MS,
        "failed_requests": sum(one.failure is not None for one in timelines),
        "output_tokens_per_s": round(span.tokens_per_s, 1),
        "over_n_times_one": None,
        "itl_p99_ms": round(float(np.percentile(span.gaps_ms, 99)), 2) if span.gaps_ms else None,
        "client_cpu_us_per_token": round(1e6 * of_client / span.num_tokens, 2),
        "stacks_cpu_us_per_token": round(1e6 * of_stacks / span.num_tokens, 2),
        "window_s": round(span.end_s - span.begin_s, 3),
    }


def _compare(rows: list[Row]) -> None:
    """Add the throughput relative to n times that of one replica."""
    one = next((float(row["output_tokens_per_s"] or 0) for row in rows if row["replicas"] == 1), 0)
    for row in rows:
        if one:
            ideal = one * int(row["replicas"] or 1)
            row["over_n_times_one"] = round(float(row["output_tokens_per_s"] or 0) / ideal, 3)


def _draw(rows: Sequence[Row], file: str) -> None:
    found = [float(row["output_tokens_per_s"] or 0) for row in rows]
    shares = [row["over_n_times_one"] for row in rows]
    ideal = [
        tokens / float(share) if share else None
        for tokens, share in zip(found, shares, strict=True)
    ]
    series: dict[str, Sequence[float | None]] = {"measured": found}
    if any(ideal):
        series["as many times one alone"] = ideal
    grouped_bars(
        file,
        [str(row["replicas"]) for row in rows],
        series,
        title=f"Throughput of replicas behind one client (simulated, steps of {_STEP_MS:g} ms)",
        x_label="replicas",
        y_label="output tokens/s",
    )
