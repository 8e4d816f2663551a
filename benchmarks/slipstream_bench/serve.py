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
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import numpy as np
import uvloop
from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.load.datasets import DatasetRequest, random_requests, requests_from
from slipstream_bench.common.load.native_target import LoadTarget, open_target
from slipstream_bench.common.load.openai_target import PATHS, LoadRequestOptions
from slipstream_bench.common.load.run_load import poisson_starts, run_load
from slipstream_bench.common.measures import (
    FAILED,
    RequestTimeline,
    Row,
    median_row,
    percentile_name,
    summary,
)
from slipstream_bench.common.options import Option, add, fill_in, integer, many, number
from slipstream_bench.common.process_census import allow_many_files, tree_cpu_s
from slipstream_bench.common.report import check_files, write_json

_DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_REQUESTS = 64
_DEFAULT_INPUT_LEN = 128

_POSITIVE = integer(1)
_LOAD = (
    Option(
        "num_requests",
        _POSITIVE,
        f"of each run; default: {_DEFAULT_REQUESTS}, with --dataset as many as it has",
    ),
    Option(
        "request_rate",
        number(lambda value: value > 0, "requests a second, > 0, or inf", "R"),
        "requests per second, at random (Poisson); inf: all at once",
        math.inf,
    ),
    Option("concurrency", _POSITIVE, "requests at a time, at most; default: any"),
    Option("input_len", _POSITIVE, f"tokens of a prompt; default: {_DEFAULT_INPUT_LEN}"),
    Option("output_len", _POSITIVE, "tokens of an answer", 128),
    Option(
        "range_ratio",
        number(lambda value: 0 <= value < 1, "a number >= 0 and < 1", "R"),
        "lengths are uniform from LEN*(1-R) to LEN*(1+R); default: 0",
    ),
    Option(
        "vocab_size",
        integer(2),
        "token ids of prompts are below this; default: 1000, with --address the model's",
    ),
    Option("warmup", integer(0), "requests before the runs", 1),
    Option("seed", integer(0), "of prompts and arrivals", 0),
)
_ANSWERS = (
    Option(
        "temperature",
        number(lambda value: 0 <= value < math.inf, "a number >= 0"),
        "0: greedy",
        0.0,
    ),
    Option("logprobs", integer(0), "log-probabilities of the most likely tokens; default: none"),
    Option(
        "timeout",
        number(lambda value: value > 0, "seconds, > 0"),
        "seconds until an answer counts as failed",
        600.0,
    ),
)
_REPORT = (
    Option("runs", _POSITIVE, "the report has their medians", 1),
    Option(
        "percentiles",
        many(number(lambda value: 0 < value < 100, "a number > 0 and < 100", "P")),
        "of the latencies, besides mean and median",
        (99.0,),
    ),
)
_DEFAULT_VOCAB_SIZE = 1000  # any model has that many
_BUSY_PERCENT = 80.0
_SPREADS = (
    ("TTFT, to the first chunk", "ttft", "ms"),
    ("TPOT, a further token", "tpot", "ms"),
    ("ITL, between chunks", "itl", "ms"),
    ("E2E, to the end", "e2e", "s"),
)
_COUNTED = {
    "tokens": "tokens were seen one by one",
    "usage": "tokens as the server counts them (usage)",
    "requested": "tokens as asked for (the server sends no usage)",
    "chunks": "a chunk taken for a token (no usage, ended early)",
}


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    server = parser.add_argument_group("server")
    server.add_argument("--url", metavar="URL", help=f"default: {_DEFAULT_URL}")
    server.add_argument(
        "--address", help="a stack's (ipc://...), which is then asked by its own protocol, not HTTP"
    )
    server.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    server.add_argument("--api-key", metavar="KEY", help="sent as the bearer token")
    server.add_argument(
        "--pid", type=int, metavar="N", help="a server on this machine, whose CPU time is wanted"
    )
    load = parser.add_argument_group("load")
    add(load, _LOAD)
    load.add_argument(
        "--dataset",
        metavar="FILE",
        help='JSON lines of {"prompt": text or ids, "max_tokens": n}, or ShareGPT\'s; '
        "default: random prompts",
    )
    answers = parser.add_argument_group("answers")
    add(answers, _ANSWERS)
    for name, meaning in (
        ("ignore-eos", "go on where the model would end"),
        ("stream", "read answers as they come"),
    ):
        answers.add_argument(
            f"--{name}",
            action=argparse.BooleanOptionalAction,
            default=True,
            help=f"{meaning}; default: yes",
        )
    report = parser.add_argument_group("report")
    add(report, _REPORT)
    report.add_argument(
        "--json", metavar="FILE", help="write the rows there, a list of objects: runs, then medians"
    )
    parser.set_defaults(run=bench_serve)


