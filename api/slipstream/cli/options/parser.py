"""The command-line parser. A command's code is imported only when that command is parsed.

Other packages add commands by entry points of the group `slipstream.commands`: the entry point's
name is the command's name, its object a `Command`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from slipstream.cli.options.foreign_options import hint_for, renamed
from slipstream.cli.options.option_names import option_names
from slipstream.spelling import did_you_mean

_GROUP = "slipstream.commands"
_MAX_WIDTH = 100
_HELP_COLUMN = 30
_INDENT = 4  # of the names of commands


class Command(NamedTuple):
    """A command of the command line.

    purpose: one line of help; a command without one is not listed. target: `module:function`; the
    function takes the command's `Parser`, adds its options and sets the default of `run`.
    """

    purpose: str
    target: str


class _Help(argparse.HelpFormatter):
    """Keeps the lines of examples as they are, and leaves room for long option names."""

    def __init__(self, prog: str) -> None:
        width = min(_MAX_WIDTH, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith("  ") else super(_Help, self)._fill_text(line, width, indent)
            for line in text.splitlines()
        )

    def add_argument(self, action: argparse.Action) -> None:
        """Add an action as argparse does, but indent the names of commands as far as it prints
        them.
        """
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            longest = max(map(len, action.choices), default=0)
            self._action_max_length = max(self._action_max_length, longest + _INDENT)


class Parser(argparse.ArgumentParser):
    """A parser that loads its target on use, and reports usage errors in one line with exit code 2.

    - Errors name the command whose help page explains them, and suggest the nearest name.
    - Options may be written with underscores, as in vLLM: `--max_num_seqs`.
    - Options of other engines are taken by their names there, where they mean the same.
    - Without a command, the help page says which there are.
    - The namespace gets `prog`, the name of the innermost command, its `option_names`, and `notes`,
      lines for the log.

    target: see `Command`.
    """

    def __init__(self, *, target: str = "", **options: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)
        self._positionals.title = "arguments"
        self._target = target
        self.preset: Callable[[Sequence[str]], argparse.Namespace] | None = None
        """Makes a namespace with values for options that are not on the command line, from it."""
        self.translate: Callable[[Sequence[str]], tuple[list[str], list[str]]] | None = None
        """Replaces words of the command line, and says what is to be logged about it."""

    def load(self) -> None:
        """Import the target and let it add its options. Idempotent."""
        module, _, function = self._target.partition(":")
        self._target = ""
        if function:
            getattr(import_module(module), function)(self)

    def introduce(self, usage: str, examples: Iterable[str]) -> None:
        """Set what follows the program's name in the usage line, and the examples below it."""
        self.usage = f"%(prog)s {usage}"
        lines = "\n".join(f"  {example}" for example in examples)
        self.description = f"{self.description or ''}\n\nexamples:\n{lines}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, which calls this for a command once its name is parsed; but
        unknown arguments are an error.
        """
        self.load()
        words = [self._with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        words, notes = renamed(words, self._option_string_actions)
        if not words and self._has_commands:
            self.print_help(sys.stderr)
            self.exit(2)
        if self.translate is not None:
            words, more = self.translate(words)
            notes += more
        if self.preset is not None:
            namespace = self.preset(words)
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        if not hasattr(namespace, "prog"):
            namespace.prog = self.prog
            namespace.notes = [*getattr(namespace, "notes", ()), *notes]
            namespace.option_names = option_names(self._actions, words, vars(namespace))
        return namespace, []

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse before Python 3.13 takes the value of `--option=--` for the end of options
        if not action.option_strings or arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value if action.nargs in (None, "?") else [value]

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        required = "the following arguments are required: "
        if message.startswith(required):
            missing = message.removeprefix(required)
            message = f"{missing} {'are' if ', ' in missing else 'is'} missing"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    @property
    def _has_commands(self) -> bool:
        return any(isinstance(each, argparse._SubParsersAction) for each in self._actions)

    def _with_dashes(self, word: str) -> str:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return f"{dashed}{equals}{value}" if dashed in self._option_string_actions else word

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        name = word.partition("=")[0].replace("_", "-")
        options = {
            option: action.help != argparse.SUPPRESS
            for option, action in self._option_string_actions.items()
            if option.startswith("--")
        }
        shown = [option for option, is_shown in options.items() if is_shown]
        hint = hint_for(name) or did_you_mean(name, shown)
        return f"unknown option {name}{hint or did_you_mean(name, options)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        is_command = isinstance(action, argparse._SubParsersAction)
        if is_command and action.choices is not None and value not in action.choices:
            known = list(action.choices)
            hint = did_you_mean(value, known) or f"; there are {', '.join(known)}"
            raise argparse.ArgumentError(None, f"unknown {action.dest} {value!r}{hint}")
        super()._check_value(action, value)


def add_commands(parser: Parser, dest: str, commands: Mapping[str, Command]) -> None:
    """Add commands to a parser; the name of the one given is stored in `dest`."""
    if parser.usage is None:
        parser.usage = f"%(prog)s {dest.upper()} [options]"
        parser.epilog = f"`{parser.prog} {dest.upper()} --help` explains a {dest} and its options."
    parsers = parser.add_subparsers(
        title=f"{dest}s", dest=dest, required=True, metavar=dest.upper(), prog=parser.prog
    )
    for name, (purpose, target) in commands.items():
        if purpose:
            about = f"{purpose[0].upper()}{purpose[1:]}."
            parsers.add_parser(name, help=purpose, description=about, target=target)
        else:
            parsers.add_parser(name, target=target)


def installed_commands() -> dict[str, Command]:
    """The commands of other installed packages, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry.load() for entry in entry_points(group=_GROUP)}


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
