"""`slipstream bench fuzz`: its options, and what its exit code says.

Owns: what may be asked for, and how a result is told. Exit code 0 where nothing died or stood
still, no part met an error of its own, nothing is left, and the honest client got what it would
have got alone; 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.options import Parser
from slipstream.settings import wrong_option

if TYPE_CHECKING:
    from slipstream.bench.fuzz.run import FuzzResult

_MESSAGES, _QUICK_MESSAGES = 1_000_000, 20_000
_MIB = 2**20


def add_fuzz(parser: Parser) -> None:
    """The benchmark's options."""
    parser.add_argument(
        "--messages",
        type=int,
        metavar="N",
        help=f"default: {_MESSAGES:,}, with --quick {_QUICK_MESSAGES:,}",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="default: 0")
    parser.add_argument("--quick", action="store_true", help="a small form, in some seconds")
    parser.add_argument("--json", metavar="FILE", help="write the result there, one object")
    parser.set_defaults(run=bench_fuzz)


def bench_fuzz(arguments: argparse.Namespace) -> int:
    """Run it and tell what came of it."""
    # worker and core: no other command is to wait for their imports
    from tqdm import tqdm

    from slipstream.bench.fuzz.run import FuzzFailed, fuzz

    num = arguments.messages
    if num is None:
        num = _QUICK_MESSAGES if arguments.quick else _MESSAGES
    if num < 1:
        raise wrong_option("messages", num, "an integer >= 1")
    with tqdm(total=num, unit="msg", disable=not sys.stderr.isatty(), leave=False) as bar:
        try:
            result = fuzz(num, arguments.seed, lambda done: bar.update(done - bar.n))
        except FuzzFailed as error:
            bar.close()
            print(f"slipstream bench fuzz: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines_of(result)))
    if arguments.json is not None:
        Path(arguments.json).write_bytes(
            msgspec.json.format(msgspec.json.encode(msgspec.structs.asdict(result))) + b"\n"
        )
    return 0 if result.is_good else 1


def lines_of(result: FuzzResult) -> list[str]:
    """A result as people read it."""
    kinds = ", ".join(f"{num:,} {kind}" for kind, num in result.by_kind.items())
    rate = result.messages / result.seconds
    begin, end = result.rss_start / _MIB, result.rss_end / _MIB
    left = ", ".join(f"{num} {what}" for what, num in result.held.items() if num)
    speed = f"{result.seconds:.1f} s ({rate:,.0f}/s)"
    lines = [
        f"{result.messages:,} messages in {speed}, seed {result.seed}",
        kinds,
        f"streams that attackers were given: {result.admitted:,}; refusals: {result.refused:,}",
        f"honest streams beside them: {result.identical} of {result.total} identical",
        f"memory: {begin:.0f} MiB after a tenth of them, {end:.0f} MiB at the end",
        f"longest turn of worker and core together: {result.longest_turn_ms:.0f} ms of CPU",
        f"errors of their own: {result.num_errors}; left behind: {left or 'nothing'}",
    ]
    return [*lines, *result.differences, *result.errors]
