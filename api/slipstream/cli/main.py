"""`slipstream`: the command line.

Exit codes: 0 success; 1 failure or interrupt; 2 an invalid command line or configuration, with
which another run fails the same way. 1 and 2 come with one line on standard error, or with the help
page where a command is missing; 3 (`run-batch`) some answers are errors.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.cli.options.option_names import with_option_names
from slipstream.cli.options.parser import (
    Command,
    Parser,
    add_commands,
    installed_commands,
    one_line,
)

_COMMANDS = {
    "serve": Command(
        "serve a model over HTTP and to Python", "slipstream.cli.serving.serve:add_serve"
    ),
    "chat": Command("ask a question, or chat in the terminal", "slipstream.cli.chat:add_chat"),
    "generate": Command("continue a text", "slipstream.cli.generate:add_generate"),
    "run-batch": Command("answer a file of requests", "slipstream.cli.run_batch:add_run_batch"),
    "route": Command(
        "serve HTTP over servers that run elsewhere", "slipstream.cli.serving.route:add_route"
    ),
    "replicas": Command(
        "show what the replicas of a server do", "slipstream.cli.serving.replicas:add_replicas"
    ),
    "drain": Command(
        "drain a replica, and start it again", "slipstream.cli.serving.drain:add_drain"
    ),
    "ray": Command("run replicas on a Ray cluster", "slipstream.cli.serving.ray:add_ray"),
    "formats": Command(
        "list how answers are written, or say how a model's are",
        "slipstream.cli.formats:add_formats",
    ),
    "trace": Command("show what `serve --trace` has recorded", "slipstream.cli.trace:add_trace"),
    "keys": Command("make keys for clients on other machines", "slipstream.cli.keys:add_keys"),
    "demo": Command("watch what a server survives", "slipstream.cli.demo:add_demo"),
}
_EXAMPLES = (
    "slipstream serve                      the bundled demo model, at http://127.0.0.1:8000",
    'slipstream chat "What are lambdas?"   one answer, from the running server or a new one',
)

_UTF8_VARIABLE = "PYTHONUTF8"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if argv is None:
        _use_utf8()
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command != "serve":  # whose log has them
            for note in arguments.notes:
                print(f"{arguments.prog}: {note}", file=sys.stderr)
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
        names = {**arguments.option_names, **getattr(arguments, "sources", {})}
        return _failed(arguments.prog, *_message_and_code(error, names))


def _use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if it takes all texts for ASCII (the locale C,
    with PYTHONUTF8=0). Children inherit the mode; names of files and models are not ASCII.
    """
    is_ascii = codecs.lookup(sys.getfilesystemencoding()).name == "ascii"
    if is_ascii and os.environ.get(_UTF8_VARIABLE) != "1":
        os.environ[_UTF8_VARIABLE] = "1"
        again = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execv(sys.executable, again)  # noqa: S606  (this command itself)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # of characters that a locale lacks


def _parser() -> Parser:
    parser = Parser(prog="slipstream", description="Serve language models.")
    parser.introduce("COMMAND [options]", _EXAMPLES)
    parser.epilog = "`slipstream COMMAND --help` explains a command and its options."
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    add_commands(parser, "command", {**_COMMANDS, **installed_commands()})
    return parser


def _message_and_code(error: Exception, names: Mapping[str, str]) -> tuple[str, int]:
    """The message for an error, and the exit code. At log level DEBUG, raises unexpected errors.

    names: what each option is called, or the line or the variable that it is from.
    """
    from slipstream.errors import BadRequestError, SlipstreamError
    from slipstream.stack.plan.models.model_source import UnreachableHubError
    from slipstream_ipc.telemetry.logs import LOG_LEVEL_VARIABLE

    if isinstance(error, BadRequestError):
        code = 1 if isinstance(error, UnreachableHubError) else 2
        return with_option_names(one_line(error), names, error.field), code
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}", 1
    if isinstance(error, SlipstreamError | OSError):
        return with_option_names(one_line(error), names), 1
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
