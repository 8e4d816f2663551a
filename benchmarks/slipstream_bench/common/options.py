"""The options of a benchmark as a table: each with its kind, its default, and one for --quick.

In a benchmark:
    _OPTIONS = (
        Option("batches", many(integer(1)), "requests at a time", (1, 64), quick=(1,)),
        Option("output_len", integer(1, 3000), "tokens of an answer", 128),
    )
    add(group, _OPTIONS)              # in `add_options`
    fill_in(arguments, _OPTIONS)      # in what runs the benchmark; raises BadRequestError
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from slipstream.errors import wrong_option


class OptionType(NamedTuple):
    """The values of an option: how they are parsed, and which are allowed, in words too."""

    parse: Callable[[str], Any]  # raises ValueError
    is_allowed: Callable[[Any], bool]
    allowed: str
    metavar: str
    is_list: bool = False


class Option(NamedTuple):
    """An option. name: as an attribute of the parsed arguments. quick: the default with --quick,
    where it differs. A default of None is left to the benchmark, and to `meaning` to describe.
    """

    name: str
    kind: OptionType
    meaning: str
    default: Any = None
    quick: Any = None


def integer(least: int, most: float = math.inf) -> OptionType:
    """Integers from `least` to `most`."""
    span = f">= {least}" if math.isinf(most) else f"in [{least}, {most}]"
    return OptionType(int, lambda value: least <= value <= most, f"an integer {span}", "N")


def number(is_allowed: Callable[[float], bool], allowed: str, metavar: str = "X") -> OptionType:
    """Floating-point numbers; NaN has to be refused by `is_allowed`, as by any comparison."""
    return OptionType(float, is_allowed, allowed, metavar)


def name_of(known: Sequence[str]) -> OptionType:
    """One of the known names."""
    return OptionType(str, lambda name: name in known, f"any of {','.join(known)}", "NAME")


def many(kind: OptionType) -> OptionType:
    """Values of a kind with commas between them; parsed into a tuple."""
    return OptionType(
        lambda text: tuple(kind.parse(part) for part in text.split(",")),
        lambda values: all(map(kind.is_allowed, values)),
        f"{kind.allowed}; several with commas between",
        f"{kind.metavar},...",
        is_list=True,
    )


def add(group: argparse._ActionsContainer, options: Sequence[Option]) -> None:
    """Add the options to a group of a parser; they are checked by `fill_in`."""
    for option in options:
        parts = [option.meaning] if option.meaning else []
        if option.default is not None:
            quick = "" if option.quick is None else f", with --quick {_shown(option.quick)}"
            parts.append(f"default: {_shown(option.default)}{quick}")
        group.add_argument(
            f"--{option.name.replace('_', '-')}", metavar=option.kind.metavar, help="; ".join(parts)
        )


def fill_in(arguments: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    """Parse what was given, and set what was not to its default; returns the values by name.

    Raises: BadRequestError for a value that is not allowed.
    """
    is_quick = getattr(arguments, "quick", False)
    values: dict[str, Any] = {}
    for option in options:
        given = getattr(arguments, option.name)
        if given is not None:
            value = _parsed(option, given)
        else:
            value = option.quick if is_quick and option.quick is not None else option.default
        values[option.name] = value
        setattr(arguments, option.name, value)
    return values


def _parsed(option: Option, given: str) -> Any:
    kind = option.kind
    try:
        value = kind.parse(given)
    except ValueError:
        raise wrong_option(option.name, given, kind.allowed) from None
    if not kind.is_allowed(value):
        raise wrong_option(option.name, given if kind.is_list else value, kind.allowed)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
