"""`slipstream bench step`: measures the parts of a decode step and reports them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer, many
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.provenance import package_version
from slipstream_bench.common.report import add_common, check_common, median_rows, print_rows
from slipstream_lab.common.core_parts import DEVICE, PARTS, CoreParts
from slipstream_lab.common.simulated_stack import simulation_note

ALL = "all"

_KEY = ("model", "part", "batch")
_COLUMNS = (*_KEY, "us_per_step", "mean_us_per_step", "steps", "runs")
_ABOUT = """\
us_per_step: of the run's steps the median, mean_us_per_step their mean; medians over the runs.
The core's parts, receive to settle: CPU time of its thread, one step ahead, every request decoding.
`all` is their sum step by step. `device`: the host's work for the simulated device; of a model,
wall time of the step on the device's thread, of which model and sampling are parts."""

_OPTIONS = (
    Option("batches", many(integer(1)), "requests at a time", (1, 64, 256, 1024)),
    Option(
        "steps",
        integer(1),
        "decode steps of a run; default: 512, with --quick 128; of a model 32, with --quick 8",
    ),
    Option("prompt_len", integer(1), "tokens", 128),
    Option("threads", integer(1), "threads that compute the model"),
)


class StepBenchPlan(NamedTuple):
    """What to measure. `model`: a real model whose parts are measured as well, on the CPU."""

    batches: tuple[int, ...]
    steps: int
    model_steps: int
    prompt_len: int
    threads: int | None
    runs: int
    model: str | None
    enable_prefix_caching: bool


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    add(group, _OPTIONS)
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="without the prefix cache",
    )
    group.add_argument(
        "--model",
        metavar="PATH",
        help="a folder or hub id: measure this model's parts of a step too, on the CPU",
    )
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_step)


def bench_step(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    steps, model_steps = (128, 8) if arguments.quick else (512, 32)
    plan = StepBenchPlan(
        **values
        | {"steps": arguments.steps or steps, "model_steps": arguments.steps or model_steps},
        runs=arguments.runs,
        model=arguments.model,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )
    print(simulation_note(), _ABOUT, sep="\n", flush=True)
    runs = [row for _ in range(plan.runs) for row in _core_rows(plan)]
    if plan.model is not None:
        runs += _model_rows(plan, plan.model)
    rows = median_rows(runs, _KEY)
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, plan, arguments.png)
    return 0


def _core_rows(plan: StepBenchPlan) -> Iterator[Row]:
    for batch in plan.batches:
        parts = CoreParts(
            batch,
            prompt_len=plan.prompt_len,
            steps=plan.steps,
            enable_prefix_caching=plan.enable_prefix_caching,
        )
        try:
            for _ in range(plan.steps):
                parts.step()
            parts.check_whole()
            us = parts.measured_us()
        finally:
            parts.close()
        yield from _rows("simulated", batch, us, plan, (*PARTS, ALL, DEVICE))


def _model_rows(plan: StepBenchPlan, model: str) -> list[Row]:
    from slipstream_lab.step import model_parts

    runner = model_parts.load(
        model,
        batches=plan.batches,
        prompt_len=plan.prompt_len,
        steps=plan.model_steps,
        threads=plan.threads,
    )
    try:
        return [
            row
            for _ in range(plan.runs)
            for batch in plan.batches
            for row in _rows(
                model,
                batch,
                model_parts.measure(
                    runner,
                    batch,
                    prompt_len=plan.prompt_len,
                    steps=plan.model_steps,
                    enable_prefix_caching=plan.enable_prefix_caching,
                ),
                plan,
                (*PARTS, ALL, *model_parts.PARTS),
            )
        ]
    finally:
        runner.close()


def _rows(
    model: str, batch: int, us: dict[str, list[float]], plan: StepBenchPlan, parts: Sequence[str]
) -> Iterator[Row]:
    us[ALL] = [sum(step) for step in zip(*(us[part] for part in PARTS), strict=True)]
    for part in parts:
        yield {
            "benchmark": "step",
            "version": package_version(),
            "model": model,
            "part": part,
            "batch": batch,
            "us_per_step": round(statistics.median(us[part]), 2),
            "mean_us_per_step": round(statistics.fmean(us[part]), 2),
            "steps": len(us[part]),
            "prompt_len": plan.prompt_len,
            "enable_prefix_caching": plan.enable_prefix_caching,
        }


def _draw(rows: Sequence[Row], plan: StepBenchPlan, file: str) -> None:
    """Chart the core's parts."""
    grouped_bars(
        file,
        [str(batch) for batch in plan.batches],
        {
            part: [
                float(row["us_per_step"] or 0)
                for row in rows
                if row["part"] == part and row["model"] == "simulated"
            ]
            for part in PARTS
        },
        title="The core's Python of a decode step",
        x_label="requests",
        y_label="CPU µs a step",
    )
