"""`slipstream bench fuzz`: its options, reports and exit code.

The exit code is 0 if nothing died or stalled, no component logged an internal error, nothing is
left over, and the honest client got what it gets when alone; 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.fuzz.fuzz_result import FuzzResult, nothing_yet
from slipstream_ipc.atomic_file import write_atomically

if TYPE_CHECKING:
    from slipstream_bench.fuzz.request_run import RequestFuzzResult

_MESSAGES, _QUICK_MESSAGES = 1_000_000, 20_000
_PART = 100_000
_NEXT_SEED = 1_000_003  # step between the seeds of two parts
_MIB = 2**20


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    parser.add_argument(
        "--messages",
        type=int,
        metavar="N",
        help=f"default: {_MESSAGES:,}, with --quick {_QUICK_MESSAGES:,}",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="send N whole requests that ask for all there is, not messages; with --json, go on "
        "where a run of the same seed and commit was stopped",
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
    """Run and report."""
    # imports worker and core, which no other command should wait for
    from tqdm import tqdm

    from slipstream_bench.fuzz.fuzz_run import FuzzFailed, fuzz

    if arguments.requests is not None:
        return _bench_requests(arguments)
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
                write_atomically(file, encoded + b"\n", mode=0o644)
    print("\n".join(lines_of(whole)))
    return 0 if whole.is_good else 1


def _read(file: Path | None, num: int, seed: int) -> FuzzResult:
    """The result of an earlier run with the same arguments, or an empty one."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if file is not None:
            found = msgspec.json.decode(file.read_bytes(), type=FuzzResult)
            if (found.wanted, found.seed) == (num, seed):
                return found
    return nothing_yet(num, seed)


def _bench_requests(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from slipstream_bench.fuzz.fuzz_run import FuzzFailed
    from slipstream_bench.fuzz.request_run import fuzz_requests

    for name in ("messages", "requests"):
        value = getattr(arguments, name)
        if value is not None and (value < 1 or name == "messages"):
            raise wrong_option(name, value, "an integer >= 1, of messages or of requests")
    file = None if arguments.json is None else Path(arguments.json)
    begin = _begin(file, arguments.seed, arguments.requests)

    def keep(part: RequestFuzzResult) -> None:
        bar.update(part.done - bar.n)
        if file is not None:
            encoded = msgspec.json.format(msgspec.json.encode(part))
            write_atomically(file, encoded + b"\n", mode=0o644)

    shown = sys.stderr.isatty()
    with tqdm(total=begin.requests, unit="request", disable=not shown, leave=False) as bar:
        try:
            result = begin if begin.done == begin.requests else fuzz_requests(begin, keep)
        except FuzzFailed as error:
            bar.close()
            print(f"slipstream bench fuzz: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines_of_requests(result)))
    return 0 if result.is_good else 1


def _begin(file: Path | None, seed: int, num_requests: int) -> RequestFuzzResult:
    """A new run, or the state of the one in the file. Raises: BadRequestError."""
    from slipstream_bench.common.commit import commit
    from slipstream_bench.fuzz.request_run import RequestFuzzResult

    begin = RequestFuzzResult(commit=commit(), seed=seed, requests=num_requests)
    if file is None or not file.exists():
        return begin
    try:
        part = msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult)
    except msgspec.DecodeError as error:
        raise wrong_option("json", str(file), "a new file, or the result of a run") from error
    if (part.seed, part.commit) != (begin.seed, begin.commit) or part.done > num_requests:
        allowed = (
            f"a new file, as this one is of seed {part.seed}, commit {part.commit} and "
            f"{part.done} requests"
        )
        raise wrong_option("json", str(file), allowed)
    return msgspec.structs.replace(part, requests=num_requests)


def lines_of_requests(result: RequestFuzzResult) -> list[str]:
    """The result of a `--requests` run as lines of text."""
    from slipstream_bench.fuzz.request_run import MOST_STEPS

    begin, end = (num / _MIB for num in result.own_bytes)
    left = ", ".join(f"{num} {what}" for what, num in result.held.items() if num)
    kinds = ", ".join(f"{num:,} {kind}" for kind, num in sorted(result.by_kind.items()))
    outcomes = ", ".join(f"{num:,} {what}" for what, num in sorted(result.outcomes.items()))
    did = f"{result.done:,} of {result.requests:,} requests in {result.seconds:.1f} s"
    waited = f"passed over for {result.longest_wait} steps at most (allowed: {MOST_STEPS})"
    turn = f"longest turn of worker and core together: {result.longest_turn_ms:.0f} ms of CPU"
    lines = [
        f"{did}, {result.steps:,} steps, seed {result.seed}, commit {result.commit}",
        kinds,
        f"their streams: {outcomes}",
        f"honest streams beside them: {result.identical} of {result.total} identical",
        f"{waited}, beside {'; '.join(result.waited_for) or 'nothing'}",
        f"memory of its own: {begin:.0f} MiB after a tenth of them, {end:.0f} MiB at the end",
        f"{turn}, beside {'; '.join(result.slowest) or 'nothing'}",
        f"errors of their own: {result.num_errors}; left behind: {left or 'nothing'}",
    ]
    return [*lines, *result.differences, *result.errors]


def lines_of(result: FuzzResult) -> list[str]:
    """The result as lines of text."""
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
