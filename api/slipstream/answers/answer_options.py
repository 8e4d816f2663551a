"""The options by which a caller says how the answer to chat messages is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from slipstream.errors import bad_request
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import AnswerOptions, StopScope
from slipstream_ipc.messages.answer import FUNCTION_CHOICE, MAX_NAME_CHARS

ToolChoice = Literal["auto", "none", "required"]

_CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'


def answer_options(
    tool_choice: ToolChoice | str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    stop_scope: StopScope = "content",
    parse_answer: bool = True,
) -> AnswerOptions | None:
    """Checked options of an answer; None where it is to be text alone.

    tool_choice: "auto"; "none": no tools are shown to the model, and calls are content; "required":
    the answer is calls; or a tool, as a mapping: the answer is one call of it.

    Raises: BadRequestError.
    """
    try:
        choice = _wire_choice(tool_choice)
        if not isinstance(parallel_tool_calls, bool | None):
            raise BadRequest("parallel_tool_calls", parallel_tool_calls, "True, False or None")
        if stop_scope not in get_args(StopScope):
            raise BadRequest("stop_scope", stop_scope, '"content" or "all"')
        if not isinstance(parse_answer, bool):
            raise BadRequest("parse_answer", parse_answer, "True or False")
        if not parse_answer and choice not in ("auto", "none"):
            raise BadRequest("parse_answer", False, "True where a call is forced")
    except BadRequest as error:
        raise bad_request(error) from None
    if not parse_answer:
        return None
    return AnswerOptions(choice, parallel_tool_calls is not False, stop_scope)


def _wire_choice(given: object) -> str:
    """The choice in the form of `AnswerOptions`. Raises BadRequest."""
    match given:
        case None:
            return "auto"
        case str() if given in get_args(ToolChoice):
            return given
        case {"type": "function", "function": {"name": str(name)}}:
            if not 0 < len(name) <= MAX_NAME_CHARS:
                wrong = Summary(f"a function's name of {len(name)} characters")
                raise BadRequest("tool_choice", wrong, f"1 to {MAX_NAME_CHARS}")
            if not name.isprintable():  # as lone surrogates are not
                raise BadRequest("tool_choice", given, "a name of printable characters")
            return FUNCTION_CHOICE + name
        case _:
            raise BadRequest("tool_choice", given, _CHOICES)
