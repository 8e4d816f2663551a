"""The options of `vllm serve` on a command line, in terms of the options here.

Words are replaced before the parser sees them:

- What `slipstream.vllm_flags` has another name for gets it; what has no effect is left out.
- A switch may stand alone (`--enable-prefix-caching`) and be denied (`--no-enforce-eager`).
- A list takes all words up to the next option, where MODEL is elsewhere: else the word behind one
  value may be MODEL.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.cli.options.option_values import Several, switch
from slipstream.errors import missing_option
from slipstream.vllm_flags import Flag, Spelling, meaning, spelled


def translate(
    words: Sequence[str], options: Mapping[str, argparse.Action], arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The words of a command that takes a stack's settings, and lines for the log.

    options: the command's options by their spellings. arguments: the names of those that are none.

    Raises: BadRequestError for an option that would change something that is not supported.
    """
    translation = _Translation(words, options, arguments)
    translation.run()
    return translation.words, translation.notes


def dashed(name: str) -> str:
    """An option's name as it is written on a command line."""
    return f"--{name.replace('_', '-')}"


class _Translation:
    def __init__(
        self,
        given: Sequence[str],
        actions: Mapping[str, argparse.Action],
        arguments: Sequence[str],
    ) -> None:
        self._actions = actions
        self._may_be_arguments = list(arguments) not in ([], ["model"])
        self._known = {option[2:].replace("-", "_") for option in actions if option[:2] == "--"}
        self._rest = list(given)
        self._has_model = not arguments or any(
            word.partition("=")[0] == "--model" for word in given
        )
        self.words: list[str] = []
        self.notes: list[str] = []

    def run(self) -> None:
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":
                self.words += [word, *self._rest]
                return
            if not _is_option(word):
                self._has_model = True
                self.words.append(word)
                continue
            option, equals, value = word.partition("=")
            said = value if equals else None
            if option in self._actions:
                self._take_own(option, said)
            elif (spelling := spelled(_with_dashes(option))) is not None:
                self._take_foreign(_with_dashes(option), spelling, said)
            else:
                self.words.append(word)

    def _take_own(self, option: str, said: str | None) -> None:
        action = self._actions[option]
        if action.type is switch:
            if said is None and self._rest and isinstance(switch(self._rest[0]), bool):
                said = self._rest.pop(0)
            self.words.append(f"{option}={'true' if said is None else said}")
        elif action.nargs == 0:
            negated = self._actions.get(f"--no-{option[2:]}")
            says = None if said is None else switch(said)
            if says is False and negated is not None:
                self.words.append(f"--no-{option[2:]}")
            elif says in (None, True):
                self.words.append(option)
            else:
                self.words.append(f"{option}={said}")
        elif said is not None:
            self.words.append(f"{option}={said}")
        elif isinstance(action, Several) and self._has_model and not self._may_be_arguments:
            values = self._values()
            self.words += [f"{option}={each}" for each in values] or [option]
        else:
            self.words += [option, *self._rest[:1]]
            del self._rest[:1]

    def _take_foreign(self, option: str, spelling: Spelling, said: str | None) -> None:
        if (own := dashed(spelling.flag.name)) in self._actions and spelling.key is None:
            if spelling.value is False:
                said = "false"
            self._take_own(own, said)
            return
        value = spelling.value if said is None else said
        if value is None:
            value = self._value_of(spelling.flag)
            if value is None:
                raise missing_option(option, "give a value")
        meant = meaning(spelling, value, self._known, named=_Names(spelling.flag.name, option))
        if meant.note:
            self.notes.append(meant.note)
        if meant.name is None:
            return
        ours = dashed(meant.name)
        if isinstance(meant.value, bool):
            self._take_own(ours, str(meant.value).lower())
        else:
            values = meant.value if isinstance(meant.value, list) else [meant.value]
            self.words += [f"{ours}={each}" for each in values]

    def _value_of(self, flag: Flag) -> Any:
        """The value that follows an option; None where there is none."""
        if flag.kind == "values":
            return self._values() or None
        if flag.kind == "optional" and not (self._rest and not _is_option(self._rest[0])):
            return True
        return self._rest.pop(0) if self._rest else None

    def _values(self) -> list[str]:
        values = []
        while self._rest and not _is_option(self._rest[0]):
            values.append(self._rest.pop(0))
        return values


class _Names:
    """The names of options in an error about one of them: that one is named as it was typed."""

    def __init__(self, name: str, option: str) -> None:
        self._name = name
        self._option = option

    def __call__(self, name: str) -> str:
        return self._option if name == self._name else dashed(name)


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdecimal() and word[1] != "."


def _with_dashes(option: str) -> str:
    if not option.startswith("--"):
        return option
    name, dot, key = option.partition(".")
    return f"{name.replace('_', '-')}{dot}{key}"
