"""The options of a command that starts a stack, generated from `StackSettings`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from slipstream.cli.options.option_values import Several, switch
from slipstream.cli.options.parser import Parser, one_line
from slipstream.cli.options.vllm_options import translate
from slipstream.errors import BadRequestError, wrong_option
from slipstream.stack.settings import (
    GROUPS,
    StackSettings,
    allowed_values,
    description,
    group_of,
    metavar_of,
    settings_from,
)

_ALIASES = {"http_port": ("--port", "--http-port")}  # vLLM's name first


def add_settings(
    parser: Parser,
    *,
    has_argument: bool = True,
    is_brief: bool = False,
    names: Collection[str] | None = None,
) -> None:
    """Add MODEL, and an option for each of a stack's settings.

    has_argument: whether MODEL is an argument as well as the option --model. is_brief: leave all
    other options out of the help text, which then says where they are explained. names: add options
    for these settings alone.
    """
    if has_argument:
        parser.add_argument(
            "model",
            nargs="?",
            action=_ModelOnce,
            default=argparse.SUPPRESS,
            metavar="MODEL",
            help=description("model"),
        )
    fields = {field.name: field.default for field in msgspec.structs.fields(StackSettings)}
    for title in GROUPS:
        if names is not None and title not in map(group_of, names):
            continue
        group = parser.add_argument_group(title)
        for name, default in fields.items():
            if group_of(name) == title and (names is None or name in names):
                about = description(name) if name == "model" or not is_brief else None
                if name == "model":
                    about = "the same as MODEL" if has_argument else about
                _add_setting(group, name, default, about)
    if names is None:
        parser.translate = partial(_translated, parser)
    if is_brief:
        parser.epilog = (
            "For a server that it starts it takes every option of `slipstream serve`: see "
            "`slipstream serve --help`."
        )


def _translated(parser: Parser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    arguments = [each.dest for each in parser._actions if not each.option_strings]
    try:
        return translate(words, parser._option_string_actions, arguments)
    except BadRequestError as error:
        parser.error(one_line(error))


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line. Raises: BadRequestError."""
    names = StackSettings.__struct_fields__
    given = {name: value for name, value in vars(arguments).items() if name in names}
    settings = settings_from(given, from_text=True)
    return {name: getattr(settings, name) for name, value in given.items() if value is not None}


def take_model(arguments: argparse.Namespace, model: str) -> None:
    """Take an argument for MODEL. Raises: BadRequestError where --model has another."""
    first = getattr(arguments, "model_given", model)
    if first != model:
        raise wrong_option("model", model, f"one model; --model has {first!r}")
    arguments.model = arguments.model_given = model
    arguments.option_names["model"] = "MODEL"


class _ModelOnce(argparse.Action):
    """Stores the model, which may be given as an argument or as an option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        _option: str | None = None,
    ) -> None:
        """Store it, or report that there are two."""
        first = getattr(namespace, "model_given", value)
        if first != value:
            parser.error(f"two models are given, {first!r} and {value!r}")
        namespace.model = namespace.model_given = value


def _add_setting(
    group: argparse._ArgumentGroup, name: str, default: Any, about: str | None
) -> None:
    dashed = name.replace("_", "-")
    options: Sequence[str] = _ALIASES.get(name, (f"--{dashed}",))
    if about is not None:
        about = _joined(about.replace("%", "%%"), _details(name, default))
    common: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if about is None else about,
    }
    if default is False:
        group.add_argument(*options, action="store_true", **common)
        _add_denial(group, name, dashed)
        return
    common["metavar"] = metavar_of(name)
    if name == "model":
        group.add_argument(*options, action=_ModelOnce, **common)
    elif isinstance(default, tuple):
        group.add_argument(*options, action=Several, **common)
    elif default is True:
        group.add_argument(*options, type=switch, **common)
        _add_denial(group, name, dashed)
    else:
        group.add_argument(*options, **common)


def _add_denial(group: argparse._ArgumentGroup, name: str, dashed: str) -> None:
    group.add_argument(
        f"--no-{dashed}",
        dest=name,
        action="store_const",
        const=False,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def _joined(about: str, details: str) -> str:
    if not details:
        return about
    return f"{about[:-1]}; {details})" if about.endswith(")") else f"{about} ({details})"


def _details(name: str, default: Any) -> str:
    """The range and the default of a setting, as far as its description does not have them."""
    if isinstance(default, tuple):
        values = f"default: {' '.join(default)}; " if default else ""
        return f"{values}may be given several times"
    if default is None or default is False:
        return ""
    if default is True:
        return f"default: true; --no-{name.replace('_', '-')} is short for false"
    bounds = allowed_values(name).removeprefix("an integer ")
    shown = bounds.replace(">= ", "").replace(" and <= ", " to ") + "; "
    has_bounds = bounds.startswith(">= 1 and")
    value = f"{default:g}" if isinstance(default, float) else default
    return f"{shown if has_bounds else ''}default: {value}"
