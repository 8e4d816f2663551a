"""`slipstream bench compare threads`: stacks with several thread counts in each situation.

- Runs alternate between the stacks, so that other load on the machine affects all of them.
- The stacks that are not being measured are idle: they have no spares, and no streams.
- A quota covers a stack and its client; peers, which are already running, are outside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream.llm import LLM
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer, many, name_of
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import add_common, check_common, median_rows, print_rows
from slipstream_ipc.messages import SamplingParams
from slipstream_lab.compare.serve_run import served_tokens_per_s
from slipstream_lab.compare.small_model import SMALL_MODEL, SMALL_MODEL_HELP, cpu_settings

_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_DEFAULT = "default"
_KEY = ("situation", "threads")
_COLUMNS = (*_KEY, "tokens_per_s", "of_best", "runs")
_ABOUT = """\
tokens_per_s: of all streams together, from asking to the last token, greedy; medians of the runs.
of_best: the default's share of what the best fixed number of threads does in that situation."""
_SPINNERS = {"quiet": 0, "1 spinner": 1, "2 spinners": 2}  # processes beside the engine
_QUOTAS = {"quota of 1.5 CPUs": 1.5}  # CPUs for the engine and its client
SITUATIONS = (*_SPINNERS, *_QUOTAS)
_OPTIONS = (
    Option("threads", many(integer(1)), "numbers of threads to compare with the default", (1, 2)),
    Option("situations", many(name_of(SITUATIONS)), "what runs beside the engine", SITUATIONS),
    Option("streams", integer(1), "at a time", 8),
    Option("input_len", integer(1), "tokens", 32),
    Option("output_len", integer(1), "tokens", 128, 24),
)


@contextmanager
def spinners(num: int) -> Iterator[list[int]]:
    """Start `num` processes that only spin; yields their pids."""
    with ExitStack() as stack:
        processes = []
        for _ in range(num):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process.pid)
        yield processes


