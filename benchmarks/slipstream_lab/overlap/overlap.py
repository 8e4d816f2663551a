"""`slipstream bench overlap`: the tables and the chart.

The first table is the one that vLLM's RFC #6913 asked for: the time of a step (TPOT) and the
device's idle share, by batch and step time, with and without stop strings and logprobs. Three more
tables come from `stops`, `arrivals` and `delta_latency`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.options import Option, add, fill_in, integer, many, name_of, number
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report import (
    Row,
    add_common,
    check_common,
    median_rows,
    print_rows,
    table,
    write_json,
)
from slipstream_lab.common.simulated_stack import simulation_note
from slipstream_lab.overlap import arrivals, delta_latency, stops
from slipstream_lab.overlap.points import (
    MODES,
    READS,
    VARIANTS,
    OverlapPlan,
    measure_points,
    num_points,
)
from slipstream_lab.peers.peer_process import PROGRAM, checked_python

_STEP_MS = number(lambda value: 1 <= value <= 1000, "a number in [1, 1000]")
OTHERS = ("stops", "arrivals", "latency")  # tables that replace the first one
_OPTIONS = (
    Option("batches", many(integer(1, 4096)), "requests at a time", (1, 32, 256, 1024), (32, 1024)),
    Option(
        "steps_ms", many(_STEP_MS), "milliseconds of a simulated step", (5.0, 10.0, 19.0), (5.0,)
    ),
    Option(
        "variants",
        many(name_of(VARIANTS)),
        "what requests ask for",
        VARIANTS,
        ("plain", "stop2_logprobs5"),
    ),
    Option(
        "modes",
        many(name_of(MODES)),
        "where output is processed: in the engine's loop or in the worker",
        MODES,
        ("in_loop", "worker"),
    ),
    Option("reads", many(name_of(READS)), "what the client does with deltas", ("columns",)),
)
_PEERS = (
    Option("against", name_of(("vllm",)), "vllm: its output path in the loop, too"),
    Option("vllm_python", PROGRAM, "the interpreter of its environment"),
)

_BY = ("mode", "batch", "step_ms", "variant", "read")
_COLUMNS = (
    *_BY,
    "tpot_ms",
    "host_ms",
    "efficiency",
    "device_idle_share",
    "tokens_per_delta",
    "engine_cpu_us_per_token",
    "worker_cpu_us_per_token",
    "client_cpu_us_per_token",
    "runs",
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add(parser.add_argument_group("peers (slipstream_lab/peers/README.md)"), _PEERS)
    others = parser.add_argument_group("other tables, instead of this one")
    others.add_argument("--stops", action="store_true", help="what a stop costs, in steps")
    others.add_argument(
        "--arrivals",
        action="store_true",
        help="what a 100,000-token prompt or a 500-message chat does to streams that run",
    )
    others.add_argument(
        "--latency", action="store_true", help="from a token's id on the host to its delta"
    )
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_overlap)


def checked(arguments: argparse.Namespace) -> OverlapPlan:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    asked = [name for name in OTHERS if getattr(arguments, name)]
    if asked and arguments.png is not None:
        raise wrong_option("png", arguments.png, f"nothing with --{asked[0]}")
    values = fill_in(arguments, _OPTIONS)
    fill_in(arguments, _PEERS)
    if (arguments.against is None) != (arguments.vllm_python is None):
        allowed = "--against vllm and --vllm-python PATH, both or none"
        raise wrong_option("against", arguments.against, allowed)
    if arguments.against is not None:
        arguments.vllm_python = checked_python("vllm", arguments.vllm_python)
    settle_s, window_s = (0.3, 1.0) if arguments.quick else (0.5, 2.5)
    return OverlapPlan(**values, settle_s=settle_s, window_s=window_s)


def bench_overlap(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    plan = checked(arguments)
    if any(getattr(arguments, name) for name in OTHERS):
        _bench_others(arguments)
        return 0
    note = simulation_note()
    rows = median_rows(_measured(plan, arguments), _BY)
    print(f"{note} {plan.window_s:g} s to a point, medians of {arguments.runs}.")
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _measured(plan: OverlapPlan, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    total = arguments.runs * num_points(plan, is_against=arguments.against is not None)
    with tqdm(total=total, unit="point", disable=None, leave=False) as bar:
        for _ in range(arguments.runs):
            rows += measure_points(plan, arguments.vllm_python, bar.update)
    return rows


def _bench_others(arguments: argparse.Namespace) -> None:
    """Print the tables requested instead of the first one; their rows share one file."""
    print(simulation_note())
    every: list[Row] = []
    for is_asked, measure, columns in (
        (arguments.stops, stops.measure_stops, stops.COLUMNS),
        (arguments.arrivals, arrivals.measure_arrivals, arrivals.COLUMNS),
        (arguments.latency, delta_latency.measure_latency, delta_latency.COLUMNS),
    ):
        if is_asked:
            rows = measure(runs=arguments.runs, is_quick=arguments.quick)
            print("\n".join(table(rows, columns)), flush=True)
            every += rows
    if arguments.json is not None:
        write_json(every, arguments.json)


def _draw(rows: Sequence[Row], file: str) -> None:
    """Chart efficiency by mode, for the most expensive variant."""
    variant = next(name for name in reversed(VARIANTS) if any(r["variant"] == name for r in rows))
    shown = [row for row in rows if row["variant"] == variant]
    groups = list(dict.fromkeys((row["step_ms"], row["batch"]) for row in shown))
    modes = list(dict.fromkeys(f"{row['mode']}, {row['read']}" for row in shown))
    found = {
        (f"{row['mode']}, {row['read']}", row["step_ms"], row["batch"]): float(
            row["efficiency"] or 0
        )
        for row in shown
    }
    grouped_bars(
        file,
        [f"batch {batch}\n{step_ms:g} ms" for step_ms, batch in groups],
        {mode: [found.get((mode, *group)) for group in groups] for mode in modes},
        title=f"Throughput over the device's bound, {variant} (simulated device)",
        x_label="requests that run, time of a step",
        y_label="efficiency (1: the device never waits)",
    )
