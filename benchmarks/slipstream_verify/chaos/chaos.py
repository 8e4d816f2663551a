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

from slipstream.cli.options.parser import Parser
from slipstream.client.placing.discovery import MAX_MEMBERS
from slipstream.errors import wrong_option
from slipstream.stack.plan.log_level import log_level
from slipstream_bench.common.options import (
    Option,
    OptionType,
    add,
    fill_in,
    integer,
    name_of,
    number,
)
from slipstream_bench.common.report import add_result, check_files, write_result
from slipstream_ipc.messages import MAX_OUTPUT_WORKERS
from slipstream_verify.chaos.chaos_report import lines_of
from slipstream_verify.chaos.chaos_run import Options, chaos
from slipstream_verify.chaos.schedule import KILLED, LIMITED, FaultKinds, Target
from slipstream_verify.chaos.workload.played_formats import (
    ANY_FORMAT,
    PLAYED_FORMATS,
    find_played_format,
)


def _targets(allowed: tuple[Target, ...]) -> OptionType:
    def parse(text: str) -> tuple[str, ...]:
        """In the order of `allowed`; names that are not allowed are kept, and refused."""
        parts = [part for part in text.split(",") if part and part != "none"]
        return tuple(sorted(parts, key=lambda part: [*allowed, part].index(part)))

    names = f"of {','.join(allowed)}, or none"
    return OptionType(
        parse, lambda targets: set(targets) <= set(allowed), names, "NAME,...", is_list=True
    )


def _lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


_LENGTHS = OptionType(
    _lengths,
    lambda lengths: 1 <= lengths[0] <= lengths[1],
    "LOW-HIGH, two integers >= 1, the lower one first",
    "LOW-HIGH",
    is_list=True,
)
_ROUNDS = 20
_KILLED_ALONE: tuple[Target, ...] = ("worker", "core", "client", "front")
_REQUESTS = (
    Option("requests", integer(1), "how many", 500, 60),
    Option("tokens", _LENGTHS, "of the answers; default: 20-600, with --quick 50-400"),
    Option("concurrency", integer(1), "requests at a time", 64, 24),
    Option("clients", integer(1), "client processes", 4),
    Option("http_workers", integer(1), "HTTP fronts", 1),
    Option(
        "replicas",
        integer(1, MAX_MEMBERS),
        "replicas behind one address; with several, a fault of worker, core or prompts hits that "
        "of any of them",
        1,
    ),
    Option(
        "output_workers",
        integer(1, MAX_OUTPUT_WORKERS),
        "output workers; a fault of `worker` hits any of them",
        1,
    ),
    Option("tensor_parallel_size", integer(1, 64), "ranks of the core, of a real model", 1),
    Option(
        "answers",
        name_of((*PLAYED_FORMATS, ANY_FORMAT)),
        f"play answers with reasoning and tool calls, written in this format ({ANY_FORMAT}: the "
        "seed chooses), and compare their events; default: the model's own texts",
    ),
)
_FAULTS = (
    Option(
        "kill",
        _targets(KILLED),
        "by SIGKILL, at random moments, and every combination of two or more of worker, core, "
        "front and client within a second, and of a replica with each; prompts: the tokenizer "
        "process; rank: of the core; default: worker,core,front,client, and replica where there "
        "are several",
    ),
    Option(
        "stop",
        _targets(KILLED),
        "by SIGSTOP, as a process that hangs; clients and replicas, as a machine that is silent, "
        "are continued after a while; default: none",
    ),
    Option(
        "limit_files",
        _targets(LIMITED),
        "worker, core, front: for some seconds it can open no further file; default: none",
    ),
    Option(
        "rounds",
        integer(0),
        f"of faults; default: as many as it takes for each to occur, {_ROUNDS} at least, with "
        "--quick 6",
    ),
    Option(
        "hang_timeout_s",
        number(lambda value: value >= 1, "seconds, >= 1"),
        "silence after which a process counts as hung",
        3.0,
    ),
    Option("seed", integer(0), "of requests and faults", 0),
)
_TIMEOUT = Option(
    "timeout_s",
    number(lambda value: value > 0, "seconds, > 0"),
    "the requests have to be over by then",
    900.0,
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder, a hub id, slipstream-demo or simulated:OPTION=VALUE,...; default: a "
        "simulated model each of whose tokens depends on all before it",
    )
    requests.add_argument(
        "--hybrid",
        action="store_true",
        help="a tiny model with recurrent states, of random weights in the shape of Qwen3.5",
    )
    requests.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="of the stack under faults; the undisturbed one drafts nothing",
    )
    add(requests, _REQUESTS)
    faults = parser.add_argument_group("faults")
    add(faults, _FAULTS)
    faults.add_argument(
        "--fill-disk",
        action="store_true",
        help="the disk under runtime and cache folders is full for some seconds (where a tmpfs "
        "can be mounted)",
    )
    faults.add_argument(
        "--drain-replicas",
        action="store_true",
        help="a replica drains and starts again, as in a rolling update",
    )
    faults.add_argument(
        "--no-spares", action="store_true", help="without spares that take a dead process's place"
    )
    report = parser.add_argument_group("report")
    add_result(report)
    report.add_argument(
        "--keep", metavar="FOLDER", help="keep the clients' journals and the stack's log there"
    )
    add(report, (_TIMEOUT,))
    report.add_argument("--verbose", action="store_true", help="show the processes' logs")
    parser.set_defaults(run=bench_chaos)


