"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 64  # characters: the search takes time by the length of what is given
_NEAR = 0.8  # the share of characters that two names have in common: a letter or two are wrong
_SECURITY = frozenset(
    {"allowed-hosts", "allowed-origins", "api-key", "api-key-file", "forwarded-allow-ips"}
    | {"insecure", "keys", "ssl-certfile", "ssl-keyfile", "trust-remote-code"}
)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?` for the nearest known name; empty where none is near.

    Options of security are never offered: they are given by those who know what they do.
    """
    if len(given) > _LONGEST:
        return ""
    names = {_bare(name): name for name in known if not _SECURITY & {_bare(name)}}
    bare = _bare(given)
    near = difflib.get_close_matches(bare, list(names), n=1, cutoff=_NEAR)
    near = near or [name for name in names if _is_swapped(bare, name)]
    return f"; did you mean {names[near[0]]}?" if near else ""


def _is_swapped(one: str, other: str) -> bool:
    """Two letters beside each other have changed places, which are many of a short name."""
    if len(one) != len(other):
        return False
    at = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(at) != 2 or at[1] != at[0] + 1:
        return False
    i, j = at
    return one[i] == other[j] and one[j] == other[i]


def _bare(name: str) -> str:
    return name.lstrip("-").removeprefix("no-").lower().replace("_", "-")
