"""Custom tools of a chat, in OpenAI's form: `{"type": "custom", "custom": {"name": …}}`.

The model is offered each as a function (`custom_tools`), and its calls are answered as calls of a
custom tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from slipstream.http.api_errors import bad_field
from slipstream.http.openai.allowed_tools import name_of
from slipstream.http.openai.custom_tools import function_of_custom, name_unenforced
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import ChatRequest
from slipstream_ipc.errors import shown

CUSTOM = "custom"
_FUNCTION = "function"
_ALLOWED = "allowed_tools"

Tools = Sequence[dict[str, Any]]


def functions_of(tools: Tools) -> tuple[dict[str, Any], ...]:
    """The tools with a function for each custom tool. Raises: ApiError."""
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") == CUSTOM:
            where = f"tools[{index}].{CUSTOM}"
            tool = {"type": _FUNCTION, _FUNCTION: function_of_custom(_custom(tool, where), where)}
        found.append(tool)
    return tuple(found)


def with_functions(body: ChatRequest) -> tuple[ChatRequest, frozenset[str]]:
    """The body with a function for each custom tool, in `tools` and `tool_choice`, and the names of
    the custom tools. Raises: ApiError.
    """
    customs = [at for at, tool in enumerate(body.tools or ()) if tool.get("type") == CUSTOM]
    choice = _choice(body.tool_choice)
    if not customs:
        return replace(body, tool_choice=choice) if choice is not body.tool_choice else body, _NONE
    tools = functions_of(body.tools or ())
    names = [name_of(tool) for tool in tools]
    num_by_name = dict.fromkeys(names, 0)
    for name in names:
        num_by_name[name] += 1
    for at in customs:
        if num_by_name[names[at]] > 1:
            where = f"tools[{at}].{CUSTOM}.name"
            raise bad_field(where, f"{where}: got {shown(names[at])}, allowed: another tool's not")
    found = frozenset(name for at in customs if (name := names[at]) is not None)
    return replace(body, tools=tools, tool_choice=choice), found


def name_unenforced_formats(body: ChatRequest, ignored: IgnoredFields | None) -> None:
    """Add to `ignored` the formats of custom tools that nothing enforces. Raises ApiError where it
    is None and there is one.
    """
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") == CUSTOM:
            where = f"tools[{index}].{CUSTOM}"
            name_unenforced(_custom(tool, where), "tools.", where, ignored)


_NONE: frozenset[str] = frozenset()


def _custom(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A custom tool's fields. Raises: ApiError."""
    custom = tool.get(CUSTOM)
    if not isinstance(custom, dict):
        raise bad_field(where, f"{where}: got {shown(custom)}, allowed: an object with a name")
    return custom


def _choice(given: Any) -> Any:
    """A tool_choice with a function in place of each custom tool."""
    match given:
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"type": _FUNCTION, _FUNCTION: {"name": name}}
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(listed)} as allowed}:
            tools = [_choice(each) for each in listed]
            return {"type": _ALLOWED, _ALLOWED: {**allowed, "tools": tools}}
        case _:
            return given
