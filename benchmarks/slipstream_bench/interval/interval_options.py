"""What `slipstream bench interval` can be told.

Owns: the options, their ranges and defaults. What measures is imported when it is to measure.
"""

from __future__ import annotations

import argparse
from typing import Literal, NamedTuple

from slipstream.cli_parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common

Interval = int | Literal["auto"]


class Form(NamedTuple):
    """What is measured."""

    intervals: tuple[Interval, ...]
    concurrencies: tuple[int, ...]
    output_len: int  # tokens of an answer, in the mean


_FULL = Form((1, 2, 5, 10, "auto"), (64, 256, 1024), 256)
_QUICK = Form((1, 10, "auto"), (64, 256), 80)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("load")
    group.add_argument("--http", action="store_true", help="over HTTP, not over ZeroMQ")
    for name, parse, meaning in (
        ("intervals", _intervals, "tokens, or auto"),
        ("concurrencies", _integers, "requests at a time"),
    ):
        full, quick = (",".join(map(str, getattr(form, name))) for form in (_FULL, _QUICK))
        group.add_argument(
            f"--{name}",
            type=parse,
            metavar="N,...",
            help=f"{meaning}; default: {full}, with --quick {quick}",
        )
    group.add_argument(
        "--output-len",
        type=int,
        metavar="N",
        help=f"tokens of an answer, in the mean; default: {_FULL.output_len}, with --quick "
        f"{_QUICK.output_len}",
    )
    add_common(parser, runs=3)
    parser.set_defaults(run=_run)


def checked(arguments: argparse.Namespace) -> Form:
    """What is to be measured. Raises: BadRequestError."""
    check_common(arguments)
    form = _QUICK if arguments.quick else _FULL
    form = Form(
        arguments.intervals or form.intervals,
        arguments.concurrencies or form.concurrencies,
        form.output_len if arguments.output_len is None else arguments.output_len,
    )
    for interval in form.intervals:
        if interval != "auto" and not 1 <= interval <= 1000:
            raise wrong_option("intervals", interval, "integers in [1, 1000], or auto")
    for concurrency in form.concurrencies:
        if not 1 <= concurrency <= 4096:
            raise wrong_option("concurrencies", concurrency, "integers in [1, 4096]")
    if not 8 <= form.output_len <= 3000:
        raise wrong_option("output_len", form.output_len, "an integer in [8, 3000]")
    return form


def _intervals(text: str) -> tuple[Interval, ...]:
    return tuple("auto" if part == "auto" else int(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.interval.interval import bench_interval

    return bench_interval(arguments)
