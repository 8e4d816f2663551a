"""`slipstream bench tp`: plans on their way to ranks, and decode steps of one rank and of two."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream_bench.common.measures import Row, cannot_measure
from slipstream_bench.common.options import Option, add, fill_in, integer, many, number
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
    table,
)
from slipstream_lab.tensor_parallel.decode_steps import StepsTaken, StepsWanted
from slipstream_lab.tensor_parallel.plan_costs import measure_plans

_MOST_S = 3600.0  # of one process
_ABOUT = """\
put, take: wall time in which the first rank checks and writes a plan, and another views it, in one
thread. step: wall time between two decode steps on a CPU; launch: CPU time in which the
engine's thread hands one over."""
_PLAN_COLUMNS = ("rows", "blocks", "put_us", "take_us", "runs")
_STEP_KEY = ("model", "ranks", "threads", "batch")
_STEP_COLUMNS = (*_STEP_KEY, "step_us", "launch_us", "steps", "runs")
_OPTIONS = (
    Option("rows", many(integer(1, 2**16)), "rows of a plan", (64, 1024)),
    Option("blocks", integer(1, 2**16), "blocks in the table of each row", 64),
    Option("batches", many(integer(1)), "rows of a decode step", (1, 8, 32)),
    Option("ranks", many(integer(1, 64)), "numbers of ranks", (1, 2)),
    Option("prompt_len", integer(1), "tokens", 64),
    Option(
        "temperature",
        number(lambda value: 0 <= value <= 2, "a number in [0, 2]"),
        "of each request; 0 is greedy",
        0.0,
    ),
    Option(
        "top_p",
        number(lambda value: 0 < value <= 1, "a number in (0, 1]"),
        "of each request; 1 is off",
        1.0,
    ),
    Option("steps", integer(1), "decode steps of a run", 64, 16),
)
_NUM_PLANS = 500
_NUM_CORES = 2  # that the ranks share out


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    add(group, _OPTIONS)
    group.add_argument(
        "--model", metavar="PATH", help="a folder or hub id (default: the bundled demo model)"
    )
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_tensor_parallel)


def bench_tensor_parallel(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    given = fill_in(arguments, _OPTIONS)
    print(_ABOUT, flush=True)
    plans = in_rounds(
        arguments.runs,
        given["rows"],
        lambda rows: [measure_plans(rows, given["blocks"], _NUM_PLANS)],
    )
    print(*table(median_rows(plans, ("rows", "blocks")), _PLAN_COLUMNS), sep="\n", flush=True)
    steps = in_rounds(
        arguments.runs,
        given["ranks"],
        lambda ranks: _step_rows(
            StepsWanted(
                model=arguments.model or str(MODEL_PATH),
                ranks=ranks,
                threads=max(1, _NUM_CORES // ranks),
                batches=given["batches"],
                prompt_len=given["prompt_len"],
                steps=given["steps"],
                temperature=given["temperature"],
                top_p=given["top_p"],
            )
        ),
    )
    print_rows(median_rows(steps, _STEP_KEY), arguments, _STEP_COLUMNS)
    return 0


def _step_rows(wanted: StepsWanted) -> Iterator[Row]:
    """Measure in a process of its own. Raises EngineError where that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "slipstream_lab.tensor_parallel.decode_steps"],
        input=msgspec.json.encode(wanted),
        stdout=subprocess.PIPE,
        timeout=_MOST_S,
        check=False,
    )
    if done.returncode:
        raise cannot_measure(f"{wanted.ranks} ranks ended with exit code {done.returncode}")
    for taken in msgspec.json.decode(done.stdout, type=list[StepsTaken]):
        yield {
            "benchmark": "tp",
            "version": package_version(),
            "model": "demo" if wanted.model == str(MODEL_PATH) else wanted.model,
            "ranks": wanted.ranks,
            "threads": wanted.threads,
            "batch": taken.batch,
            "step_us": round(taken.step_us, 1),
            "launch_us": round(taken.launch_us, 1),
            "steps": taken.steps,
            "prompt_len": wanted.prompt_len,
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
        }
