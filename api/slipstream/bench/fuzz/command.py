"""`slipstream bench fuzz`: its options, and what its exit code says.

Owns: what may be asked for, and how a result is told. Exit code 0 where nothing died or stood
still, no part met an error of its own, nothing is left, and the honest client got what it would
have got alone; 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import msgspec

from slipstream.bench.fuzz.result import FuzzResult, nothing_yet
from slipstream.options import Parser
from slipstream.settings import wrong_option
from slipstream_ipc.whole_file import write_whole

_MESSAGES, _QUICK_MESSAGES = 1_000_000, 20_000
_PART = 100_000
_NEXT_SEED = 1_000_003  # between the seeds of two parts
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
    parser.add_argument(
        "--json",
        metavar="FILE",
        help=f"write the result there, one object, after every {_PART:,} messages; where a run of "
        "the same seed and number was ended, it goes on behind them",
    )
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
    file = None if arguments.json is None else Path(arguments.json)
    whole = _read(file, num, arguments.seed)
    with tqdm(total=num, unit="msg", disable=not sys.stderr.isatty(), leave=False) as bar:
        while whole.messages < num:
            begin = whole.messages
            bar.update(begin - bar.n)

            def tell(done: int, begin: int = begin) -> None:
                bar.update(begin + done - bar.n)

            try:
                part_seed = arguments.seed + _NEXT_SEED * whole.num_parts
                part = fuzz(min(_PART, num - begin), part_seed, tell)
            except FuzzFailed as error:
                bar.close()
                print(f"slipstream bench fuzz: {error}", file=sys.stderr)
                return 1
            whole = whole.and_then(part)
            if file is not None:
                encoded = msgspec.json.format(msgspec.json.encode(whole))
                write_whole(file, encoded + b"\n", mode=0o644)
    print("\n".join(lines_of(whole)))
    return 0 if whole.is_good else 1


def _read(file: Path | None, num: int, seed: int) -> FuzzResult:
    """What an earlier run has left there, if it was the same; else nothing yet."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if file is not None:
            found = msgspec.json.decode(file.read_bytes(), type=FuzzResult)
            if (found.wanted, found.seed) == (num, seed):
                return found
    return nothing_yet(num, seed)


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
