"""`slipstream demo`: the list of demonstrations."""

from __future__ import annotations

from slipstream.cli.parser import Command, Parser, add_commands

_DEMOS = {
    "kill": Command(
        "streams that go on while the worker and the core are killed",
        "slipstream.demo.kill:add_kill",
    ),
}


def add_demo(parser: Parser) -> None:
    """Add the demonstrations as commands."""
    add_commands(parser, "demo", _DEMOS)
