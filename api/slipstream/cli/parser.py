"""The command-line parser. A command's code is imported only when that command is parsed.

Other packages add commands by entry points of the group `slipstream.commands`: the entry point's
name is the command's name, its object a `Command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

_GROUP = "slipstream.commands"


class Command(NamedTuple):
    """A command of the command line.

    purpose: one line of help. target: `module:function`; the function takes the command's `Parser`,
    adds its options and sets the default of `run`.
    """

    purpose: str
    target: str


class Parser(argparse.ArgumentParser):
    """A parser that loads its target on use, and reports usage errors in one line with exit code 2.

    target: see `Command`.
    """

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
        """As in argparse, which calls this for a command once its name is parsed."""
        self.load()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_commands(parser: Parser, dest: str, commands: Mapping[str, Command]) -> None:
    """Add commands to a parser; the name of the one given is stored in `dest`."""
    parsers = parser.add_subparsers(dest=dest, required=True, metavar=dest.upper())
    for name, (purpose, target) in commands.items():
        about = f"{purpose[0].upper()}{purpose[1:]}."
        parsers.add_parser(name, help=purpose, description=about, target=target)


def installed_commands() -> dict[str, Command]:
    """The commands of other installed packages, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry.load() for entry in entry_points(group=_GROUP)}


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
