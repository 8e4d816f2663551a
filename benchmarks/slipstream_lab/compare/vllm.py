"""`slipstream bench compare vllm`: vLLM's own server beside ours over the same engine.

- The servers run in turns, A B A B, with the same flags, threads and requests; each start has a
  warm-up. The load generator shares the cores, and is not counted.
- CPU time is the engine's (vLLM's engine core and its workers; our core) or the rest's (API server;
  front, output worker, tokenizers, supervisor).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.load.datasets import random_requests
from slipstream_bench.common.load.native_target import open_target, run_at_once
from slipstream_bench.common.load.openai_target import LoadRequestOptions
from slipstream_bench.common.measures import Row, summary
from slipstream_bench.common.options import Option, add, fill_in, integer, many
from slipstream_bench.common.process_census import descendants
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_lab.common.goals import Goal
from slipstream_lab.peers.peer_process import PROGRAM, checked_python
from slipstream_lab.peers.server_process import free_port, server_process

THEIRS, OURS = "vllm", "slipstream"
PLAIN, ASKING = "plain", "top5_stop"

_COLUMNS = (
    "server",
    "streams",
    "variant",
    "output_tokens_per_s",
    "ttft_median_ms",
    "chunks_per_token",
    "engine_us_per_token",
    "rest_us_per_token",
    "runs",
)
_ABOUT = """\
top5_stop: 5 log-probabilities a token and a stop string that does not occur. *_us_per_token: CPU.
Medians of the runs."""
_OPTIONS = (
    Option("streams", many(integer(1)), "requests at a time", (1, 16, 64), (1, 4)),
    Option("input_len", integer(1), "tokens of a prompt", 32, 16),
    Option("output_len", integer(1), "tokens of an answer", 64, 16),
    Option("threads", integer(1), "that compute the model", 1),
    Option("vllm_python", PROGRAM, "interpreter of an environment with vLLM"),
)
_STOP = "zzqx"  # beyond what random weights say
_NUM_LOGPROBS = 5
_TIMEOUT_S = 600.0
_KV_CACHE_GIB = 1
_VOCAB_SIZE = 1000  # ids that any model has
_ENGINE_TITLES = ("VLLM::EngineCor", "VLLM::Worker", "slip:core")  # as cut by the kernel
_MANY = 64  # streams from which on the rest's CPU has a goal


class VllmPlan(NamedTuple):
    """What is measured."""

    model: Path
    streams: tuple[int, ...]
    input_len: int
    output_len: int
    threads: int
    vllm_python: str
    runs: int

    @property
    def max_model_len(self) -> int:
        """Prompt and answer, and some room."""
        return self.input_len + self.output_len + 64


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("model", metavar="FOLDER", help="a model's, in float32")
    add(group, _OPTIONS)
    add_common(parser, runs=2)
    parser.set_defaults(run=compare_vllm)


def compare_vllm(arguments: argparse.Namespace) -> int:
    """Measure both servers in turns and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    if not Path(arguments.model, "config.json").is_file():
        raise wrong_option("model", arguments.model, "a folder with a config.json")
    values["vllm_python"] = checked_python("vllm", values["vllm_python"])
    plan = VllmPlan(model=Path(arguments.model), **values, runs=arguments.runs)
    print(_ABOUT, flush=True)
    each = in_rounds(plan.runs, (THEIRS, OURS), lambda server: _measured(plan, server))
    rows = median_rows(each, ("server", "streams", "variant"))
    print_rows(rows, arguments, _COLUMNS)
    for goal in goals(rows):
        print(goal)
    return 0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals of our server beside vLLM's, for each number of streams and each variant."""
    found: list[Goal] = []
    by = {(row["server"], row["streams"], row["variant"]): row for row in rows}
    for (server, streams, variant), ours in by.items():
        if server != OURS:
            continue
        theirs, where = by[THEIRS, streams, variant], f"{streams} streams, {variant}: "

        def ratio(name: str, over: Row, under: Row) -> float:
            return float(over[name] or 0) / float(under[name] or 1)

        rate = ratio("output_tokens_per_s", ours, theirs)
        found.append(Goal(f"{where}tokens a second, ours / vLLM's", rate, 0.95))
        ttft = ratio("ttft_median_ms", ours, theirs)
        found.append(Goal(f"{where}TTFT p50, ours / vLLM's", ttft, 1.0, is_most=True))
        chunks = float(ours["chunks_per_token"] or 0)
        found.append(Goal(f"{where}chunks a token", chunks, 0.95))
        if isinstance(streams, int) and streams >= _MANY:
            rest = ratio("rest_us_per_token", theirs, ours)
            least = 3.0 if variant == PLAIN else 4.0
            found.append(Goal(f"{where}CPU of the rest, vLLM's / ours", rest, least))
    return found


