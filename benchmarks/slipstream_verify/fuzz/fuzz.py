"""`slipstream bench fuzz`: its options, reports and exit code.

The exit code is 0 if nothing died or stalled, no component logged an internal error, nothing is
left over, and the honest client got what it gets when alone; 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path

import msgspec
from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.errors import wrong_option
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.report import Row, check_files, table, write_result
from slipstream_verify.fuzz.fuzz_run import FuzzFailed, FuzzResult, fuzz
from slipstream_verify.fuzz.http_run import HttpFuzzResult, fuzz_http
from slipstream_verify.fuzz.request_run import (
    MOST_STEPS,
    RequestFuzzResult,
    Sitting,
    fuzz_requests,
)

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
        "send N extreme but well-formed requests instead of messages; with --json, go on behind "
        "those that the file has, of any commit",
    ),
    Option("http", integer(1), "send N HTTP requests to a front, well-formed, extreme or damaged"),
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
    if arguments.http is not None:
        return _bench_http(arguments)
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
    before = _read_requests(file, arguments.seed, arguments.requests)
    result, num = before, arguments.requests
    with tqdm(
        total=num, initial=before.done, unit="request", disable=not sys.stderr.isatty(), leave=False
    ) as bar:
        try:
            for sitting in fuzz_requests(before.seed, before.done, num):
                result = msgspec.structs.replace(before, sittings=(*before.sittings, sitting))
                write_result(file, result)
                bar.update(result.done - bar.n)
        except FuzzFailed as error:
            bar.close()
            print(f"slipstream bench fuzz: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines_of_requests(result)))
    return 0 if result.is_good else 1


def _bench_http(arguments: argparse.Namespace) -> int:
    for name in ("messages", "requests"):
        if (given := getattr(arguments, name)) is not None:
            raise wrong_option(name, given, "nothing where --http is given")
    file = None if arguments.json is None else Path(arguments.json)
    is_shown = sys.stderr.isatty()
    with tqdm(total=arguments.http, unit="request", disable=not is_shown, leave=False) as bar:
        try:
            result = fuzz_http(arguments.http, arguments.seed, lambda num: bar.update(num - bar.n))
        except FuzzFailed as error:
            bar.close()
            print(f"slipstream bench fuzz: {error}", file=sys.stderr)
            return 1
    write_result(file, result)
    print("\n".join(lines_of_http(result)))
    return 0 if result.is_good else 1


def lines_of_http(result: HttpFuzzResult) -> list[str]:
    """The result of a `--http` run as lines of text."""
    rate = result.requests / result.seconds
    classes = Counter[str]()
    for status, num in result.statuses.items():
        classes[f"{status[0]}xx"] += num
    return [
        (
            f"{result.requests:,} requests in {result.seconds:.1f} s ({rate:,.0f}/s), "
            f"seed {result.seed}"
        ),
        ", ".join(f"{num:,} {kind}" for kind, num in result.by_kind.items()),
        "answered: " + ", ".join(f"{num:,} {each}" for each, num in sorted(classes.items())),
        f"longest /version: {result.longest_version_cpu_s:.2f} s of the front's CPU",
        f"the front's memory: {result.begin_mib:.0f} MiB before, {result.end_mib:.0f} MiB behind",
        f"wrong: {result.num_wrong or 'nothing'}",
        *result.wrong,
    ]


def _read_requests(file: Path | None, seed: int, num_requests: int) -> RequestFuzzResult:
    """The earlier sittings, or none. Raises: BadRequestError."""
    if file is None or not file.exists():
        return RequestFuzzResult(seed=seed)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult)
    except msgspec.DecodeError as error:
        raise wrong_option("json", str(file), "a new file, or the result of a run") from error
    if found.seed != seed or found.done > num_requests:
        allowed = f"a new file, as this one has {found.done} requests of seed {found.seed}"
        raise wrong_option("json", str(file), allowed)
    return found


def lines_of_requests(result: RequestFuzzResult) -> list[str]:
    """The result of a `--requests` run as lines of text."""
    every = result.sittings
    kinds, outcomes, held = (
        sum(map(Counter, counts), Counter())
        for counts in (
            [each.by_kind for each in every],
            [each.outcomes for each in every],
            [each.held or {} for each in every],
        )
    )
    identical = sum(each.identical for each in every)
    total = sum(each.total for each in every)
    waited = max(every, key=lambda each: each.longest_wait)
    slowest = max(every, key=lambda each: each.longest_turn_ms)
    longest = f"{waited.longest_wait} steps at most (allowed: {MOST_STEPS})"
    turn = f"{slowest.longest_turn_ms:.0f} ms of CPU"
    left = ", ".join(f"{num} {what}" for what, num in held.items()) or "nothing"
    num_errors = sum(each.num_errors for each in every)
    lines = [
        f"{result.done:,} requests of seed {result.seed}",
        ", ".join(f"{num:,} {kind}" for kind, num in sorted(kinds.items())),
        "their streams: " + ", ".join(f"{num:,} {what}" for what, num in sorted(outcomes.items())),
        f"honest streams beside them: {identical} of {total} identical",
        f"passed over for {longest}, beside {'; '.join(waited.waited_for) or 'nothing'}",
        f"longest turn of worker and core together: {turn}, beside "
        + ("; ".join(slowest.slowest) or "nothing"),
        f"internal errors: {num_errors}; left behind: {left}",
        "",
        *table([_row(each) for each in every]),
    ]
    return [*lines, *(line for each in every for line in (*each.differences, *each.errors))]


def _row(sitting: Sitting) -> Row:
    first, last = (num / _MIB for num in sitting.own_bytes)
    return {
        "commit": sitting.commit or "unknown",
        "begin": sitting.begin,
        "end": sitting.end,
        "seconds": sitting.seconds,
        "steps": sitting.steps,
        "identical": sitting.identical,
        "total": sitting.total,
        "longest_wait": sitting.longest_wait,
        "longest_turn_ms": sitting.longest_turn_ms,
        "first_mib": first,
        "last_mib": last,
    }


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
