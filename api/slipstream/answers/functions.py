"""Python functions as tools: a signature and a docstring become a tool's definition.

- A parameter's type becomes a JSON schema by msgspec: built-in types, Literal, unions, lists,
  dictionaries, TypedDict, dataclasses and Structs, `Annotated` with a `msgspec.Meta`. A parameter
  without a type is of any.
- The docstring's text up to its first section describes the function. Its `Args:` section, or its
  `:param NAME:` lines, describe the parameters. Both may be missing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from slipstream_ipc.errors import BadRequest

Tool = Mapping[str, Any] | Callable[..., Any]

_SECTION = re.compile(r"(\w[\w ]*):\s*$")
_PARAM = re.compile(r":param (?:[^:]*\s)?(\w+):\s*(.*)$")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_ARGUMENT_SECTIONS = ("args", "arguments", "parameters", "params")
_SECTIONS = frozenset(
    {*_ARGUMENT_SECTIONS, "returns", "return", "raises", "yields", "example", "examples", "note"}
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def tool_definitions(tools: Any) -> Any:
    """The tools with a definition in the place of each function; anything else is left as it is.

    Raises: BadRequest where a function cannot be described.
    """
    if not isinstance(tools, Sequence) or not any(map(_is_function, tools)):
        return tools
    return [
        tool_definition(tool, f"tools[{index}]") if _is_function(tool) else tool
        for index, tool in enumerate(tools)
    ]


def tool_definition(function: Callable[..., Any], where: str = "tools") -> dict[str, Any]:
    """The definition of a function as a tool, in OpenAI's form.

    where: its name in errors. Raises: BadRequest.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise BadRequest(where, name, "a function with a name")
    try:
        parameters = inspect.signature(function).parameters
        named = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(named, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise BadRequest(where, name, f"a function with a signature and types ({error})") from None
    for parameter in parameters.values():
        if parameter.kind not in _NAMED:
            allowed = f"a function all of whose parameters have names: {parameter} has none"
            raise BadRequest(where, name, allowed)
    try:
        schemas, components = msgspec.json.schema_components(
            [hints.get(each, Any) for each in parameters], ref_template="#/$defs/{name}"
        )
    except (TypeError, ValueError) as error:
        raise BadRequest(where, name, f"parameters of types that JSON has ({error})") from None
    description, of_parameters = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, dict[str, Any]] = {}
    for parameter, schema in zip(parameters.values(), schemas, strict=True):
        own = dict(schema)
        if parameter.name in of_parameters:
            own["description"] = of_parameters[parameter.name]
        if parameter.default is not parameter.empty and _is_json_scalar(parameter.default):
            own["default"] = parameter.default
        properties[parameter.name] = own
    required = [each.name for each in parameters.values() if each.default is each.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    if components:
        schema["$defs"] = components
    definition: dict[str, Any] = {"name": name, "parameters": schema}
    if description:
        definition["description"] = description
    return {"type": "function", "function": definition}


def _is_function(tool: object) -> bool:
    return callable(tool) and not isinstance(tool, Mapping)


def _is_json_scalar(default: object) -> bool:
    return default is None or isinstance(default, str | int | float | bool)


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The description of the function, and those of its parameters by name."""
    description: list[str] = []
    of_parameters: dict[str, list[str]] = {}
    section, depth, current = "", None, description
    for line in docstring.splitlines():
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        param = _PARAM.match(text)
        heading = _SECTION.fullmatch(text) if not indent else None
        if param is not None:
            section, current = "param", of_parameters.setdefault(param[1], [])
            current.append(param[2])
        elif text.startswith(":") and not indent:
            section, current = "field", []  # :returns: and the like
        elif heading is not None and (section or heading[1].lower() in _SECTIONS):
            section, depth, current = heading[1].lower(), None, []
        elif section in _ARGUMENT_SECTIONS and text:
            depth = indent if depth is None else depth
            argument = _ARGUMENT.match(text) if indent <= depth else None
            if argument is not None:
                current = of_parameters.setdefault(argument[1], [])
                text = argument[2]
            current.append(text)
        else:
            current.append(text)
    return _joined(description), {name: _joined(lines) for name, lines in of_parameters.items()}


def _joined(lines: Sequence[str]) -> str:
    """The lines as text, with empty lines between paragraphs kept."""
    paragraphs = re.split(r"\n{2,}", "\n".join(lines).strip())
    return "\n\n".join([" ".join(each.split()) for each in paragraphs])
