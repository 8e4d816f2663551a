"""`slipstream serve`: a stack in the foreground, until a signal ends it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TextIO

from slipstream.endpoints import default_runtime_dir
from slipstream.events import Event, ProcessReady, StackFailed, StackReady
from slipstream.options import Parser, add_settings, given_settings
from slipstream.plan import plan_stack
from slipstream.settings import settings_from
from slipstream.supervisor import Supervisor, log_to_stderr
from slipstream_ipc.sockets import private_directory


def add_serve(parser: Parser) -> None:
    """The command's options."""
    add_settings(parser)
    parser.add_argument(
        "--runtime-dir",
        metavar="DIR",
        help=f"where its sockets lie; one stack to a folder; default: {default_runtime_dir()}",
    )
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Run a stack; the supervisor's exit code."""
    settings = settings_from(given_settings(arguments))
    if arguments.runtime_dir is None:
        folder = default_runtime_dir()
        private_directory(folder.parent)  # or who owns that one could exchange the folder
    else:
        folder = Path(arguments.runtime_dir).absolute()
    config = plan_stack(settings, folder)
    log_to_stderr()
    return Supervisor(config, _tell).run()


def _tell(event: Event) -> None:
    match event:
        case ProcessReady(name=name, pid=pid, detail=detail, seconds=seconds):
            about = f": {detail}" if detail else ""
            _write(sys.stdout, f"{name} ready (process {pid}, {seconds:.1f} s){about}")
        case StackReady(address=address):
            example = (
                f"{_program()} generate --address {shlex.quote(address)} --prompt 'In Python,'"
            )
            _write(sys.stdout, f"serving at {address}; Ctrl-C ends it. Try:\n  {example}")
        case StackFailed(error=error):
            _write(sys.stderr, f"slipstream serve: {error}")


def _program() -> str:
    """This program as the user can call it."""
    name = os.path.basename(sys.argv[0])
    found = shutil.which(name)
    return name if found and os.path.samefile(found, sys.argv[0]) else shlex.quote(sys.argv[0])


def _write(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")
    stream.flush()
