"""The options by which a caller says how the answer to chat messages is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from slipstream.errors import bad_request
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import AnswerOptions, StopScope

ToolChoice = Literal["auto", "none"]


def answer_options(
    tool_choice: ToolChoice | str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    stop_scope: StopScope = "content",
    parse_answer: bool = True,
) -> AnswerOptions | None:
    """Checked options of an answer; None where it is to be text alone.

    tool_choice: "auto", or "none": no tools are shown to the model, and calls are content.

    Raises: BadRequestError.
    """
    try:
        choice = "auto" if tool_choice is None else tool_choice
        if not isinstance(choice, str) or choice not in get_args(ToolChoice):
            allowed = '"auto" or "none"; calls cannot be forced yet'
            raise BadRequest("tool_choice", tool_choice, allowed)
        if not isinstance(parallel_tool_calls, bool | None):
            raise BadRequest("parallel_tool_calls", parallel_tool_calls, "True, False or None")
        if stop_scope not in get_args(StopScope):
            raise BadRequest("stop_scope", stop_scope, '"content" or "all"')
        if not isinstance(parse_answer, bool):
            raise BadRequest("parse_answer", parse_answer, "True or False")
    except BadRequest as error:
        raise bad_request(error) from None
    if not parse_answer:
        return None
    return AnswerOptions(choice, parallel_tool_calls is not False, stop_scope)
