"""`slipstream bench serve`: a server under load, as its clients see it. It measures any
OpenAI-compatible server over HTTP, and a Slipstream stack over its native address, with the same
load and the same report.

- The load is the same for the same --seed; every run has different prompts, so that none is
  answered from a cache filled by an earlier run. Files give every run the same prompts.
- The client's own CPU use is reported: a load generator that needs a whole core measures itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop
from tqdm import tqdm

from slipstream.cli.parser import Parser
from slipstream.client.async_client import AsyncClient
from slipstream.errors import wrong_option
from slipstream_bench.common.load.datasets import DatasetRequest, random_requests, requests_from
from slipstream_bench.common.load.http_stream import HttpClient
from slipstream_bench.common.load.native_target import NativeTarget
from slipstream_bench.common.load.openai_target import PATHS, Asking, OpenAITarget, first_model
from slipstream_bench.common.load.run_load import poisson_starts, run_load
from slipstream_bench.common.measures import RequestTimeline, Row, median_row, summary
from slipstream_bench.common.open_files import allow_many_files
from slipstream_bench.common.process_cpu import tree_cpu_s
from slipstream_bench.serve.serve_options import add_serve_options, checked
from slipstream_bench.serve.serve_report import report

_DEFAULT_VOCAB_SIZE = 1000  # any model has that many
_BUSY_PERCENT = 80.0


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add_serve_options(parser)
    parser.set_defaults(run=bench_serve)


def bench_serve(arguments: argparse.Namespace) -> int:
    """Run the load and report; exit code 1 if no request was answered."""
    checked(arguments)
    allow_many_files()
    problems: dict[str, str] = {}
    rows = uvloop.run(_measure(arguments, problems))
    if len(rows) > 1:
        rows.append(median_row(rows) | {"run": "median"})
        speeds = ", ".join(str(row["output_tokens_per_s"]) for row in rows[:-1])
        print(f"medians of {arguments.runs} runs (output tokens a second: {speeds})")
    print("\n".join(report(rows[-1], arguments.percentiles, problems)), flush=True)
    is_done = bool(rows[-1]["completed_requests"])
    if is_done and float(rows[-1]["client_cpu_percent"] or 0) > _BUSY_PERCENT:
        print("slipstream bench: the client was the bottleneck, or near to it", file=sys.stderr)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if is_done else 1


async def _measure(arguments: argparse.Namespace, problems: dict[str, str]) -> list[Row]:
    asking = Asking(
        endpoint=arguments.endpoint,
        is_streamed=arguments.stream,
        temperature=arguments.temperature,
        logprobs=arguments.logprobs,
        ignore_eos=arguments.ignore_eos,
        timeout_s=arguments.timeout,
    )
    if arguments.pid is not None:
        tree_cpu_s(arguments.pid)  # rejects an invalid pid early
    filed = _filed(arguments)
    async with _target(arguments, asking, problems) as target:
        samples = (filed or _random(arguments, 0, arguments.warmup or 1))[: arguments.warmup or 1]
        await target.settle(next((one for one in samples if not one.is_text), samples[0]))
        if arguments.warmup:
            await _run(target, samples, arguments, 0)
            problems.clear()
        rows = []
        for run in range(1, arguments.runs + 1):
            requests = filed or _random(arguments, run, arguments.num_requests)
            measured = await _run(target, requests, arguments, run)
            rows.append(_told(arguments, target, run, requests) | measured)
        return rows


@asynccontextmanager
async def _target(
    arguments: argparse.Namespace, asking: Asking, problems: dict[str, str]
) -> AsyncIterator[OpenAITarget | NativeTarget]:
    if arguments.address is not None:
        async with AsyncClient(arguments.address) as client:
            arguments.vocab_size = arguments.vocab_size or client.model.vocab_size
            yield NativeTarget(client, asking, problems)
        return
    headers = {"User-Agent": "slipstream-bench", "Accept": "*/*"}
    if arguments.api_key is not None:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    http = HttpClient(urlsplit(arguments.url.rstrip("/").removesuffix("/v1")), headers)
    arguments.vocab_size = arguments.vocab_size or _DEFAULT_VOCAB_SIZE
    try:
        model = arguments.model or await first_model(http)
        yield OpenAITarget(http, model, asking, problems)
    finally:
        http.close()


def _filed(arguments: argparse.Namespace) -> list[DatasetRequest]:
    """The requests of the file; empty without one. Raises: BadRequestError."""
    if arguments.dataset is None:
        return []
    requests = requests_from(arguments.dataset, arguments.num_requests, arguments.output_len)
    if arguments.endpoint == "chat" and not all(one.is_text for one in requests):
        raise wrong_option("dataset", "token ids", "text, for chat")
    return requests


def _random(arguments: argparse.Namespace, run: int, number: int) -> list[DatasetRequest]:
    """The requests of a run; run 0 is the warm-up."""
    return random_requests(
        number,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        range_ratio=arguments.range_ratio or 0.0,
        vocab_size=arguments.vocab_size,
        random=np.random.default_rng((arguments.seed, run)),
    )


async def _run(
    target: OpenAITarget | NativeTarget,
    requests: Sequence[DatasetRequest],
    arguments: argparse.Namespace,
    run: int,
) -> Row:
    """Run the load once; returns its row."""
    asks = [target.prepared(request) for request in requests]
    random = np.random.default_rng((arguments.seed, run, 1))
    starts_s = poisson_starts(len(asks), arguments.request_rate, random)
    name = f"run {run} of {arguments.runs}" if run else "warm-up"
    with tqdm(total=len(asks), desc=name, unit="request", disable=None, leave=False) as bar:

        def on_done(_timeline: RequestTimeline) -> None:
            bar.update()

        gc.collect()
        gc.disable()  # avoids pauses; a run leaves few cycles
        server_s = tree_cpu_s(arguments.pid) if arguments.pid is not None else None
        client_s, begin = time.process_time(), time.perf_counter()
        try:
            timelines = await run_load(asks, starts_s, arguments.concurrency, on_done)
        finally:
            gc.enable()
        client_s, wall_s = time.process_time() - client_s, time.perf_counter() - begin
        if server_s is not None:
            server_s = tree_cpu_s(arguments.pid) - server_s
    row = summary(timelines, arguments.percentiles)
    num_tokens = sum(timeline.num_tokens for timeline in timelines if timeline.failure is None)
    return (
        row
        | _cpu("client", client_s, wall_s, num_tokens)
        | _cpu("server", server_s, wall_s, num_tokens)
    )


def _cpu(side: str, cpu_s: float | None, wall_s: float, num_tokens: int) -> Row:
    row: Row = {f"{side}_cpu_us_per_token": None, f"{side}_cpu_percent": None}
    if cpu_s is not None:
        row[f"{side}_cpu_percent"] = round(100 * cpu_s / wall_s, 1)
        if num_tokens:
            row[f"{side}_cpu_us_per_token"] = round(1e6 * cpu_s / num_tokens, 2)
    return row


def _told(
    arguments: argparse.Namespace,
    target: OpenAITarget | NativeTarget,
    run: int,
    requests: Sequence[DatasetRequest],
) -> Row:
    """The columns that describe the measurement and its settings."""
    is_random = arguments.dataset is None
    has_ids = not target.has_words and not all(request.is_text for request in requests)
    return {
        "benchmark": "serve",
        "run": run,
        "model": target.model,
        "target": arguments.address or arguments.url + PATHS[arguments.endpoint],
        "endpoint": arguments.endpoint,
        "prompt_form": "token_ids" if has_ids else "text",
        "is_streamed": arguments.stream,
        "num_requests": len(requests),
        "request_rate": None if math.isinf(arguments.request_rate) else arguments.request_rate,
        "concurrency": arguments.concurrency,
        "dataset": arguments.dataset,
        "input_len": arguments.input_len if is_random else None,
        "output_len": arguments.output_len,
        "range_ratio": (arguments.range_ratio or 0.0) if is_random else None,
        "temperature": arguments.temperature,
        "logprobs": arguments.logprobs,
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        "num_cpus": os.cpu_count(),
    }
