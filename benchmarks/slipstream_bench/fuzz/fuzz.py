"""`slipstream bench fuzz`: its options, reports and exit code.

The exit code is 0 if nothing died or stalled, no component logged an internal error, nothing is
left over, and the honest client got what it gets when alone; 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import msgspec
from tqdm import tqdm

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.provenance import commit
from slipstream_bench.common.report import check_files, write_result
from slipstream_bench.fuzz.fuzz_run import FuzzFailed, FuzzResult, fuzz
from slipstream_bench.fuzz.request_run import MOST_STEPS, RequestFuzzResult, fuzz_requests

_PART = 100_000
_NEXT_SEED = 1_000_003  # step between the seeds of two parts
_MIB = 2**20
_OPTIONS = (
    Option(
        "messages",
        integer(1),
        "number of malformed messages; default: 1,000,000, with --quick 20,000",
    ),
    Option(
        "requests",
        integer(1),
        "send N extreme but well-formed requests instead of messages; with --json, continue a "
        "stopped run of the same seed and commit",
    ),
    Option("seed", integer(0), "of the messages or requests", 0),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser, _OPTIONS)
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
    check_files(arguments)
    fill_in(arguments, _OPTIONS)
    if arguments.requests is not None:
        return _bench_requests(arguments)
    num = arguments.messages or (20_000 if arguments.quick else 1_000_000)
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
            write_result(file, whole)
    print("\n".join(lines_of(whole)))
    return 0 if whole.is_good else 1


def _read(file: Path | None, num: int, seed: int) -> FuzzResult:
    """The result of an earlier run with the same arguments, or an empty one."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if file is not None:
            found = msgspec.json.decode(file.read_bytes(), type=FuzzResult)
            if (found.wanted, found.seed) == (num, seed):
                return found
    return FuzzResult(seed=seed, wanted=num, num_parts=0)


def _bench_requests(arguments: argparse.Namespace) -> int:
    if arguments.messages is not None:
        raise wrong_option("messages", arguments.messages, "nothing where --requests is given")
    file = None if arguments.json is None else Path(arguments.json)
    begin = _begin(file, arguments.seed, arguments.requests)

    def keep(part: RequestFuzzResult) -> None:
        bar.update(part.done - bar.n)
        write_result(file, part)

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
        f"anonymous memory: {begin:.0f} MiB after a tenth of them, {end:.0f} MiB at the end",
        f"{turn}, beside {'; '.join(result.slowest) or 'nothing'}",
        f"internal errors: {result.num_errors}; left behind: {left or 'nothing'}",
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
        f"attackers: {result.admitted:,} streams admitted, {result.refused:,} messages refused",
        f"honest streams beside them: {result.identical} of {result.total} identical",
        f"memory: {begin:.0f} MiB after a tenth of them, {end:.0f} MiB at the end",
        f"longest turn of worker and core together: {result.longest_turn_ms:.0f} ms of CPU",
        f"internal errors: {result.num_errors}; left behind: {left or 'nothing'}",
    ]
    return [*lines, *result.differences, *result.errors]
