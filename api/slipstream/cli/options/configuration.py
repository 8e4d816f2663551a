"""Options from a YAML file (`--config FILE`) and from environment variables (`SLIPSTREAM_*`).

- The command line comes first, then the environment, then the file, then the default.
- Values are taken as text, so they mean what they mean on the command line: `access_log: off` is
  the word `off`.
- An unknown name in a file is an error, an unknown variable a warning.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.cli.options.foreign_options import here, hint_for
from slipstream.cli.options.option_values import Several, switch
from slipstream.cli.options.parser import Parser, one_line
from slipstream.errors import BadRequestError, wrong_option
from slipstream.spelling import did_you_mean
from slipstream.stack.settings import DIAGNOSIS, HTTP, NETWORK, StackSettings, group_of
from slipstream.vllm_flags import Meaning, meaning, names_of_vllm, spelled
from slipstream_ipc.secret_files import check_secret

PREFIX = "SLIPSTREAM_"
# variables that are no options, or mean something else than the option of their name
_OTHERS = frozenset(
    {"ADDRESS", "API_KEY", "KEYS", "LOG_LEVEL", "RUN_MARK"}
    | {"STATUS_FD", "CONTROL_FD", "PARENT_PID", "LISTENERS"}  # what a stack's processes are given
)
# of releases before this one: what became of them
_FORMER = {"PURE_PYTHON": "has no effect any more: what is in C has no other way in Python"}
_OF_SERVE = ("config", "no_http", "port", "runtime_dir")
SETTINGS = frozenset(StackSettings.__struct_fields__) - {"api_key", "keys"}
"""The settings that `slipstream serve` takes from environment variables."""
_OF_ACCESS = frozenset(
    {
        "api_key",
        "api_key_file",
        "priority_key_file",
        "lora_key_file",
        "keys",
        "ssl_certfile",
        "ssl_keyfile",
    }
)
# given without a value they would open what they are to close: a secret that was not filled in


def short_lived_settings() -> frozenset[str]:
    """The settings that other commands take from there, for stacks that they start."""
    return frozenset(name for name in SETTINGS if group_of(name) not in (HTTP, NETWORK, DIAGNOSIS))


class Configured(argparse.Namespace):
    """A namespace with values from a file and the environment.

    sources: what errors call these values, by the option's name: the variable, or the file's key
    with its line. A value from the command line replaces it.
    """

    def __init__(self, values: Mapping[str, Any], sources: dict[str, str]) -> None:
        super().__init__(**values)
        self.sources = sources

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).get("sources", {}).pop(name, None)
        super().__setattr__(name, value)


class _Given(NamedTuple):
    """A value from a file or a variable. key: as it is written there."""

    key: str
    value: str | list[str]
    source: str

    @property
    def name(self) -> str:
        """The option's name in errors: the variable, or the key with its line."""
        return self.source if self.source.startswith("$") else f"{self.source}: {self.key}"


