"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 64  # characters: the search takes time by the length of what is given


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` for the nearest known name; empty where none is near."""
    near = difflib.get_close_matches(given, list(known), n=1) if len(given) <= _LONGEST else []
    return f"; did you mean {near[0]}?" if near else ""
