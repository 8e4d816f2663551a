"""What `slipstream bench gc` can be told.

Owns: the options and their defaults. What measures is imported when it is to measure.
"""

from __future__ import annotations

import argparse

from slipstream.cli_parser import Parser
from slipstream_bench.common.report_options import add_common


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
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.gc_pauses.gc_pauses import bench_gc

    return bench_gc(arguments)
