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
    near = difflib.get_close_matches(_bare(given), list(names), n=1, cutoff=_NEAR)
    return f"; did you mean {names[near[0]]}?" if near else ""


def _bare(name: str) -> str:
    return name.lstrip("-").removeprefix("no-").lower().replace("_", "-")
