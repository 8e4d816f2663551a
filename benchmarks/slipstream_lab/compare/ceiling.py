"""`slipstream bench compare ceiling`: how many tokens a second fronts, worker and core can
carry, streamed over HTTP, when the device takes no time at all.

The workload is that of vLLM's mock engine (its pull request 43469): prompts of 32 tokens, answers
of 512, 1,024 or 2,048 at a time. Every place sends its next request when its answer has ended,
until each has had `waves` of them; all of it is measured, from the first request to the last end.
What limits is the host, so the figure to compare is tokens per second of CPU, of all processes but
the client's and of each.

vLLM's server runs with an executor that computes nothing (`peers/vllm_mock_executor`), in its own
processes: API servers and engine core. Both sides may put several tokens into an event when they
fall behind, and do; `tokens_per_event` says how many.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import wrong_option
from slipstream_bench.common.live_streams import CLIENT, random_prompts
from slipstream_bench.common.options import Option, add, fill_in, integer, many, name_of
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.process_census import allow_many_files, descendants, process_cpu_s
from slipstream_bench.common.report import (
    Row,
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_lab.common import simulated_stack
from slipstream_lab.common.simulated_stack import Simulated, simulation_note
from slipstream_lab.compare.closed_loop import ClosedLoopResult, run_closed_loop
from slipstream_lab.compare.front import http_request
from slipstream_lab.compare.vllm_server import vllm_server
from slipstream_lab.peers.peer_process import PROGRAM, checked_python

OURS: Final = "slipstream"
VLLM: Final = "vllm"
VLLM_WITHOUT_STATS: Final = "vllm_without_stats"

_BATCHED_TOKENS = 8192
_BLOCK_SIZE = 16
_BY = ("engine", "streams", "fronts", "workers")
_PARTS = ("front", "worker", "core", "other")
_COLUMNS = (
    *_BY,
    "tokens_per_s",
    "tokens_per_core_s",
    "ratio_to_vllm",
    "text_tokens_per_core_s",
    "text_ratio_to_vllm",
    *(f"{part}_tokens_per_core_s" for part in _PARTS),
    "client_cores",
    "tokens_per_event",
    "ttft_p50_s",
    "ttft_p99_s",
    "runs",
)
_ABOUT = """\
tokens_per_core_s: tokens per second of CPU time, of all processes but the client's; text_: of all
but the core's, so of vLLM its API servers. Ratio: ours over vLLM's on the same point."""

_OPTIONS = (
    Option("streams", many(integer(1, 4096)), "at a time", (1024, 2048), (64,)),
    Option("fronts", many(integer(1, 64)), "processes that speak HTTP", (1, 2, 4), (1,)),
    Option("output_workers", many(integer(1, 64)), "processes that make text", (1,)),
    Option("input_len", integer(1, 4096), "tokens of a prompt", 32),
    Option("output_len", integer(2, 4096), "tokens of an answer", 512, 64),
    Option("waves", integer(1), "requests of a place, one after the other", 2),
)
_PEERS = (
    Option("against", name_of((VLLM,)), "vllm: its server over a mock, too"),
    Option("vllm_python", PROGRAM, "the interpreter of its environment"),
)


class CeilingPlan(NamedTuple):
    """What is measured."""

    streams: tuple[int, ...]
    fronts: tuple[int, ...]
    output_workers: tuple[int, ...]
    input_len: int
    output_len: int
    waves: int
    vllm_python: str | None

    @property
    def max_model_len(self) -> int:
        """Prompt and answer, in whole blocks."""
        return -(-(self.input_len + self.output_len + 1) // _BLOCK_SIZE) * _BLOCK_SIZE


class _Server(NamedTuple):
    address: tuple[str, int]
    pids: Mapping[str, Sequence[int]]  # by part


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add(parser.add_argument_group("peers (slipstream_lab/peers/README.md)"), _PEERS)
    add_common(parser, runs=3)
    parser.set_defaults(run=compare_ceiling)


def checked(arguments: argparse.Namespace) -> CeilingPlan:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    fill_in(arguments, _PEERS)
    if (arguments.against is None) != (arguments.vllm_python is None):
        allowed = "--against vllm and --vllm-python PATH, both or none"
        raise wrong_option("against", arguments.against, allowed)
    python = None
    if arguments.against is not None:
        python = checked_python(VLLM, arguments.vllm_python)
    return CeilingPlan(**values, vllm_python=python)


def compare_ceiling(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    plan = checked(arguments)
    allow_many_files()
    note = simulation_note()
    loads = product(plan.streams, plan.fronts)
    points = [(*engine, *load) for load in loads for engine in _engines(plan)]
    runs = in_rounds(arguments.runs, points, lambda point: [_measure(plan, *point)])
    rows = with_ratios(median_rows(runs, _BY))
    print(f"{note} Medians of {arguments.runs}, {os.cpu_count()} cores.\n{_ABOUT}")
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _engines(plan: CeilingPlan) -> list[tuple[str, int]]:
    """The engines, each with its number of output workers; vLLM has none."""
    theirs = [] if plan.vllm_python is None else [(VLLM, 0), (VLLM_WITHOUT_STATS, 0)]
    return [*((OURS, number) for number in plan.output_workers), *theirs]


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Slipstream's rows with their ratios to vLLM's on the same points."""
    theirs = {(row["streams"], row["fronts"]): row for row in rows if row["engine"] == VLLM}
    found = []
    for row in rows:
        their = theirs.get((row["streams"], row["fronts"]))
        if row["engine"] == OURS and their is not None:
            for prefix in ("", "text_"):
                name = f"{prefix}tokens_per_core_s"
                ratio = float(row[name] or 0) / float(their[name] or 1)
                row = row | {f"{prefix}ratio_to_vllm": round(ratio, 2)}
        found.append(row)
    return found


