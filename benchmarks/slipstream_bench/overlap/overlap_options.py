"""The options of `slipstream bench overlap`. The measuring modules are imported only when they run,
to keep the command line fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common
from slipstream_bench.common.variants import Variant

Mode = Literal["in_loop", "in_loop_async", "worker"]
MODES: tuple[Mode, ...] = get_args(Mode)
VARIANTS: tuple[Variant, ...] = ("plain", "stop2", "logprobs5", "stop2_logprobs5")
OTHERS = ("stops", "arrivals", "latency")  # tables that replace the first one

Value = TypeVar("Value")
Name = TypeVar("Name", bound=str)


class OverlapForm(NamedTuple):
    """What is measured, and for how long."""

    batches: tuple[int, ...]
    steps_ms: tuple[float, ...]
    variants: tuple[Variant, ...]
    modes: tuple[Mode, ...]
    settle_s: float
    window_s: float


_FULL = OverlapForm((1, 32, 256, 1024), (5.0, 10.0, 19.0), VARIANTS, MODES, 0.5, 2.5)
_QUICK = OverlapForm(
    (32, 1024), (5.0,), ("plain", "stop2_logprobs5"), ("in_loop", "worker"), 0.3, 1.0
)


def add_overlap_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    for name, parse in (
        ("batches", _integers),
        ("steps_ms", _numbers),
        ("variants", _names),
        ("modes", _names),
    ):
        full, quick = (",".join(map(_shown, getattr(form, name))) for form in (_FULL, _QUICK))
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=parse,
            metavar="X,...",
            help=f"default: {full}, with --quick {quick}",
        )
    peers = parser.add_argument_group("peers (scripts/peers/README.md)")
    peers.add_argument("--against", choices=("vllm",), help="its output path in the loop, too")
    peers.add_argument("--vllm-python", metavar="PATH", help="the interpreter of its environment")
    others = parser.add_argument_group("other tables, in place of that one")
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


def checked(arguments: argparse.Namespace) -> OverlapForm:
    """Validate the options. Raises: BadRequestError."""
    check_common(arguments)
    asked = [name for name in OTHERS if getattr(arguments, name)]
    if asked and arguments.png is not None:
        raise wrong_option("png", arguments.png, f"nothing with --{asked[0]}")
    if (arguments.against is None) != (arguments.vllm_python is None):
        allowed = "--against vllm and --vllm-python PATH, both or none"
        raise wrong_option("against", arguments.against, allowed)
    form = _QUICK if arguments.quick else _FULL
    form = form._replace(
        batches=arguments.batches or form.batches,
        steps_ms=arguments.steps_ms or form.steps_ms,
        variants=_known("variants", arguments.variants, VARIANTS) or form.variants,
        modes=_known("modes", arguments.modes, MODES) or form.modes,
    )
    _check("batches", form.batches, lambda value: 1 <= value <= 4096, "integers in [1, 4096]")
    _check("steps_ms", form.steps_ms, lambda value: 1 <= value <= 1000, "numbers in [1, 1000]")
    return form


def _known(name: str, given: Sequence[str] | None, known: Sequence[Name]) -> tuple[Name, ...]:
    for value in given or ():
        if value not in known:
            raise wrong_option(name, value, "any of " + ", ".join(known))
    return tuple(one for value in given or () for one in known if one == value)


def _check(
    name: str, values: Sequence[Value], is_allowed: Callable[[Value], bool], allowed: str
) -> None:
    for value in values:
        if not is_allowed(value):
            raise wrong_option(name, value, allowed)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
