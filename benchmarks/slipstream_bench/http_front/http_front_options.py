"""What `slipstream bench front` can be told.

Owns: the options, their ranges and defaults. What measures is imported when it is to measure.
"""

from __future__ import annotations

import argparse
from typing import Literal, NamedTuple, get_args

from slipstream.cli_parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common

Variant = Literal["plain", "logprobs5", "chat", "resumable"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


class Form(NamedTuple):
    """What is measured."""

    streams: tuple[int, ...]
    variants: tuple[Variant, ...]
    num_events: int  # of a stream


_FULL = Form((64, 512, 1024), VARIANTS, 120)
_QUICK = Form((64, 256), ("plain", "logprobs5"), 60)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("load")
    full, quick = _FULL, _QUICK
    group.add_argument(
        "--streams",
        type=_integers,
        metavar="N,...",
        help=f"at a time; default: {_listed(full.streams)}, with --quick {_listed(quick.streams)}",
    )
    group.add_argument(
        "--variants",
        metavar="NAME,...",
        help="logprobs5: with the five likeliest tokens; resumable: with ids of events; default: "
        f"{_listed(full.variants)}, with --quick {_listed(quick.variants)}",
    )
    group.add_argument(
        "--events",
        type=int,
        metavar="N",
        help=f"of a stream; default: {full.num_events}, with --quick {quick.num_events}",
    )
    add_common(parser, runs=3)
    parser.set_defaults(run=_run)


def checked(arguments: argparse.Namespace) -> Form:
    """What is to be measured. Raises: BadRequestError."""
    check_common(arguments)
    form = _QUICK if arguments.quick else _FULL
    variants = form.variants
    if arguments.variants is not None:
        parts = arguments.variants.split(",")
        if not set(parts) <= set(VARIANTS):
            allowed = f"any of {_listed(VARIANTS)}, with commas between"
            raise wrong_option("variants", arguments.variants, allowed)
        variants = tuple(name for name in VARIANTS if name in parts)
    form = Form(
        arguments.streams or form.streams,
        variants,
        form.num_events if arguments.events is None else arguments.events,
    )
    if not all(1 <= number <= 4096 for number in form.streams):
        raise wrong_option("streams", form.streams, "integers in [1, 4096]")
    if not 8 <= form.num_events <= 3000:
        raise wrong_option("events", form.num_events, "an integer in [8, 3000]")
    return form


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _listed(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.http_front.http_front import bench_front

    return bench_front(arguments)
