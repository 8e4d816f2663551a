"""How calls are written whose arguments are not JSON, as data: tagged parameters, and key and value
pairs as Python or Gemma writes them.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["KeywordSyntax", "TaggedSyntax"]


class TaggedSyntax(Struct, frozen=True):
    """Parameters in tags. Blanks between tags belong to the format.

    opening and key_end: the literals around a key; with has_attributes, attributes and ">" follow,
    of which string="true|false" is read. value_opening: a tag of its own around the value, if any.
    closing: ends a value. end: ends the arguments. trims_newline: one line break at each side of a
    value belongs to the format. writes_python: a value that is no string is written as Python
    prints it.
    """

    opening: str
    key_end: str
    closing: str
    end: str
    value_opening: str = ""
    has_attributes: bool = False
    trims_newline: bool = False
    writes_python: bool = False


class KeywordSyntax(Struct, frozen=True):
    """Key and value pairs in brackets, separated by commas.

    opening: the bracket behind the function's name, already read. separator: between a key and its
    value at the top. string_delimiter: a literal on both sides of a string, in which nothing is
    escaped; empty: quotes and escapes as in Python.
    """

    opening: str = "("
    separator: str = "="
    string_delimiter: str = ""
