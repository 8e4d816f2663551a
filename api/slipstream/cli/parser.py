"""The parser of the command line. A command's code is imported when that command is parsed.

Commands of other packages come by entry points of the group `slipstream.commands`: the name is the
command's, the object a `Command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

_GROUP = "slipstream.commands"


class Command(NamedTuple):
    """A command, and where its code is.

    purpose: one line of help. target: `module:function`, which is given the command's `Parser`, and
    adds its options and the default of `run`.
    """

    purpose: str
    target: str


class Parser(argparse.ArgumentParser):
    """Usage errors take one line, exit code 2. target: see `Command`."""

    def __init__(self, *, target: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._target = target

    def load(self) -> None:
        """Import the target and let it add its options. Idempotent."""
        module, _, function = self._target.partition(":")
        self._target = ""
        if function:
            getattr(import_module(module), function)(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it; called for a command when its name was read."""
        self.load()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_commands(parser: Parser, dest: str, commands: Mapping[str, Command]) -> None:
    """Let `parser` take one of the commands, whose name goes to `dest`."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar=dest.upper())
    for name, (purpose, target) in commands.items():
        about = f"{purpose[0].upper()}{purpose[1:]}."
        parsers.add_parser(name, help=purpose, description=about, target=target)


def installed_commands() -> dict[str, Command]:
    """The commands of other packages, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry.load() for entry in entry_points(group=_GROUP)}


def one_line(error: Exception) -> str:
    """An error as a terminal shows it."""
    return " ".join(str(error).split()) or type(error).__name__