def bench_chaos(arguments: argparse.Namespace) -> int:
    """Run and report. Raises: BadRequestError."""
    options = _options(arguments)
    level = "INFO" if arguments.verbose or arguments.keep is not None else "ERROR"
    with (
        log_level(level),
        _folder(arguments.keep) as folder,
        _log_to(folder, arguments.keep is not None),
    ):
        result = chaos(options, folder, _print_progress)
    print("\n".join(lines_of(result)), flush=True)
    write_result(arguments.json, result)
    return 0 if result.is_good else 1


def _options(arguments: argparse.Namespace) -> Options:
    """Validate the options. Raises: BadRequestError."""
    check_files(arguments)
    keep = arguments.keep
    if keep is not None and not (Path(keep).is_dir() and os.access(keep, os.W_OK)):
        raise wrong_option("keep", keep, "a folder that exists and can be written to")
    fill_in(arguments, (*_REQUESTS, *_FAULTS, _TIMEOUT))
    has_replicas = arguments.replicas > 1
    kill = arguments.kill
    if kill is None:
        kill = (*_KILLED_ALONE, "replica") if has_replicas else _KILLED_ALONE
    faults = FaultKinds(
        kill,
        arguments.stop or (),
        arguments.limit_files or (),
        arguments.fill_disk,
        arguments.drain_replicas,
    )
    if not has_replicas and any(target == "replica" for target, _ in faults.kinds):
        raise wrong_option("replicas", arguments.replicas, "at least 2 for a fault of a replica")
    if has_replicas and arguments.fill_disk:
        raise wrong_option("replicas", arguments.replicas, "1 with --fill-disk")
    rounds = arguments.rounds
    if rounds is None:
        rounds = 6 if arguments.quick else max(_ROUNDS, faults.num_rounds)
    if arguments.hybrid and arguments.model is not None:
        raise wrong_option("model", arguments.model, "nothing beside --hybrid")
    played = None
    if arguments.answers is not None:
        if arguments.model is not None or arguments.hybrid:
            other = "--hybrid" if arguments.hybrid else "--model"
            raise wrong_option("answers", arguments.answers, f"nothing beside {other}")
        played = find_played_format(arguments.answers, arguments.seed)
    low, high = arguments.tokens or ((50, 400) if arguments.quick else (20, 600))
    return Options(
        model=arguments.model,
        num_requests=arguments.requests,
        faults=faults,
        seed=arguments.seed,
        num_rounds=rounds,
        concurrency=arguments.concurrency,
        num_clients=arguments.clients,
        min_len=low,
        max_len=high,
        hang_timeout_s=arguments.hang_timeout_s,
        timeout_s=arguments.timeout_s,
        has_spares=not arguments.no_spares,
        is_quick=arguments.quick,
        num_fronts=arguments.http_workers,
        num_workers=arguments.output_workers,
        num_replicas=arguments.replicas,
        num_ranks=arguments.tensor_parallel_size,
        played=played,
        is_hybrid=arguments.hybrid,
        speculative_config=arguments.speculative_config,
    )


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


def _print_progress(what: str) -> None:
    print(f"{what} ...", flush=True)
