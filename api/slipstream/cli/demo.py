"""`slipstream demo`: the list of demonstrations."""

from __future__ import annotations

from slipstream.cli.options.parser import Command, Parser, add_commands

_DEMOS = {
    "kill": Command(
        "kill the worker and the core while answers are streamed",
        "slipstream.demo.kill:add_kill",
    ),
}


def add_demo(parser: Parser) -> None:
    """Add the demonstrations as commands."""
    add_commands(parser, "demo", _DEMOS)
