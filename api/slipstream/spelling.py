"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` for the nearest known name; empty where none is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def unexpected_keyword(function: str, given: str, known: Iterable[str]) -> TypeError:
    """Python's own error for a keyword that a function does not have, with a suggestion."""
    hint = did_you_mean(given, known)
    return TypeError(f"{function}() got an unexpected keyword argument {given!r}{hint}")


def suggesting_keywords(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Adds a suggestion to errors for unknown keywords. function: one without `**` parameters."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Returned:
        for name in options:
            if name not in known:
                raise unexpected_keyword(function.__qualname__, name, known)
        return function(*args, **options)

    return checked
