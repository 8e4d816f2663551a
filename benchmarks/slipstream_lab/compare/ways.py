"""`slipstream bench compare ways`: the same load by the Python client and over HTTP, streamed and
in one piece.

Each way has a stack of its own, of the same settings. Its first run comes right after the start,
before anything has warmed up; the later runs of all ways take turns, to and fro, so that other load
on the machine affects all of them. The load generator shares the cores, and its CPU is shown.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream.stack.stack import Stack
from slipstream_bench.common.live_streams import CLIENT
from slipstream_bench.common.load.datasets import random_requests
from slipstream_bench.common.load.native_target import open_target, run_at_once
from slipstream_bench.common.load.openai_target import LoadRequestOptions
from slipstream_bench.common.measures import Row, median_row, summary
from slipstream_bench.common.options import Option, add, fill_in, integer, number
from slipstream_bench.common.process_census import allow_many_files
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_core.model.random_weights import is_random
from slipstream_lab.compare.small_model import SMALL_MODEL, SMALL_MODEL_HELP, cpu_settings

Way = Literal["python", "http", "http_whole"]
WAYS: tuple[Way, ...] = get_args(Way)

_COLUMNS = (
    "way",
    "output_tokens_per_s",
    "over_python",
    "over_whole",
    "first_over_later",
    "tokens_per_chunk",
    "ttft_median_ms",
    "ttft_p99_ms",
    "client_cores",
    "runs",
)
_ABOUT = """\
python: the AsyncClient, streamed; http: streamed; http_whole: answers in one piece. Medians of the
later runs; first_over_later: the first run after the start, of their tokens a second."""
_OPTIONS = (
    Option("num_requests", integer(1), "of a run", 64, 8),
    Option("concurrency", integer(1), "requests at a time", 64, 8),
    Option("input_len", integer(1), "tokens of a prompt", 128, 16),
    Option("output_len", integer(1), "tokens of an answer", 128, 16),
    Option(
        "range_ratio",
        number(lambda value: 0 <= value < 1, "a number >= 0 and < 1", "R"),
        "lengths are uniform from LEN*(1-R) to LEN*(1+R)",
        0.0,
    ),
)
_TIMEOUT_S = 600.0


class WaysPlan(NamedTuple):
    """What is measured."""

    model: str
    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    range_ratio: float
    runs: int

    @property
    def max_model_len(self) -> int:
        """The longest prompt with the longest answer."""
        return math.ceil((self.input_len + self.output_len) * (1 + self.range_ratio)) + 2


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--model", default=SMALL_MODEL, help=SMALL_MODEL_HELP)
    add(group, _OPTIONS)
    add_common(parser, runs=3)
    parser.set_defaults(run=compare_ways)


def compare_ways(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    plan = WaysPlan(model=arguments.model, **values, runs=arguments.runs)
    allow_many_files()
    rows = with_shares([_about(plan, way) | row for way, row in _measured(plan).items()])
    print(_ABOUT)
    print_rows(rows, arguments, _COLUMNS)
    return 0


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """The rows with each way's tokens a second over those of the Python client and of whole
    answers.
    """
    rates = {row["way"]: float(row["output_tokens_per_s"] or 0) for row in rows}
    return [
        row
        | {
            f"over_{name}": round(rates[row["way"]] / rates[other], 3)
            for name, other in (("python", "python"), ("whole", "http_whole"))
            if rates[other]
        }
        for row in rows
    ]


def _measured(plan: WaysPlan) -> dict[Way, Row]:
    first: dict[Way, Row] = {}
    later: dict[Way, list[Row]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="slipstream-ways-") as folder, ExitStack() as exits:
        stacks: dict[Way, Stack] = {}
        for way in WAYS:
            stacks[way] = exits.enter_context(Stack(**_settings(plan, Path(folder))))
            first[way] = uvloop.run(_run(plan, way, stacks[way], 0))
        for run in range(1, plan.runs + 1):
            for way in WAYS if run % 2 else reversed(WAYS):
                later[way].append(uvloop.run(_run(plan, way, stacks[way], run)))
    found: dict[Way, Row] = {}
    for way, rows in later.items():
        row = median_row(rows) | {"runs": plan.runs}
        rate = float(first[way]["output_tokens_per_s"] or 0)
        share = round(rate / float(row["output_tokens_per_s"] or math.inf), 3)
        found[way] = row | {"first_over_later": share}
    return found


def _settings(plan: WaysPlan, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": plan.model,
        "http_port": 0,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.concurrency,
        "enable_prefix_caching": False,
        "spare_core": False,
        "spare_worker": False,
    }
    if is_random(plan.model):
        settings |= cpu_settings(plan.model, folder, 0.5)
    elif plan.model.startswith("simulated:") and "tokenizer=" not in plan.model:
        settings["model"] = f"{plan.model},tokenizer={MODEL_PATH}"
    return settings


async def _run(plan: WaysPlan, way: Way, stack: Stack, run: int) -> Row:
    request_options = LoadRequestOptions(
        endpoint="completions",
        is_streamed=way != "http_whole",
        temperature=0.0,
        logprobs=None,
        ignore_eos=True,
        timeout_s=_TIMEOUT_S,
    )
    address = stack.address if way == "python" else None
    async with open_target(
        request_options, address=address, url=stack.http_address or ""
    ) as target:
        requests = random_requests(
            plan.num_requests,
            input_len=plan.input_len,
            output_len=plan.output_len,
            range_ratio=plan.range_ratio,
            vocab_size=target.vocab_size or 1000,
            random=np.random.default_rng(run),
        )
        timelines, samples = await run_at_once(target, requests, plan.concurrency, {})
    row = summary(timelines)
    begin_s = min(one.sent_s for one in timelines)
    end_s = max(one.ended_s for one in timelines)
    num_chunks = sum(len(one.times_s) for one in timelines)
    num_tokens = sum(one.num_tokens for one in timelines)
    row["client_cores"] = round(samples.between(begin_s, end_s)[CLIENT] / (end_s - begin_s), 3)
    row["tokens_per_chunk"] = round(num_tokens / num_chunks, 3) if num_chunks else None
    return row


def _about(plan: WaysPlan, way: Way) -> Row:
    return {
        "benchmark": "ways",
        "version": package_version(),
        "model": plan.model,
        "way": way,
        "concurrency": plan.concurrency,
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "range_ratio": plan.range_ratio,
    }
