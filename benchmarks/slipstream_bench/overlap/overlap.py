"""`slipstream bench overlap`: the tables and the chart.

The first table is the one that vLLM's RFC #6913 asked for: the time of a step (TPOT) and the
device's idle share, by batch and step time, with and without stop strings and logprobs. Three more
tables come from `stops`, `arrivals` and `delta_latency`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tqdm import tqdm

from slipstream.cli.parser import Parser
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report_options import tell
from slipstream_bench.common.simulated_stack import note
from slipstream_bench.common.tables import Row, median_rows, table, write_json
from slipstream_bench.overlap import arrivals, delta_latency, stops
from slipstream_bench.overlap.overlap_options import (
    OTHERS,
    VARIANTS,
    OverlapForm,
    add_overlap_options,
    checked,
)
from slipstream_bench.overlap.points import measure_points, num_points

_BY = ("mode", "batch", "step_ms", "variant")
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
    add_overlap_options(parser)
    parser.set_defaults(run=bench_overlap)


def bench_overlap(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    form = checked(arguments)
    if any(getattr(arguments, name) for name in OTHERS):
        _tell_others(arguments)
        return 0
    said = note()
    rows = median_rows(_measured(form, arguments), _BY)
    print(f"{said} {form.window_s:g} s to a point, medians of {arguments.runs}.")
    tell(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _measured(form: OverlapForm, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    total = arguments.runs * num_points(form, is_against=arguments.against is not None)
    with tqdm(total=total, unit="point", disable=None, leave=False) as bar:
        for _ in range(arguments.runs):
            rows += measure_points(form, arguments.vllm_python, bar.update)
    return rows


def _tell_others(arguments: argparse.Namespace) -> None:
    """Print the tables requested instead of the first one; their rows share one file."""
    print(note())
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
    modes = list(dict.fromkeys(str(row["mode"]) for row in shown))
    found = {
        (row["mode"], row["step_ms"], row["batch"]): float(row["efficiency"] or 0) for row in shown
    }
    grouped_bars(
        file,
        [f"batch {batch}\n{step_ms:g} ms" for step_ms, batch in groups],
        {mode: [found.get((mode, *group)) for group in groups] for mode in modes},
        title=f"Throughput over the device's bound, {variant} (simulated device)",
        x_label="requests that run, time of a step",
        y_label="efficiency (1: the device never waits)",
    )
