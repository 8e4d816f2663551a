"""The options --quick, --runs, --json and --png, and the final report of every benchmark that
prints a table.

In a benchmark:
    def add_thing(parser: Parser) -> None:
        add_common(parser, runs=5, quick_runs=1)
        parser.set_defaults(run=bench_thing)

    def bench_thing(arguments: argparse.Namespace) -> int:
        check_common(arguments)     # before anything is measured
        rows = ...
        tell(rows, arguments, columns=[...])
        return 0
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.pictures import check_plots
from slipstream_bench.common.tables import Row, table, write_json


def add_common(parser: Parser, *, runs: int, quick_runs: int = 1) -> None:
    """Add the options. runs, quick_runs: default number of runs, without and with --quick."""
    group = parser.add_argument_group("report")
    group.add_argument("--quick", action="store_true", help="a small form, in under 50 s")
    group.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help=f"medians of so many are told; default: {runs}, with --quick {quick_runs}",
    )
    group.add_argument("--json", metavar="FILE", help="write the rows there, a list of objects")
    group.add_argument("--png", metavar="FILE", help="save a picture there (needs matplotlib)")
    parser.set_defaults(default_runs=(runs, quick_runs))


def check_common(arguments: argparse.Namespace) -> None:
    """Reject invalid options before anything is measured; set --runs. Raises: BadRequestError.

    This keeps rows that took minutes from being lost to a missing output folder.
    """
    if arguments.runs is None:
        arguments.runs = arguments.default_runs[1 if arguments.quick else 0]
    if arguments.runs < 1:
        raise wrong_option("runs", arguments.runs, "an integer >= 1")
    for name in ("json", "png"):
        file = getattr(arguments, name)
        if file is None:
            continue
        folder = Path(file).absolute().parent
        if Path(file).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise wrong_option(name, file, "a file in a folder that exists and can be written to")
    if arguments.png is not None:
        check_plots()


def tell(
    rows: Sequence[Row], arguments: argparse.Namespace, columns: Sequence[str] | None = None
) -> None:
    """Print `columns` of the rows in this order, and write all columns with --json."""
    print("\n".join(table(rows, columns)), flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