def checked(arguments: argparse.Namespace) -> None:
    """Validate the options and set those that depend on others. Raises: BadRequestError."""
    check_files(arguments)
    fill_in(arguments, (*_LOAD, *_ANSWERS, *_REPORT))
    if arguments.address is not None:
        _check_nothing(arguments, ("url", "model", "api_key"), "--address")
    else:
        arguments.url = (arguments.url or _DEFAULT_URL).rstrip("/")
        _check_url(arguments.url)
    if arguments.dataset is None:
        arguments.num_requests = arguments.num_requests or _DEFAULT_REQUESTS
        arguments.input_len = arguments.input_len or _DEFAULT_INPUT_LEN
    else:
        _check_nothing(arguments, ("input_len", "range_ratio", "vocab_size"), "--dataset")


def _check_nothing(arguments: argparse.Namespace, names: Sequence[str], other: str) -> None:
    for name in names:
        if (value := getattr(arguments, name)) is not None:
            raise wrong_option(name, value, f"nothing where {other} is given")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and parts.port != 0  # reading the port may raise, too
    except ValueError:
        is_url = False
    if not is_url:
        raise wrong_option("url", url, "http://HOST:PORT or https://HOST:PORT")


def bench_serve(arguments: argparse.Namespace) -> int:
    """Run the load and report; exit code 1 where a run had no request answered."""
    checked(arguments)
    allow_many_files()
    rows, problems = uvloop.run(_measure(arguments))
    if len(rows) > 1:
        rows.append(median_row(rows) | {"run": "median"})
        speeds = ", ".join(str(row["output_tokens_per_s"]) for row in rows[:-1])
        print(f"medians of {arguments.runs} runs (output tokens a second: {speeds})")
    print("\n".join(report(rows[-1], arguments.percentiles, problems)), flush=True)
    is_done = all(row["completed_requests"] for row in rows)  # else a median leaves one out
    if is_done and float(rows[-1]["client_cpu_percent"] or 0) > _BUSY_PERCENT:
        print("slipstream bench: the client was the bottleneck, or near to it", file=sys.stderr)
    if arguments.json is not None:
        write_json(rows, arguments.json)
    return 0 if is_done else 1


async def _measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """A row per run, and the message of the first failure of each kind."""
    request_options = LoadRequestOptions(
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
    headers = {"Accept": "*/*"}
    if arguments.api_key is not None:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    url = (arguments.url or "").rstrip("/").removesuffix("/v1")
    async with open_target(
        request_options, address=arguments.address, url=url, model=arguments.model, headers=headers
    ) as target:
        vocab_size = target.vocab_size or _DEFAULT_VOCAB_SIZE
        arguments.vocab_size = arguments.vocab_size or vocab_size
        samples = (filed or _random(arguments, 0, arguments.warmup or 1))[: arguments.warmup or 1]
        await target.probe(next((one for one in samples if not one.is_text), samples[0]))
        if arguments.warmup:
            await _run(target, samples, arguments, 0)
            target.problems.clear()
        rows = []
        for run in range(1, arguments.runs + 1):
            requests = filed or _random(arguments, run, arguments.num_requests)
            measured = await _run(target, requests, arguments, run)
            rows.append(_settings_of(arguments, target, run, requests) | measured)
        return rows, target.problems


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
    target: LoadTarget,
    requests: Sequence[DatasetRequest],
    arguments: argparse.Namespace,
    run: int,
) -> Row:
    """Run the load once; returns its row."""
    sends = [target.prepared(request) for request in requests]
    random = np.random.default_rng((arguments.seed, run, 1))
    starts_s = poisson_starts(len(sends), arguments.request_rate, random)
    name = f"run {run} of {arguments.runs}" if run else "warm-up"
    with tqdm(total=len(sends), desc=name, unit="request", disable=None, leave=False) as bar:

        def on_done(_timeline: RequestTimeline) -> None:
            bar.update()

        gc.collect()
        gc.disable()  # avoids pauses; a run leaves few cycles
        server_s = tree_cpu_s(arguments.pid) if arguments.pid is not None else None
        client_s, begin = time.process_time(), time.perf_counter()
        try:
            timelines = await run_load(sends, starts_s, arguments.concurrency, on_done)
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