def add_config(parser: Parser, environment: Iterable[str]) -> None:
    """Add --config, and let variables of these names stand for options that are not given."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with options by their long names (max-num-seqs: 64); the command line and "
        "SLIPSTREAM_* variables (SLIPSTREAM_MAX_NUM_SEQS=64) come before it",
    )
    parser.preset = partial(_preset, parser, frozenset(environment))


def source_of(arguments: argparse.Namespace, name: str | None) -> str | None:
    """The file and line, or the variable, that an option's value is from; None where it was given
    on the command line, or not at all.
    """
    found: str | None = getattr(arguments, "sources", {}).get(name)
    return found


def _preset(parser: Parser, environment: frozenset[str], words: Sequence[str]) -> Configured:
    options = _options(parser)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    try:
        option, file = "--config", _file_in(words)
        if file is None and "config" in environment:
            option, file = f"${PREFIX}CONFIG", os.environ.get(f"{PREFIX}CONFIG")
        in_file = () if file is None else _read(option, file)
        for given_in in (in_file, _variables(environment)):
            seen: dict[str, str] = {}
            for given in given_in:
                key = given.key.replace("-", "_")
                ours = here(f"--{_dashed(given.key)}")
                if (
                    key not in options
                    and ours is not None
                    and ours[2:].replace("-", "_") in options
                ):
                    notes.append(f"{given.name} is {ours} here")
                    key = ours[2:].replace("-", "_")
                action = options.get(key)
                if action is None and parser.translate is not None:
                    meant = _of_vllm(given, options)
                    if meant is not None:
                        is_variable = given.source.startswith("$")
                        if is_variable and meant.name not in (None, *environment):
                            continue
                        notes += [meant.note] if meant.note else []
                        if meant.name is None:
                            continue
                        action = options[meant.name]
                        given = given._replace(value=_as_text(meant.value))
                if action is None:
                    dashed = {f"--{_dashed(name)}" for name in options}
                    key = f"--{_dashed(given.key)}"
                    hint = hint_for(key) or did_you_mean(key, dashed)
                    hint = hint.replace("--", "")  # as they are written in a file
                    allowed = f"an option of `{parser.prog}`{hint or ' (see its --help)'}"
                    raise wrong_option(f"{given.source}: key", given.key, allowed)
                if action.dest in seen:
                    allowed = f"one value for an option; {seen[action.dest]} has another"
                    raise wrong_option(given.source, given.key, allowed)
                seen[action.dest] = given.source
                values[action.dest] = _converted(action, given)
                sources[action.dest] = given.name
    except BadRequestError as error:
        parser.error(one_line(error))
    _warn(parser, environment)
    return Configured({**values, "notes": notes}, sources)


def _of_vllm(given: _Given, options: Container[str]) -> Meaning | None:
    """Return the meaning of a vLLM option, None for any other key. Raises: BadRequestError."""
    spelling = spelled(f"--{given.key.replace('_', '-')}")
    if spelling is None:
        return None
    value: Any = given.value
    if spelling.flag.kind == "flag":
        said = switch(value) if isinstance(value, str) else value
        if not isinstance(said, bool):
            raise wrong_option(given.name, value, "true or false")
        value = said is (spelling.value is not False)
    own = spelling.flag.name
    if spelling.key is None and own not in names_of_vllm():
        return Meaning(own, value) if own in options else None
    names = {own: given.name}
    return meaning(spelling, value, options, named=lambda name: names.get(name, _dashed(name)))


def _as_text(value: Any) -> str | list[str]:
    if isinstance(value, list):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(parser: Parser) -> dict[str, argparse.Action]:
    """The options that a file may hold, by name with underscores; aliases too."""
    options = {
        option.removeprefix("--").replace("-", "_"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and action.dest not in ("help", "config")
    }
    negated = [f"no_{name}" for name in options]
    return {name: action for name, action in options.items() if name not in negated}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _file_in(words: Sequence[str]) -> str | None:
    """The file of --config. The parser reports later what is wrong with it."""
    for index, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name == "--config":
            return value if equals else (words[index + 1] if index + 1 < len(words) else None)
    return None


def _read(option: str, path: str) -> Iterator[_Given]:
    """The entries of a file; those that are null are left out. Raises: BadRequestError.

    option: the option or the variable that names the file.
    """
    import yaml  # a command without --config needs none

    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise wrong_option(option, path, f"a file in YAML that can be read ({why})") from None
    except yaml.YAMLError as error:
        raise wrong_option(option, path, f"a file in YAML ({one_line(error)})") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        first = "- a list" if isinstance(root, yaml.SequenceNode) else str(root.value)
        allowed = "an option, a colon and a value, such as `max-num-seqs: 64`"
        raise wrong_option(f"{path}, line {root.start_mark.line + 1}", first, allowed)
    for key, value in root.value:
        source = f"{path}, line {key.start_mark.line + 1}"
        name = str(key.value).replace("-", "_")
        if name in _OF_ACCESS and value.value in ("", []):
            raise wrong_option(f"{source}: {key.value}", "nothing", "a value, or no such line")
        if name == "api_key":
            try:
                check_secret(Path(path))
            except OSError as error:
                raise wrong_option(option, path, f"a file that holds keys ({error})") from None
        if isinstance(value, yaml.SequenceNode):
            texts = [item.value for item in value.value if isinstance(item, yaml.ScalarNode)]
            if len(texts) == len(value.value):
                yield _Given(str(key.value), texts, source)
                continue
        elif isinstance(value, yaml.ScalarNode):
            if value.tag != "tag:yaml.org,2002:null":
                yield _Given(str(key.value), value.value, source)
            continue
        raise wrong_option(f"{source}: {key.value}", "more keys", "a value, or a list of values")


def _variables(names: Iterable[str]) -> Iterator[_Given]:
    """The variables of these names that are set and not empty. Raises: BadRequestError."""
    of_vllm = {name for name in names_of_vllm() if f"{PREFIX}{name.upper()}" in os.environ}
    for name in sorted((set(names) | of_vllm) - {"config"} - {each.lower() for each in _OTHERS}):
        variable = f"{PREFIX}{name.upper()}"
        text = os.environ.get(variable)
        if text == "" and name in _OF_ACCESS:
            raise wrong_option(f"${variable}", text, "a value; unset it where there is to be none")
        if text:
            yield _Given(name, text, f"${variable}")


def _converted(action: argparse.Action, given: _Given) -> Any:
    """The value that the parser would make of the given one. Raises: BadRequestError."""
    where = given.name
    value = given.value
    if isinstance(action, Several):
        is_variable = given.source.startswith("$")
        if isinstance(value, str):
            value = value.split(",") if is_variable else [value]
        return value
    if isinstance(value, list):
        raise wrong_option(where, value, "a single value")
    if action.nargs == 0:
        found = switch(value)
        if not isinstance(found, bool):
            raise wrong_option(where, value, "true or false")
        return found
    converted: Any = value
    if callable(action.type):
        try:
            converted = action.type(value)
        except (TypeError, ValueError):
            allowed = "an integer" if action.type is int else "a number"
            raise wrong_option(where, value, allowed) from None
    if action.choices is not None and converted not in action.choices:
        raise wrong_option(where, value, f"one of {', '.join(map(str, action.choices))}")
    return converted


def _warn(parser: Parser, environment: frozenset[str]) -> None:
    """Name the variables that look like options and are none, in one line."""
    names = (*environment, *SETTINGS, *_OF_SERVE, *names_of_vllm())
    known = {name.upper() for name in names} | _OTHERS
    found = []
    for name in sorted(os.environ):
        bare = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and bare in _FORMER:
            sys.stderr.write(f"{parser.prog}: warning: ${name} {_FORMER[bare]}\n")
        elif name.startswith(PREFIX) and bare not in known:
            hint = did_you_mean(bare, known).replace("; did you mean ", f" (did you mean ${PREFIX}")
            found.append(f"${name}{hint and f'{hint})'}")
    if found:
        is_one = len(found) == 1
        text = f"{', '.join(found)} {'is' if is_one else 'are'} no option"
        sys.stderr.write(f"{parser.prog}: warning: {text}\n")
