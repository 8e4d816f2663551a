"""The tools of a response: which of them the model is offered, and under which names.

- A function is offered as it is. One within a namespace is offered under a name that has both, and
  its call is answered with both again.
- A custom tool is offered as a function of one text (`custom_tools`).
- Any other tool is one that OpenAI's servers run, or know from training. It is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from slipstream.http.api_errors import bad_field
from slipstream.http.openai.custom_tools import function_of_custom, name_unenforced
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream_ipc.errors import shown
from slipstream_ipc.messages.answer import MAX_NAME_CHARS

_FUNCTION, _CUSTOM, _NAMESPACE = "function", "custom", "namespace"
_KNOWN = dict.fromkeys((_FUNCTION, _CUSTOM, _NAMESPACE))
_JOINT = "__"
_UNUSUAL = (b'"custom"', b'"namespace"')  # in a list of tools as JSON


class OfferedTool(Struct, frozen=True):
    """A tool as its client calls it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """functions: in a chat's form. by_name: all of them by the names that the model is shown."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    by_name: dict[str, OfferedTool] = field(default_factory=dict)

    def names_of(self, chosen: Sequence[Any]) -> list[list[str]]:
        """The names that the model is shown for each of these, a tool or all of a namespace, as a
        tool_choice names them; none for what is not offered. A function's name without its
        namespace is enough where there is no other one.
        """
        by_client: dict[tuple[str, object, bool], str | None] = {}
        of_namespace: dict[str, list[str]] = {}
        for offered, tool in self.by_name.items():
            by_client[tool.name, tool.namespace, tool.is_custom] = offered
            if tool.namespace is not None:
                of_namespace.setdefault(tool.namespace, []).append(offered)
                unqualified = tool.name, None, tool.is_custom
                by_client[unqualified] = None if unqualified in by_client else offered
        for offered, tool in self.by_name.items():
            if tool.namespace is None:
                by_client[tool.name, None, tool.is_custom] = offered
        found: list[list[str]] = []
        for each in chosen:
            match each:
                case {"type": "namespace", "name": str(name)}:
                    found.append(of_namespace.get(name, []))
                case {"type": "function" | "custom" as kind, "name": str(name)}:
                    namespace = each.get("namespace")
                    key = (name, namespace, kind == _CUSTOM)
                    offered_as = by_client.get(key) if isinstance(namespace, str | None) else None
                    found.append([] if offered_as is None else [offered_as])
                case _:
                    found.append([])
        return found


def offered_name(name: str, namespace: str | None) -> str:
    """The name that the model is shown for a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_JOINT) else f"{namespace}{_JOINT}{name}"


def offered_tools(tools: Iterable[dict[str, Any]]) -> OfferedTools:
    """The tools that the model is offered. Raises: ApiError."""
    found = OfferedTools()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != _NAMESPACE:
            _add(found, tool, None, where)
            continue
        namespace, about = _namespace(tool, where)
        num_before = len(found.functions)
        for at, each in enumerate(tool["tools"]):
            _add(found, each, namespace, f"{where}.tools[{at}]")
        if about and len(found.functions) > num_before:
            first = found.functions[num_before]["function"]
            first["description"] = "\n\n".join(filter(None, (about, first.get("description"))))
    return found


def used_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools without those that are left out, as a response repeats them."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") == _NAMESPACE:
            used = [each for each in tool["tools"] if each.get("type") in (_FUNCTION, _CUSTOM)]
            found.append({**tool, "tools": used})
        elif isinstance(function, dict):  # as a chat has it
            found.append({"type": _FUNCTION, **function})
        elif tool.get("type") in (_FUNCTION, _CUSTOM):
            found.append(tool)
    return found


def unusual_tools(tools: Raw) -> Mapping[str, OfferedTool]:
    """The tools whose calls are not printed as the calls of plain functions, by the names that the
    model is shown. tools: as a response repeats them.
    """
    encoded = bytes(tools)
    if not any(each in encoded for each in _UNUSUAL):
        return {}
    by_name = offered_tools(msgspec.json.decode(encoded)).by_name
    return {name: tool for name, tool in by_name.items() if tool.is_custom or tool.namespace}


def name_left_out(tools: Sequence[dict[str, Any]], ignored: IgnoredFields | None) -> None:
    """Add to `ignored` the tools that are left out, and the formats that nothing can enforce.

    Raises ApiError where `ignored` is None and there is one.
    """
    for path, where, tool in _each(tools):
        kind = tool.get("type")
        if not isinstance(kind, str):
            field = f"{where}.type"
            raise bad_field(field, f"{field}: got {shown(kind)}, allowed: {', '.join(_KNOWN)}, …")
        if kind == _CUSTOM:
            name_unenforced(tool, path, where, ignored)
        elif kind not in _KNOWN:
            if ignored is None:
                what = f"{where}.type: got {shown(kind)}, allowed: {', '.join(_KNOWN)}"
                raise bad_field(f"{where}.type", f"{what}; this server runs no tools itself")
            ignored.add(path, kind, _KNOWN)


def _each(tools: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Each tool, those of namespaces included, with how a header and an error name it."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        yield "tools.", where, tool
        if tool.get("type") == _NAMESPACE:
            _namespace(tool, where)
            for at, each in enumerate(tool["tools"]):
                yield "tools.namespace.", f"{where}.tools[{at}]", each


def _namespace(tool: dict[str, Any], where: str) -> tuple[str, str]:
    """The name and the description of a namespace. Raises: ApiError."""
    name, tools, about = tool.get("name"), tool.get("tools"), tool.get("description")
    if not (isinstance(name, str) and name):
        raise bad_field(f"{where}.name", f"{where}.name: got {shown(name)}, allowed: a name")
    if not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        field = f"{where}.tools"
        raise bad_field(field, f"{field}: got {shown(tools)}, allowed: functions and custom tools")
    return name, about if isinstance(about, str) else ""


def _add(found: OfferedTools, tool: dict[str, Any], namespace: str | None, where: str) -> None:
    """Add a tool, unless it is left out. Raises: ApiError."""
    is_custom = tool.get("type") == _CUSTOM
    if is_custom:
        function = function_of_custom(tool, where)
    elif tool.get("type") != _FUNCTION:
        return
    elif isinstance(tool.get("function"), dict):  # as a chat has it
        function = tool["function"]
    else:
        function = {
            key: value for key, value in tool.items() if key != "type" and value is not None
        }
    name = function.get("name")
    if isinstance(name, str):
        offered = offered_name(name, namespace)
        known = found.by_name.get(offered)
        new = OfferedTool(name, namespace, is_custom)
        if known not in (None, new) or (known is not None and (is_custom or namespace)):
            what = f"{where}.name: got {shown(name)}, which the model would be shown as the same"
            raise bad_field(f"{where}.name", f"{what} {offered[:100]!r} as a tool before it")
        if namespace and len(offered) > MAX_NAME_CHARS:
            what = f"{where}.name: got {len(offered)} characters with the namespace's, allowed: "
            raise bad_field(f"{where}.name", f"{what}{MAX_NAME_CHARS}")
        found.by_name[offered] = new
        function = {**function, "name": offered}
    found.functions.append({"type": _FUNCTION, "function": function})
