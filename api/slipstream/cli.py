"""`slipstream`: the command line.

Owns: which commands there are, and how they end: 0 done, 1 failed or interrupted, 2 asked for
what cannot be, with one plain line on standard error. Does not know: what the commands do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from slipstream.chat import add_chat
from slipstream.cli_parser import Parser, installed_commands, one_line
from slipstream.demo.command import add_demo
from slipstream.errors import BadRequestError, SlipstreamError
from slipstream.generate import add_generate
from slipstream.keys import add_keys
from slipstream.run_batch import add_run_batch
from slipstream.serve import add_serve
from slipstream.stack import LOG_LEVEL_VARIABLE
from slipstream.tracing.command import add_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # `>&-` closed it
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # whoever read our output has enough of it; Python would complain when it flushes the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _failed(arguments.command, "interrupted", 1)
    except BadRequestError as error:
        return _failed(arguments.command, one_line(error), 2)
    except (SlipstreamError, OSError) as error:
        return _failed(arguments.command, one_line(error), 1)
    except Exception as error:
        if os.environ.get(LOG_LEVEL_VARIABLE, "").upper() == "DEBUG":
            raise
        hint = f"a fault of Slipstream's own; {LOG_LEVEL_VARIABLE}=debug shows where"
        return _failed(arguments.command, f"{type(error).__name__}: {one_line(error)} ({hint})", 1)


def _failed(command: str, message: str, code: int) -> int:
    print(f"slipstream {command}: {message}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="slipstream", description="Serve language models.")
    parser.add_argument(
        "--version", action="version", version=f"slipstream {version('slipstream')}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_serve(_command(commands, "serve", "run a stack in the foreground"))
    add_generate(_command(commands, "generate", "stream the answer to one prompt"))
    add_chat(_command(commands, "chat", "talk with a model"))
    add_run_batch(_command(commands, "run-batch", "answer a file of requests"))
    add_trace(_command(commands, "trace", "show what --trace recorded"))
    add_keys(_command(commands, "keys", "make keys for tcp:// addresses"))
    add_demo(_command(commands, "demo", "see what it can do"))
    for name, (purpose, target) in installed_commands().items():
        _command(commands, name, purpose, target)
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser], name: str, purpose: str, target: str = ""
) -> Parser:
    about = f"{purpose[0].upper()}{purpose[1:]}."
    return commands.add_parser(name, help=purpose, description=about, target=target)


if __name__ == "__main__":
    sys.exit(main())
