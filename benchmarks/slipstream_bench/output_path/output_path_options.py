"""What `slipstream bench output-path` can be told.

Owns: the options, their ranges and defaults. Does not know: what they do. What measures is imported
when it is to measure: the command line is not to wait for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slipstream.cli_parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import wrong_option
from slipstream_bench.common.report_options import add_common, check_common
from slipstream_bench.common.variants import VARIANTS, Variant
from slipstream_bench.output_path.peers import PEERS, Peer, check_peer

_BATCHES = (1, 32, 256, 1024)
_QUICK_BATCHES = (1, 256)
_STEPS, _QUICK_STEPS = 128, 64

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `pythons`: each peer's interpreter."""

    batches: list[int]
    variants: list[Variant]
    steps: int
    runs: int
    tokenizer: Path  # its tokenizer.json
    pythons: dict[Peer, str]


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--batches",
        metavar="N,...",
        help=f"requests at a time; default: {_listed(_BATCHES)}, "
        f"with --quick {_listed(_QUICK_BATCHES)}",
    )
    group.add_argument(
        "--variants", metavar="NAME,...", default=_listed(VARIANTS), help="default: %(default)s"
    )
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"of a run; default: {_STEPS}, with --quick {_QUICK_STEPS}",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        default=str(MODEL_PATH),
        help="a folder with a tokenizer.json, for SGLang with a model's config.json too; "
        "default: the demo model's",
    )
    peers = parser.add_argument_group("peers (scripts/peers/README.md)")
    peers.add_argument("--against", metavar="NAME,...", help=f"any of {_listed(PEERS)}")
    for peer in PEERS:
        peers.add_argument(
            f"--{peer}-python", metavar="PATH", help="the interpreter of its environment"
        )
    add_common(parser, runs=5)
    parser.set_defaults(run=_run)


def checked(arguments: argparse.Namespace) -> Plan:
    """Refuse what cannot be. Raises: BadRequestError."""
    check_common(arguments)
    steps = arguments.steps
    if steps is None:
        steps = _QUICK_STEPS if arguments.quick else _STEPS
    if steps < 2:
        raise wrong_option("steps", steps, "an integer >= 2")
    given = Path(arguments.tokenizer)
    tokenizer = given / "tokenizer.json" if given.is_dir() else given
    if not tokenizer.is_file():
        allowed = "a tokenizer.json, or a folder with one"
        raise wrong_option("tokenizer", arguments.tokenizer, allowed)
    pythons: dict[Peer, str] = {}
    wanted = arguments.against
    for peer in _chosen("against", wanted, PEERS) if wanted is not None else ():
        pythons[peer] = check_peer(peer, getattr(arguments, f"{peer}_python"))
    return Plan(
        _batches(arguments),
        _chosen("variants", arguments.variants, VARIANTS),
        steps,
        arguments.runs,
        tokenizer.absolute(),
        pythons,
    )


def _run(arguments: argparse.Namespace) -> int:
    from slipstream_bench.output_path.output_path import bench_output_path

    return bench_output_path(arguments)


def _batches(arguments: argparse.Namespace) -> list[int]:
    if arguments.batches is None:
        return list(_QUICK_BATCHES if arguments.quick else _BATCHES)
    parts = arguments.batches.split(",")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise wrong_option("batches", arguments.batches, "integers >= 1, with commas between")
    return list(map(int, parts))


def _chosen(option: str, given: str, known: Sequence[Name]) -> list[Name]:
    parts = given.split(",")
    if not set(parts) <= set(known):
        raise wrong_option(option, given, f"any of {_listed(known)}, with commas between")
    return [name for name in known if name in parts]


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values))
