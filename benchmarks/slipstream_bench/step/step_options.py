"""What `slipstream bench step` can be told.

Owns: the options, their ranges and defaults. What measures is imported when it is to measure.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from slipstream.cli_parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common

_BATCHES = (1, 64, 256, 1024)
_STEPS, _QUICK_STEPS = 512, 128
_MODEL_STEPS, _QUICK_MODEL_STEPS = 32, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `model`: a real one whose parts are told too, on the CPU."""

    batches: list[int]
    steps: int
    model_steps: int
    prompt_len: int
    runs: int
    model: str | None
    threads: int | None
    enable_prefix_caching: bool


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    listed = ",".join(map(str, _BATCHES))
    group.add_argument("--batches", metavar="N,...", help=f"requests at a time; default: {listed}")
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"decode steps of a run; default: {_STEPS}, with --quick {_QUICK_STEPS}; "
        f"of a model {_MODEL_STEPS}, with --quick {_QUICK_MODEL_STEPS}",
    )
    group.add_argument(
        "--prompt-len", type=int, metavar="N", default=128, help="tokens; default: %(default)s"
    )
    group.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="without the prefix cache",
    )
    group.add_argument(
        "--model",
        metavar="PATH",
        help="a folder or hub id: its own parts of a step too, on the CPU",
    )
    group.add_argument("--threads", type=int, metavar="N", help="that compute the model")
    add_common(parser, runs=5)
    parser.set_defaults(run=_run)


def checked(arguments: argparse.Namespace) -> Plan:
    """Refuse what cannot be. Raises: BadRequestError."""
    check_common(arguments)
    for name in ("steps", "prompt_len", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise wrong_option(name, value, "an integer >= 1")
    batches = list(_BATCHES)
    if arguments.batches is not None:
        parts = arguments.batches.split(",")
        if not all(part.isdecimal() and int(part) >= 1 for part in parts):
            raise wrong_option("batches", arguments.batches, "integers >= 1, with commas between")
        batches = [int(part) for part in parts]
    quick = arguments.quick
    return Plan(
        batches,
        arguments.steps or (_QUICK_STEPS if quick else _STEPS),
        arguments.steps or (_QUICK_MODEL_STEPS if quick else _MODEL_STEPS),
        arguments.prompt_len,
        arguments.runs,
        arguments.model,
        arguments.threads,
        arguments.enable_prefix_caching,
    )


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.step.step import bench_step

    return bench_step(arguments)