def _measured(plan: VllmPlan, server: str) -> Iterator[Row]:
    with _SERVERS[server](plan) as (port, root):
        url = f"http://127.0.0.1:{port}"
        for variant in (PLAIN, ASKING):  # warm-up
            uvloop.run(_run(plan, url, root, max(plan.streams), variant, seed=1))
        for streams in plan.streams:
            for variant in (PLAIN, ASKING):
                row = uvloop.run(_run(plan, url, root, streams, variant, seed=2))
                about: Row = {
                    "benchmark": "vllm",
                    "version": package_version(),
                    "model": plan.model.name,
                    "server": server,
                    "streams": streams,
                    "variant": variant,
                    "input_len": plan.input_len,
                    "output_len": plan.output_len,
                    "threads": plan.threads,
                    "load": round(os.getloadavg()[0], 2),
                }
                yield about | row


async def _run(
    plan: VllmPlan, url: str, root: int, streams: int, variant: str, *, seed: int
) -> Row:
    request_options = LoadRequestOptions(
        endpoint="completions",
        is_streamed=True,
        temperature=0.0,
        logprobs=_NUM_LOGPROBS if variant == ASKING else None,
        ignore_eos=True,
        timeout_s=_TIMEOUT_S,
        stop=_STOP if variant == ASKING else None,
    )
    requests = random_requests(
        streams,
        input_len=plan.input_len,
        output_len=plan.output_len,
        range_ratio=0.0,
        vocab_size=_VOCAB_SIZE,
        random=np.random.default_rng([seed, streams]),
    )
    pids = {str(pid): pid for pid in descendants(root)}
    async with open_target(request_options, url=url) as target:
        timelines, samples = await run_at_once(target, requests, streams, pids)
    row = summary(timelines)
    used = samples.between(
        min(one.sent_s for one in timelines), max(one.ended_s for one in timelines)
    )
    engine = {name for name, pid in pids.items() if _is_engine(pid)}
    num_tokens = int(row["output_tokens"] or 0) or 1
    for part, names in (("engine", engine), ("rest", pids.keys() - engine)):
        us = 1e6 * sum(used[name] for name in names) / num_tokens
        row[f"{part}_us_per_token"] = round(us, 1)
    return row


def _is_engine(pid: int) -> bool:
    with suppress(psutil.Error):  # it has ended
        name: str = psutil.Process(pid).name()
        return name.startswith(_ENGINE_TITLES)
    return False


@contextmanager
def _theirs(plan: VllmPlan) -> Iterator[tuple[int, int]]:
    port = free_port()
    command = [
        *(plan.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(plan.model), "--host", "127.0.0.1", "--port", str(port)),
        *(*_flags(plan), "--disable-uvicorn-access-log"),
    ]
    environment = {
        **_environment(plan),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with server_process("vLLM's server", command, port, environment) as pid:
        yield port, pid


@contextmanager
def _ours(plan: VllmPlan) -> Iterator[tuple[int, int]]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="slipstream-vllm-") as folder:
        command = [
            *(sys.executable, "-m", "slipstream.cli.main", "serve", str(plan.model)),
            *("--port", str(port), "--runtime-dir", folder, "--threads", str(plan.threads)),
            *("--engine", "vllm", "--engine-python", plan.vllm_python),
            *("--kv-cache-gib", str(_KV_CACHE_GIB), "--spare-core", "false"),
            *_flags(plan),
        ]
        environment = _environment(plan)
        with server_process("slipstream serve", command, port, environment, path="/ready") as pid:
            yield port, pid


def _flags(plan: VllmPlan) -> list[str]:
    """Return the options that both servers take."""
    return [
        *("--dtype", "float32", "--max-model-len", str(plan.max_model_len), "--enforce-eager"),
        *("--max-num-seqs", str(max(plan.streams)), "--no-enable-prefix-caching"),
    ]


def _environment(plan: VllmPlan) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(plan.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


_SERVERS = {THEIRS: _theirs, OURS: _ours}
