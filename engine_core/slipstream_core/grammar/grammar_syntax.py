"""The syntax that a context-free grammar is written in, and Lark's as the grammar library reads
it.

The library takes a grammar for GBNF unless one of its lines begins with `start:`, so it refuses
what Lark's own tutorial has (`?start: …`). Its dialect lacks priorities; they choose among the
readings of a text, not which texts there are, so they are left out. Pure.
"""

from __future__ import annotations

import re

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
# a rule's or a terminal's name with its modifiers, and its priority
_LARK_RULE = re.compile(
    r"^(?P<head>[ \t]*[?!]*(?P<name>[A-Za-z_]\w*))(?:\.-?\d+)?"
    r"(?=[ \t]*(?:\{[^}\n]*\})?[ \t]*:)",
    re.MULTILINE,
)
_LIBRARY = re.compile(r"^\s*%llguidance\b", re.MULTILINE)
_START = "start"


def is_gbnf(grammar: str) -> bool:
    """True if a grammar has a rule in GBNF, `root ::= …`."""
    return _GBNF_RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """A grammar that is no GBNF, as the library reads it. Without a rule `start`, its first rule is
    the start, as in vLLM.

    Raises: ValueError for a text without rules.
    """
    names = [found["name"] for found in _LARK_RULE.finditer(grammar)]
    if not names and _LIBRARY.search(grammar) is None:
        raise ValueError("neither Lark (a rule is `start: …`) nor GBNF (`root ::= …`)")
    text = _LARK_RULE.sub(lambda found: found["head"], grammar)
    if names and _START not in names:
        text += f"\n{_START}: {names[0]}\n"
    return text
