"""Checks what a request gives a chat template besides the messages, and tokenizer queries.

Tool definitions have OpenAI's form. Every BadRequest names the caller's field.

- Variables with the names of the renderer's arguments are refused: a request that sets
  `chat_template` would bring its own code.
- Tools and variables are sent as JSON text and decoded where they are used: by the client, which
  checks them, and by the tokenizer process, but not by the worker's loop.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, ProtocolError, Summary, brief
from slipstream_ipc.messages import MAX_TEMPLATE_CHARS, ModelCard, TemplateOptions
from slipstream_ipc.validation.json_nesting import is_nested_deeper

MAX_TOOLS = 1024
MAX_TEMPLATE_NESTING = 128  # levels; templates and their filters call themselves for each
MAX_QUERY_TOKENS = 2**20  # per Tokenize or Detokenize, so that the answer fits into a message
# per Tokenize with_strings: encoding these as JSON blocks an HTTP front for 50 ms
MAX_SPELLED_TOKENS = 2**16
# per Tokenize, in all its texts: no other long prompt is tokenized meanwhile, and hardly a text of
# as many has more than MAX_QUERY_TOKENS, so one that is refused was not tokenized for it
MAX_QUERY_CHARS = 2**20

# arguments of transformers' apply_chat_template, and its internal names for the turns
RESERVED = frozenset(
    [
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)


class Function(Struct, frozen=True):
    """The function of a tool; `parameters` is a JSON schema. Unknown fields are allowed."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(Struct, frozen=True):
    """A tool's definition in OpenAI's form. Unknown fields are allowed."""

    function: Function
    type: Literal["function"]


_tools_decoder = msgspec.json.Decoder(list[ToolDefinition])
_object_decoder = msgspec.json.Decoder(dict[str, Any])


def template_options(
    tools: Any = None,
    kwargs: Any = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> TemplateOptions:
    """TemplateOptions of a caller's `tools` (a list) and `kwargs` (a dict), either may be None.

    Raises: BadRequest.
    """
    options = TemplateOptions(
        _as_json("tools", tools),
        _as_json("chat_template_kwargs", kwargs),
        add_generation_prompt,
        continue_final_message,
    )
    read_template(options)
    return options


def read_template(options: TemplateOptions) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """The tools as dicts, None if there are none, and the variables. Raises: BadRequest."""
    for name, text in (("tools", options.tools), ("chat_template_kwargs", options.kwargs)):
        if len(text) > MAX_TEMPLATE_CHARS:
            raise BadRequest(
                name, Summary(f"{len(text)} characters"), f"at most {MAX_TEMPLATE_CHARS}"
            )
        if is_nested_deeper(text, MAX_TEMPLATE_NESTING):
            raise _too_deep(name)
    if options.continue_final_message and options.add_generation_prompt:
        allowed = "true only where add_generation_prompt is false"
        raise BadRequest("continue_final_message", True, allowed)
    return _tools(options.tools), _kwargs(options.kwargs)


def check_token_ids(column: bytes, card: ModelCard) -> None:
    """Check the ids of a Detokenize: column, length and vocabulary. Raises: BadRequest."""
    try:
        ids = u32(column)
    except ProtocolError:
        raise BadRequest("token_ids", Summary(f"{len(column)} bytes"), "u32 values") from None
    if len(ids) > MAX_QUERY_TOKENS:
        raise BadRequest("token_ids", Summary(f"{len(ids)} tokens"), f"at most {MAX_QUERY_TOKENS}")
    if len(ids) and int(ids.max()) >= card.vocab_size:
        allowed = f"token ids in [0, {card.vocab_size})"
        raise BadRequest("token_ids", int(ids.max()), allowed)


def _too_deep(name: str) -> BadRequest:
    given = Summary("lists and objects within each other")
    return BadRequest(name, given, f"at most {MAX_TEMPLATE_NESTING} levels of them")


def _as_json(name: str, value: Any) -> str:
    if value is None:
        return ""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise _too_deep(name) from None
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        given = Summary(f"a {type(value).__name__}")  # the value may be nested too deeply for repr
        raise BadRequest(
            name, given, f"values that JSON and UTF-8 can represent ({error})"
        ) from error


def _tools(text: str) -> list[dict[str, Any]] | None:
    if not text:
        return None
    try:
        tools = _tools_decoder.decode(text)
        whole: list[dict[str, Any]] = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        allowed = f"a list of tools: type (function) and function with its name ({error})"
        raise BadRequest("tools", brief(text), allowed) from None
    if len(tools) > MAX_TOOLS:
        raise BadRequest("tools", Summary(f"{len(tools)} tools"), f"at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        if not tool.function.name:
            given = Summary(f"a function without a name (tools[{index}])")
            raise BadRequest("tools", given, "functions with names")
    return whole or None


def _kwargs(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = _object_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest("chat_template_kwargs", brief(text), f"an object ({error})") from None
    taken = sorted(RESERVED & found.keys())
    if taken:
        allowed = "variables of the template's own; " + ", ".join(sorted(RESERVED)) + " are not"
        raise BadRequest("chat_template_kwargs", Summary(", ".join(taken)), allowed)
    return found