def _measure(plan: CeilingPlan, engine: str, workers: int, streams: int, fronts: int) -> Row:
    if engine == OURS:
        server = _slipstream(plan, streams, fronts, workers)
    else:
        server = _vllm(plan, streams, fronts, has_stats=engine == VLLM)
    prompts = random_prompts(streams * plan.waves, plan.input_len)
    requests = [_request(prompt.tolist(), plan.output_len) for prompt in prompts]
    with server as (address, pids):
        run_closed_loop(address, requests[:fronts], fronts, plan.output_len, dict)  # warm-up
        result = run_closed_loop(address, requests, streams, plan.output_len, _cpu_of(pids))
    row: Row = {
        "benchmark": "ceiling",
        "is_simulated": True,
        "engine": engine,
        "streams": streams,
        "fronts": fronts,
        "workers": workers,
    }
    return row | _row(plan, result)


@contextmanager
def _slipstream(plan: CeilingPlan, streams: int, fronts: int, workers: int) -> Iterator[_Server]:
    device = Simulated(
        0.0,
        streams,
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=_BATCHED_TOKENS,
    )
    with simulated_stack.product(
        device,
        http_port=0,
        http_workers=fronts,
        output_workers=workers,
        enable_prefix_caching=False,
    ) as stack:
        assert stack.http_address is not None
        where = urlsplit(stack.http_address)
        assert where.hostname is not None
        assert where.port is not None
        pids: dict[str, list[int]] = {}
        for name, pid in stack.pids.items():
            pids.setdefault(_part_of(name), []).append(pid)
        assert stack.supervisor is not None
        rest = descendants(stack.supervisor).difference(stack.pids.values())
        pids.setdefault("other", []).extend(rest)  # with tokenizer processes and spares
        yield _Server((where.hostname, where.port), pids)


def _part_of(name: str) -> str:
    """The part that a process of a stack belongs to."""
    if name.startswith(("http", "worker", "core")):
        return "front" if name.startswith("http") else name.partition("-")[0]
    return "other"


@contextmanager
def _vllm(plan: CeilingPlan, streams: int, fronts: int, *, has_stats: bool) -> Iterator[_Server]:
    assert plan.vllm_python is not None
    with ExitStack() as stack:
        address, pids = stack.enter_context(
            vllm_server(
                plan.vllm_python,
                MODEL_PATH,
                max_num_seqs=streams,
                max_num_batched_tokens=_BATCHED_TOKENS,
                max_model_len=plan.max_model_len,
                num_servers=fronts,
                options=() if has_stats else ("--disable-log-stats",),
            )
        )
        yield _Server(address, pids)


def _cpu_of(pids: Mapping[str, Sequence[int]]) -> Callable[[], dict[str, float]]:
    def cpu() -> dict[str, float]:
        used = {part: sum(map(process_cpu_s, found)) for part, found in pids.items()}
        return used | {CLIENT: process_cpu_s(os.getpid())}

    return cpu


def _request(prompt: list[int], output_len: int) -> bytes:
    body = {
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return http_request("/v1/completions", msgspec.json.encode(body))


def _row(plan: CeilingPlan, result: ClosedLoopResult) -> Row:
    num_requests = len(result.ttfts_s)
    num_tokens = num_requests * plan.output_len
    used = {part: result.used.get(part, 0.0) for part in _PARTS}
    text_s = sum(seconds for part, seconds in used.items() if part != "core")

    def per_core_s(seconds: float) -> int | None:
        return round(num_tokens / seconds) if seconds else None

    return {
        "input_len": plan.input_len,
        "output_len": plan.output_len,
        "num_requests": num_requests,
        "wall_s": round(result.wall_s, 3),
        "tokens_per_s": round(num_tokens / result.wall_s),
        "tokens_per_core_s": per_core_s(sum(used.values())),
        "text_tokens_per_core_s": per_core_s(text_s),
        **{f"{part}_tokens_per_core_s": per_core_s(seconds) for part, seconds in used.items()},
        "client_cores": round(result.used[CLIENT] / result.wall_s, 3),
        # without the events of the usage and of the end
        "tokens_per_event": round(num_tokens / (result.num_events - 2 * num_requests), 3),
        "ttft_p50_s": round(float(np.percentile(result.ttfts_s, 50)), 3),
        "ttft_p99_s": round(float(np.percentile(result.ttfts_s, 99)), 3),
        "num_cpus": os.cpu_count(),
    }


def _draw(rows: Sequence[Row], file: str) -> None:
    points = list(dict.fromkeys((row["streams"], row["fronts"]) for row in rows))
    found: dict[str, dict[object, float]] = {}
    for row in rows:
        workers = f", {row['workers']} workers" if int(row["workers"] or 0) > 1 else ""
        of_engine = found.setdefault(f"{row['engine']}{workers}".replace("_", " "), {})
        of_engine[row["streams"], row["fronts"]] = float(row["tokens_per_core_s"] or 0)
    grouped_bars(
        file,
        [f"{streams} streams\n{fronts} fronts" for streams, fronts in points],
        {name: [values.get(point) for point in points] for name, values in found.items()},
        title="Tokens per second of CPU, streamed over HTTP, with a device that takes no time",
        x_label="",
        y_label="tokens per CPU second",
    )