@contextmanager
def quota(cpus: float, root: Path = _CGROUPS) -> Iterator[None]:
    """Limit this process and its children to the time of `cpus` CPUs.

    Children started within must have ended before the block does. Raises OSError if the cgroup
    cannot be made.
    """
    parent, is_second = _own_cgroup(root)
    folder = parent / f"slipstream-bench-{os.getpid()}"
    folder.mkdir()
    try:
        limit_us = int(cpus * _PERIOD_US)
        if is_second:
            (folder / "cpu.max").write_text(f"{limit_us} {_PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(limit_us))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (parent / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        folder.rmdir()


def _own_cgroup(root: Path) -> tuple[Path, bool]:
    """The folder of this process's CPU cgroup, and whether it is of version 2."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "cpu" in controllers.split(","):
            return root / controllers / path.lstrip("/"), False
    for _, controllers, path in lines:
        if not controllers:
            return root / path.lstrip("/"), True
    raise OSError("this process is in no cgroup")


class ThreadsPlan(NamedTuple):
    """What to measure. `peers`: URLs of running servers, by name."""

    threads: tuple[int, ...]
    situations: tuple[str, ...]
    streams: int
    input_len: int
    output_len: int
    model: str
    peers: dict[str, str]
    runs: int


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument("--model", default=SMALL_MODEL, help=SMALL_MODEL_HELP)
    add(group, _OPTIONS)
    group.add_argument(
        "--peer",
        action="append",
        metavar="NAME=URL",
        help="an OpenAI-compatible server that runs already, measured too; may be repeated",
    )
    add_common(parser, runs=5)
    parser.set_defaults(run=compare_threads)


def checked(arguments: argparse.Namespace) -> ThreadsPlan:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    peers = {}
    for peer in arguments.peer or ():
        name, _, url = peer.partition("=")
        if not name or urlsplit(url).scheme not in ("http", "https"):
            raise wrong_option("peer", peer, "NAME=http://HOST:PORT")
        peers[name] = url
    return ThreadsPlan(**values, model=arguments.model, peers=peers, runs=arguments.runs)


def compare_threads(arguments: argparse.Namespace) -> int:
    """Measure all situations and report."""
    plan = checked(arguments)
    print(_ABOUT, flush=True)
    runs: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-threads-") as folder:
        if set(plan.situations) & set(_SPINNERS):
            with ExitStack() as stack:
                stacks = _stacks(plan, Path(folder), stack)
                for situation in plan.situations:
                    if situation in _SPINNERS:
                        with spinners(_SPINNERS[situation]):
                            runs += _measured(plan, situation, stacks, plan.peers)
        for situation in plan.situations:
            if situation in _QUOTAS:
                runs += _within_quota(plan, situation, Path(folder))
    rows = _with_shares(median_rows(runs, _KEY))
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _within_quota(plan: ThreadsPlan, situation: str, folder: Path) -> list[Row]:
    with ExitStack() as stack:
        try:
            stack.enter_context(quota(_QUOTAS[situation]))
        except OSError as error:
            print(f"{situation}: left out, as no cgroup can be made here ({error})", flush=True)
            return []
        return _measured(plan, situation, _stacks(plan, folder, stack), {})


def _stacks(plan: ThreadsPlan, folder: Path, stack: ExitStack) -> dict[str, LLM]:
    settings = cpu_settings(plan.model, folder, 0.25)
    found = {}
    for name in [*map(str, plan.threads), _DEFAULT]:
        found[name] = stack.enter_context(
            LLM(
                plan.model,
                threads=None if name == _DEFAULT else int(name),
                max_model_len=plan.input_len + plan.output_len + 1,
                max_num_seqs=plan.streams,
                enable_prefix_caching=False,
                **settings,
            )
        )
    return found


def _measured(
    plan: ThreadsPlan, situation: str, stacks: dict[str, LLM], peers: dict[str, str]
) -> list[Row]:
    def row(threads: str, tokens_per_s: float) -> Row:
        return {
            "benchmark": "threads",
            "version": package_version(),
            "situation": situation,
            "threads": threads,
            "streams": plan.streams,
            "input_len": plan.input_len,
            "output_len": plan.output_len,
            "tokens_per_s": round(tokens_per_s, 1),
        }

    for llm in stacks.values():
        _tokens_per_s(plan, llm)  # warm-up: fills caches, and settles the thread team's size
    for url in peers.values():
        _of_peer(plan, url)
    rows = []
    for _ in range(plan.runs):
        rows += [row(name, _tokens_per_s(plan, llm)) for name, llm in stacks.items()]
        rows += [row(name, _of_peer(plan, url)) for name, url in peers.items()]
    return rows


def _tokens_per_s(plan: ThreadsPlan, llm: LLM) -> float:
    random = np.random.default_rng(0)
    prompts = random.integers(256, 1000, (plan.streams, plan.input_len)).tolist()
    params = SamplingParams(max_tokens=plan.output_len, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    taken_s = time.perf_counter() - begin
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / taken_s


def _of_peer(plan: ThreadsPlan, url: str) -> float:
    return served_tokens_per_s(
        ["--url", url],
        num_requests=plan.streams,
        concurrency=plan.streams,
        input_len=plan.input_len,
        output_len=plan.output_len,
    )


def _with_shares(rows: list[Row]) -> list[Row]:
    best: dict[object, float] = {}
    for row in rows:
        if str(row["threads"]).isdecimal():
            rate = float(row["tokens_per_s"] or 0)
            best[row["situation"]] = max(rate, best.get(row["situation"], 0.0))
    for row in rows:
        share = None
        if row["threads"] == _DEFAULT:
            share = round(float(row["tokens_per_s"] or 0) / best[row["situation"]], 3)
        row["of_best"] = share
    return rows


def _draw(rows: list[Row], file: str) -> None:
    situations, names = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in _KEY)
    rates = {(row["situation"], row["threads"]): float(row["tokens_per_s"] or 0) for row in rows}
    grouped_bars(
        file,
        situations,
        {name: [rates.get((situation, name)) for situation in situations] for name in names},
        title="Tokens a second beside other processes, by the number of threads",
        x_label="",
        y_label="tokens/s",
    )
