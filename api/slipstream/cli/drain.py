"""`slipstream drain`: drains a replica of a server on this machine, which then starts again."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from pathlib import Path

from slipstream.cli.options.parser import Parser
from slipstream.client.endpoints import LOCK_NAME, default_runtime_dir, replica_folders
from slipstream.errors import wrong_option


def add_drain(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce("NAME [options]", ("slipstream drain replica-0",))
    parser.add_argument("name", metavar="NAME", help="a replica of `slipstream serve --replicas`")
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help=f"the server's (default: {default_runtime_dir()})",
    )
    parser.set_defaults(run=drain)


def drain(arguments: argparse.Namespace) -> int:
    """Ask the replica's supervisor to drain."""
    folder = Path(arguments.runtime_dir or default_runtime_dir()).absolute()
    names = [path.name for path in replica_folders(folder)]
    arguments.option_names["name"] = "NAME"
    if arguments.name not in names:
        allowed = f"one of {', '.join(names)}" if names else f"a server with replicas in {folder}"
        raise wrong_option("name", arguments.name, allowed)
    try:
        os.kill(_supervisor_in(folder / arguments.name), signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        raise wrong_option("name", arguments.name, "a replica that runs") from None
    sys.stdout.write(f"{arguments.name} drains, then starts again\n")
    return 0


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
