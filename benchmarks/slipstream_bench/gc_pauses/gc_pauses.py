"""`slipstream bench gc`: measures each shape of token ids (`shapes`, `shape_measure`) and reports.

- A step is the device's time, which is simulated and takes no time here, followed by the host's CPU
  time, which is measured: an engine that overlaps nothing, like the one in the report that this
  reproduces (vLLM issue 26369).
- The collector keeps its default thresholds. `is_frozen` tells whether objects loaded before the
  requests were frozen, as the product does; otherwise a full collection traverses all of them.
"""

from __future__ import annotations

import argparse
import gc

import numpy as np

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.measures import Row
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report_options import add_common, check_common
from slipstream_bench.common.tables import median_rows, table, write_json
from slipstream_bench.gc_pauses.shape_measure import (
    COMPARED,
    SHAPES,
    WARM_UP_STEPS,
    measure,
    with_gains,
)

_VOCAB_SIZE = 4096
_STEPS, _QUICK_STEPS = 1000, 200
_COLUMNS = (
    *("shape", "is_frozen", "batch", "step_ms", "tokens_per_s", "gain_over_lists_percent"),
    *("host_us_per_step", "gc_share_percent"),
    *("gen0_per_1000_steps", "gen1_per_1000_steps", "gen2_per_1000_steps"),
    *("longest_pause_ms", "tracked_net_per_step", "blocks_net_per_step"),
)
_ABOUT = """\
A step's ids from the engine to the requests' readers. A step takes the device's time, simulated,
and behind it the host's CPU time, measured: nothing is hidden behind the device, so that one sees
what the host costs. The collector has its default thresholds {thresholds}.
lists_of_lists, ints, columns: one loop, see `slipstream_bench.gc_pauses.shapes`; it makes a
message, encodes, decodes, keeps histories, hands deltas to readers, both sides in one process.
product: Slipstream's own path, core to client, in columns too. It does more than the loops (text,
ends, cursors, acknowledgements, reports), so compare its collections, not its speed.
is_frozen: whether what was loaded is kept from the collector (gc.freeze), as the product keeps it.
tracked_net: containers made less those freed, which is what brings collections about."""


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--batch", type=int, metavar="N", default=1024, help="requests; default: %(default)s"
    )
    group.add_argument(
        "--step-ms",
        type=float,
        metavar="X",
        default=2.0,
        help="the device's time for a step, simulated; default: %(default)s",
    )
    group.add_argument("--steps", type=int, metavar="N", help="default: 1000, with --quick 200")
    add_common(parser, runs=3)
    parser.set_defaults(run=bench_gc)


def bench_gc(arguments: argparse.Namespace) -> int:
    """Measure all shapes, frozen and not, and report."""
    check_common(arguments)
    if arguments.batch < 1:
        raise wrong_option("batch", arguments.batch, "an integer >= 1")
    if arguments.step_ms <= 0:
        raise wrong_option("step_ms", arguments.step_ms, "milliseconds, > 0")
    steps = arguments.steps
    if steps is None:
        steps = _QUICK_STEPS if arguments.quick else _STEPS
    if steps < 1:
        raise wrong_option("steps", steps, "an integer >= 1")
    runs = [
        _measured(shape, arguments.batch, steps, arguments.step_ms, is_frozen=is_frozen)
        for _ in range(arguments.runs)
        for is_frozen in (True, False)
        for shape in SHAPES
    ]
    rows = with_gains(median_rows(runs, ("shape", "is_frozen")))
    print(_ABOUT.format(thresholds=gc.get_threshold()))
    print("\n".join(table(rows, _COLUMNS)), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _measured(shape: str, batch: int, steps: int, step_ms: float, *, is_frozen: bool) -> Row:
    """One run."""
    shape_of_ids = (WARM_UP_STEPS + steps + 1, batch)
    ids = np.random.default_rng(0).integers(0, _VOCAB_SIZE, shape_of_ids)
    row = measure(shape, batch, steps, iter(ids), is_frozen=is_frozen)
    host_us = float(row["host_us_per_step"] or 0)
    tokens_per_s = round(batch / (step_ms / 1e3 + host_us / 1e6), 1)
    return row | {"step_ms": step_ms, "tokens_per_s": tokens_per_s}


def _draw(rows: list[Row], file: str) -> None:
    """Chart the three loops."""
    frozen = {True: "frozen heap", False: "heap not frozen"}
    grouped_bars(
        file,
        COMPARED,
        {
            name: [
                float(row["tokens_per_s"] or 0)
                for row in rows
                if row["is_frozen"] is is_frozen and row["shape"] in COMPARED
            ]
            for is_frozen, name in frozen.items()
        },
        title=f"The shape of a step's ids: {rows[0]['batch']} requests, "
        f"{rows[0]['step_ms']:g} ms steps, nothing hidden behind the device",
        x_label="shape",
        y_label="tokens per second",
    )
