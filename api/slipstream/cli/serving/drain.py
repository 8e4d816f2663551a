"""`slipstream drain`: drains replicas of a server on this machine, which then start again."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

from slipstream.cli.options.parser import Parser
from slipstream.cli.serving.event_printer import write_line
from slipstream.client.client import Client
from slipstream.client.endpoints import (
    LOCK_NAME,
    client_address,
    default_runtime_dir,
    replica_folders,
)
from slipstream.errors import SlipstreamError, missing_option, wrong_option

_WITHIN_S = 600.0
_LOOK_EVERY_S = 0.2
_ATTACH_S = 1.0


def add_drain(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce("[NAME] [options]", ("slipstream drain replica-0", "slipstream drain --all"))
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a replica of `slipstream serve --replicas`"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="all of them, each once the one before serves again: an update under load",
    )
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="with --all: for one replica to serve again, else the others are left alone "
        f"(default: {_WITHIN_S:g})",
    )
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help=f"the server's (default: {default_runtime_dir()})",
    )
    parser.set_defaults(run=drain)


def drain(arguments: argparse.Namespace) -> int:
    """Ask a replica's supervisor to drain, or those of all, one after another. Returns 1 where one
    does not serve again in time.
    """
    folder = Path(arguments.runtime_dir or default_runtime_dir()).absolute()
    names = [path.name for path in replica_folders(folder)]
    arguments.option_names |= {"name": "NAME", "all": "--all", "within": "--within"}
    if arguments.name is None and not arguments.all:
        raise missing_option("name", "a replica's name, or --all")
    if arguments.within is not None and not arguments.all:
        raise wrong_option("within", arguments.within, "nothing without --all")
    within_s = _WITHIN_S if arguments.within is None else arguments.within
    if not within_s >= 0:
        raise wrong_option("within", within_s, "a number >= 0")
    if arguments.name is not None and arguments.all:
        raise wrong_option("name", arguments.name, "nothing beside --all")
    if not names:
        raise wrong_option("runtime_dir", str(folder), "the folder of a server with replicas")
    if arguments.name is not None and arguments.name not in names:
        raise wrong_option("name", arguments.name, f"one of {', '.join(names)}")
    for name in names if arguments.all else [arguments.name]:
        supervisor = _ask(folder, name)
        write_line(sys.stdout, f"{name} drains, then starts again")
        if not arguments.all:
            break
        if not _serves_again(folder / name, supervisor, within_s):
            late = f"{name} does not serve again after {within_s:g} s"
            write_line(sys.stdout, f"{late}; the others are as before")
            return 1
        write_line(sys.stdout, f"{name} serves again")
    return 0


def _ask(folder: Path, name: str) -> int:
    """Tell a replica's supervisor to drain; its pid. Raises: BadRequestError."""
    try:
        pid = _supervisor_in(folder / name)
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        raise wrong_option("name", name, "a replica that runs") from None
    return pid


def _serves_again(folder: Path, before: int, within_s: float) -> bool:
    """True if another supervisor's replica answers in time. before: pid of the draining
    supervisor.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if _supervisor_in(folder) != before:
                Client(client_address(folder), timeout_s=_ATTACH_S).close()
                return True
        except (OSError, ValueError, SlipstreamError):
            pass  # it ends, or starts
        time.sleep(_LOOK_EVERY_S)
    return False


def _supervisor_in(folder: Path) -> int:
    """The pid of the supervisor that holds the folder's lock. Raises: FileNotFoundError,
    ProcessLookupError where it was killed, and its pid may be another process's by now.
    """
    with open(folder / LOCK_NAME) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read())
    raise ProcessLookupError