def _settings_of(
    arguments: argparse.Namespace,
    target: LoadTarget,
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


def report(row: Row, percentiles: Sequence[float], problems: Mapping[str, str]) -> list[str]:
    """The lines of the report. problems: the message of the first failure of each kind."""
    columns = ["mean", "median", *map(percentile_name, percentiles)]
    lines = [
        "{model} at {target}".format_map(row),
        _load(row),
        _line("duration", row["duration_s"], "s"),
        _line("requests", row["requests_per_s"], "/s"),
        _line("output tokens", row["output_tokens_per_s"], "/s"),
        _line("total tokens", row["total_tokens_per_s"], "/s"),
        _line("", *columns, ""),
        *(
            _line(meaning, *(row[f"{name}_{column}_{unit}"] for column in columns), unit)
            for meaning, name, unit in _SPREADS
        ),
        _line("chunks per token", row["chunks_per_token"], ""),
        *(
            _line(
                f"{side} CPU",
                f"{per_token:.2f}",
                f"us/token, {row[f'{side}_cpu_percent']} % of a core",
            )
            for side in ("client", "server")
            if (per_token := row.get(f"{side}_cpu_us_per_token")) is not None
        ),
    ]
    if (counted := row["tokens_counted_by"]) is not None:
        lines.append("; ".join(_COUNTED[one] for one in str(counted).split("+")))
    if row[f"{FAILED}requests"]:
        lines.append(f"failed requests, in none of the numbers: {row[f'{FAILED}requests']}")
    for name, count in row.items():
        if name.startswith(FAILED) and name != f"{FAILED}requests":
            reason = name.removeprefix(FAILED)
            example = f"; the first: {problems[reason][:200]}" if problems.get(reason) else ""
            lines.append(f"  {reason}: {count}{example}")
    return lines


def _load(row: Row) -> str:
    rate, places = row["request_rate"], row["concurrency"]
    parts = [f"{row['num_requests']} requests"]
    if rate is not None:
        parts.append(f"{rate} a second (Poisson)")
    if places is not None:
        parts.append(f"{places} at a time")
    elif rate is None:
        parts.append("all at once")
    if row["dataset"] is not None:
        parts.append(f"of {row['dataset']}")
    else:
        spread = f" +-{100 * float(row['range_ratio'] or 0):g} %" if row["range_ratio"] else ""
        parts.append(f"{row['input_len']} + {row['output_len']} tokens{spread}")
    form = "token ids" if row["prompt_form"] == "token_ids" else "text prompts"
    parts += [form, "streamed" if row["is_streamed"] else "not streamed"]
    return ", ".join(parts)


def _line(name: str, *cells: object) -> str:
    *values, unit = map(_shown, cells)
    return f"{name:<26}{''.join(f'{value:>12}' for value in values)} {unit}".rstrip()


def _shown(cell: object) -> str:
    """Floats with five digits, or more if the integer part needs them."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    num_whole = len(str(int(abs(cell)))) if abs(cell) >= 1 else 0
    return f"{cell:.{max(0, 5 - max(1, num_whole))}f}"
