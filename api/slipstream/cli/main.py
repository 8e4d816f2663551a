"""`slipstream`: the command line.

Exit codes: 0 success; 1 failure or interrupt; 2 an invalid command line or configuration, with
which another run fails the same way. 1 and 2 come with one line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.cli.parser import Command, Parser, add_commands, installed_commands, one_line

_COMMANDS = {
    "serve": Command("serve a model over HTTP and to Python", "slipstream.cli.serve:add_serve"),
    "generate": Command("stream the answer to one prompt", "slipstream.cli.generate:add_generate"),
    "chat": Command("chat with a model in the terminal", "slipstream.cli.chat:add_chat"),
    "run-batch": Command("answer a file of requests", "slipstream.cli.run_batch:add_run_batch"),
    "trace": Command("show what `serve --trace` has recorded", "slipstream.cli.trace:add_trace"),
    "keys": Command("make keys for clients on other machines", "slipstream.cli.keys:add_keys"),
    "demo": Command("watch what a server survives", "slipstream.cli.demo:add_demo"),
}
_EXAMPLES = (
    "slipstream serve                      the bundled demo model, at http://127.0.0.1:8000",
    'slipstream generate "In Python,"      one answer, from the server that runs or a new one',
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # None after `>&-`
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader of our output is gone, and Python would report an error at its final flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _failed(arguments.prog, "interrupted", 1)
    except Exception as error:
        return _failed(arguments.prog, *_told(error, getattr(arguments, "sources", {})))


def _parser() -> Parser:
    parser = Parser(prog="slipstream", description="Serve language models.")
    parser.introduce("COMMAND [options]", _EXAMPLES)
    parser.epilog = "`slipstream COMMAND --help` explains a command and its options."
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    add_commands(parser, "command", {**_COMMANDS, **installed_commands()})
    return parser


def _told(error: Exception, sources: Mapping[str, str]) -> tuple[str, int]:
    """The message for an error, and the exit code. At log level DEBUG, raises unexpected errors.

    sources: files and variables that options are from, by the option's name.
    """
    from slipstream.errors import BadRequestError, SlipstreamError
    from slipstream.stack.model_source import UnreachableHubError
    from slipstream_ipc.telemetry.logs import LOG_LEVEL_VARIABLE

    if isinstance(error, BadRequestError):
        source = sources.get(error.field or "")
        code = 1 if isinstance(error, UnreachableHubError) else 2
        return one_line(error) if source is None else f"{source}: {one_line(error)}", code
    if isinstance(error, SlipstreamError | OSError):
        return one_line(error), 1
    if os.environ.get(LOG_LEVEL_VARIABLE, "").upper() == "DEBUG":
        raise error
    hint = f"a fault of Slipstream's own; {LOG_LEVEL_VARIABLE}=debug shows where"
    return f"{type(error).__name__}: {one_line(error)} ({hint})", 1


def _failed(prog: str, message: str, code: int) -> int:
    print(f"{prog}: {message}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """Shows the version, which is looked up only on use."""

    def __call__(self, parser: argparse.ArgumentParser, *_given: Any) -> None:
        from importlib.metadata import version

        print(f"slipstream {version('slipstream')}")
        parser.exit(0)


if __name__ == "__main__":
    sys.exit(main())
