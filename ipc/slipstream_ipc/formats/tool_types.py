"""The types of the tools' properties, as a reader of answers needs them, in a compact form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

ToolTypes = Mapping[str, Mapping[str, str]]
"""For each function the types of its properties by name: JSON Schema's names of types, joined by
`|`; empty where the schema names none. Formats with elements that nest also have properties of
properties, by `nested_key`."""

LIST_ITEM = "\x1e"
"""Stands for the name of a list's items in a `nested_key`."""


def nested_key(path: str, name: str) -> str:
    """The name in `ToolTypes` of what is within the property `path`."""
    return f"{path}\x1f{name}"


def encode_tool_types(types: ToolTypes) -> str:
    """The form that travels in `AnswerSettings.tools`."""
    return msgspec.json.encode(types).decode()


def decode_tool_types(text: str) -> ToolTypes | None:
    """None for an empty text: the tools are unknown. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=dict[str, dict[str, str]]) if text else None
