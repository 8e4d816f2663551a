"""What `slipstream bench protocol` can be told.

Owns: the options, their ranges and defaults. What measures is imported when it is to measure.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from slipstream.cli_parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common


class Load(NamedTuple):
    """Requests that run all at once."""

    batch: int
    output_len: int  # tokens of an answer
    step_ms: float


FULL = Load(64, 2048, 10.0)
_QUICK = Load(64, 320, 5.0)
_LARGEST = Load(1024, 3900, 1000.0)
_SMALLEST = Load(1, 8, 1.0)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("load")
    for name, kind, meaning in (
        ("batch", int, "requests, which run all at once"),
        ("output_len", int, "tokens of an answer"),
        ("step_ms", float, "milliseconds of a step"),
    ):
        full, quick = getattr(FULL, name), getattr(_QUICK, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar="N",
            help=f"{meaning}; default: {full:g}, with --quick {quick:g}",
        )
    add_common(parser, runs=3)
    parser.set_defaults(run=_run)


def checked(arguments: argparse.Namespace) -> Load:
    """What is to be measured. Raises: BadRequestError."""
    check_common(arguments)
    load = _QUICK if arguments.quick else FULL
    for name in Load._fields:
        value = getattr(arguments, name)
        smallest, largest = getattr(_SMALLEST, name), getattr(_LARGEST, name)
        if value is None:
            continue
        if not smallest <= value <= largest:
            raise wrong_option(name, value, f"a number in [{smallest:g}, {largest:g}]")
        load = load._replace(**{name: value})
    return load


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.protocol.protocol import bench_protocol

    return bench_protocol(arguments)
