"""The nesting depth of a JSON text, found without recursion."""

from __future__ import annotations

import re

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def is_nested_deeper(text: str, limit: int) -> bool:
    """True if lists and objects of valid JSON are nested more than `limit` levels deep."""
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            depth += 1
            if depth > limit:
                return True
        elif match[0] in ("]", "}"):
            depth -= 1
    return False
