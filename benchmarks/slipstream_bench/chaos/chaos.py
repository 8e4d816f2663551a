"""`slipstream bench chaos`: its options and exit code.

The exit code is 0 if every answer is identical, nothing was lost or doubled, and no process was
left behind; 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream.stack.log_level import log_level
from slipstream_bench.chaos.chaos_report import json_of, lines_of
from slipstream_bench.chaos.chaos_run import Options, chaos
from slipstream_bench.chaos.schedule import KILLED, LIMITED, Blows, Place
from slipstream_ipc.atomic_file import write_atomically

_LENGTHS = (20, 600)
_QUICK_LENGTHS = (50, 400)
_CONCURRENCY = 64
_QUICK_CONCURRENCY = 24
_ROUNDS = 20
_QUICK_ROUNDS = 6


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    group = parser.add_argument_group("what is asked for")
    group.add_argument("--requests", type=int, metavar="N", help="default: 500, with --quick 60")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder, a hub id, slipstream-demo or simulated:OPTION=VALUE,...; default: a "
        "simulated model each of whose tokens depends on all before it",
    )
    group.add_argument(
        "--tokens",
        metavar="LOW-HIGH",
        help="of the answers; default: {}-{}, with --quick {}-{}".format(
            *_LENGTHS, *_QUICK_LENGTHS
        ),
    )
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"requests at a time; default: {_CONCURRENCY}, with --quick {_QUICK_CONCURRENCY}",
    )
    group.add_argument(
        "--clients", type=int, metavar="N", default=4, help="client processes; default: %(default)s"
    )
    group.add_argument(
        "--http-workers", type=int, metavar="N", default=1, help="fronts; default: %(default)s"
    )
    blows = parser.add_argument_group("what is done")
    blows.add_argument(
        "--kill",
        metavar="WHO,...",
        default="worker,core,client,front",
        help="by SIGKILL, at random moments, and every combination of two or more of worker, core, "
        "front and client within a second; prompts: the prompt process; none: nobody; "
        "default: %(default)s",
    )
    blows.add_argument(
        "--stop",
        metavar="WHO,...",
        default="none",
        help="by SIGSTOP, as a process that hangs; clients are continued after a while; "
        "default: %(default)s",
    )
    blows.add_argument(
        "--limit-files",
        metavar="WHO,...",
        default="none",
        help="worker, core, front: for some seconds it can open no further file; "
        "default: %(default)s",
    )
    blows.add_argument(
        "--fill-disk",
        action="store_true",
        help="the disk under runtime and cache folders is full for some seconds (where a tmpfs "
        "can be mounted)",
    )
    blows.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"of blows; default: as many as it takes for each to come, {_ROUNDS} at least, with "
        f"--quick {_QUICK_ROUNDS}",
    )
    blows.add_argument(
        "--hang-timeout-s",
        type=float,
        metavar="X",
        default=3.0,
        help="silence after which a process counts as hung; default: %(default)s",
    )
    blows.add_argument(
        "--no-spares", action="store_true", help="nobody waits to take a dead one's place"
    )
    blows.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of requests and blows; default: 0"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--quick", action="store_true", help="a small form, in under 60 s")
    report.add_argument("--json", metavar="FILE", help="write the result there, one object")
    report.add_argument(
        "--keep", metavar="FOLDER", help="what every client read, and the stack's log, go there"
    )
    report.add_argument(
        "--timeout-s",
        type=float,
        metavar="X",
        default=900.0,
        help="the requests have to be over by then; default: %(default)s",
    )
    report.add_argument("--verbose", action="store_true", help="show the processes' logs")
    parser.set_defaults(run=bench_chaos)


def bench_chaos(arguments: argparse.Namespace) -> int:
    """Run and report. Raises: BadRequestError."""
    options = _options(arguments)
    for name in ("json", "keep"):
        _check_place(name, getattr(arguments, name))
    level = "INFO" if arguments.verbose or arguments.keep is not None else "ERROR"
    with (
        log_level(level),
        _folder(arguments.keep) as folder,
        _log_to(folder, arguments.keep is not None),
    ):
        result = chaos(options, folder, _tell)
    print("\n".join(lines_of(result)), flush=True)
    if arguments.json is not None:
        write_atomically(Path(arguments.json), json_of(result), mode=0o644)
    return 0 if result.is_good else 1


def _options(arguments: argparse.Namespace) -> Options:
    is_quick = arguments.quick
    num_requests = arguments.requests
    if num_requests is None:
        num_requests = 60 if is_quick else 500
    blows = Blows(
        _places("kill", arguments.kill, KILLED),
        _places("stop", arguments.stop, KILLED),
        _places("limit_files", arguments.limit_files, LIMITED),
        arguments.fill_disk,
    )
    rounds = arguments.rounds
    if rounds is None:
        rounds = _QUICK_ROUNDS if is_quick else max(_ROUNDS, blows.num_rounds)
    concurrency = arguments.concurrency
    if concurrency is None:
        concurrency = _QUICK_CONCURRENCY if is_quick else _CONCURRENCY
    for name, value, least in (
        ("requests", num_requests, 1),
        ("rounds", rounds, 0),
        ("concurrency", concurrency, 1),
        ("clients", arguments.clients, 1),
        ("seed", arguments.seed, 0),
        ("http_workers", arguments.http_workers, 1),
        ("hang_timeout_s", arguments.hang_timeout_s, 1),
    ):
        if value < least:
            raise wrong_option(name, value, f"a number >= {least}")
    low, high = _lengths(arguments.tokens, _QUICK_LENGTHS if is_quick else _LENGTHS)
    return Options(
        model=arguments.model,
        num_requests=num_requests,
        blows=blows,
        seed=arguments.seed,
        num_rounds=rounds,
        concurrency=concurrency,
        num_clients=arguments.clients,
        min_len=low,
        max_len=high,
        hang_timeout_s=arguments.hang_timeout_s,
        timeout_s=arguments.timeout_s,
        has_spares=not arguments.no_spares,
        is_quick=is_quick,
        num_fronts=arguments.http_workers,
    )


def _places(name: str, given: str, allowed: tuple[Place, ...]) -> tuple[Place, ...]:
    parts = [part for part in given.split(",") if part and part != "none"]
    if not set(parts) <= set(allowed):
        raise wrong_option(name, given, f"of {','.join(allowed)}, or none")
    return tuple(place for place in allowed if place in parts)


def _lengths(given: str | None, default: tuple[int, int]) -> tuple[int, int]:
    if given is None:
        return default
    low, _, high = given.partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
        raise wrong_option("tokens", given, "LOW-HIGH, two integers >= 1, the lower one first")
    return int(low), int(high or low)


def _check_place(name: str, given: str | None) -> None:
    if given is None:
        return
    folder = Path(given) if name == "keep" else Path(given).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise wrong_option(name, given, "in a folder that exists and can be written to")


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-chaos-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _log_to(folder: Path, is_wanted: bool) -> Iterator[None]:
    """Write the standard error of all processes started inside to a file in `folder`."""
    if not is_wanted:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    with (folder / "stack.log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _tell(what: str) -> None:
    print(f"{what} ...", flush=True)
