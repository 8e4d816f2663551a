"""`allowed_tools`, a tool_choice that lists those of the tools that the model may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.http.api_errors import bad_field
from slipstream_ipc.errors import shown

Tools = tuple[dict[str, Any], ...]  # as in a chat's body


def tools_of_names(tools: Tools, names: Sequence[str | None], field: str) -> Tools:
    """The tools with these names, of which None is none. field: that lists them.

    Raises: ApiError.
    """
    known = {name_of(tool) for tool in tools} - {None}
    wanted = set(names)  # a body may have tens of thousands of both
    if not names or not known.issuperset(wanted):
        wrong = next((name for name in names if name not in known), None)
        given = "none" if not names else shown(wrong)
        raise bad_field(field, f"{field}: got {given}, allowed: functions that are in tools")
    return tuple(tool for tool in tools if name_of(tool) in wanted)


def name_of(tool: dict[str, Any]) -> str | None:
    """The name of a tool's function; None where it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
