"""What a chat template may be given beside the messages, and what may be asked of a tokenizer: the
checks, at both ends.

Owns: the shape of tool definitions (OpenAI's), which variables a request may set, how many tokens
a question may be about. Does not know: templates, tokenizers. Refusals name the caller's field.

Rules:
- Variables that are the renderer's own arguments are refused: a request that could set
  `chat_template` would bring code of its own.
- Both travel as JSON text, and are read where they are used: by the client that checks them, and by
  the prompt process, never by the worker's loop.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, ProtocolError, brief
from slipstream_ipc.messages import MAX_TEMPLATE_CHARS, ChatMessage, ModelCard, TemplateOptions

MAX_TOOLS = 1024
MAX_QUESTION_TOKENS = 2**20  # of a Tokenize or Detokenize; so that its answer fits into a message
# of a Tokenize that asks for their spelling too: written as JSON these keep a front for 50 ms
MAX_SPELLED_TOKENS = 2**16
# of a Tokenize, all it has; nobody else's long prompt is tokenised meanwhile
MAX_QUESTION_CHARS = 2**22

# arguments of transformers' apply_chat_template, and what it calls the turns on the way
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
    """What a tool is; `parameters` is a JSON schema. More fields may be there."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, frozen=True):
    """A tool's definition, as OpenAI has it. More fields may be there."""

    function: Function
    type: Literal["function"]


_tools_decoder = msgspec.json.Decoder(list[Tool])
_object_decoder = msgspec.json.Decoder(dict[str, Any])


def template_options(
    tools: Any = None,
    kwargs: Any = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> TemplateOptions:
    """Checked options of what a caller gives; `tools` and `kwargs` as lists and dicts, or None.

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
    """The tools, as dicts, and the variables. Raises: BadRequest."""
    for name, text in (("tools", options.tools), ("chat_template_kwargs", options.kwargs)):
        if len(text) > MAX_TEMPLATE_CHARS:
            raise BadRequest(name, f"{len(text)} characters", f"at most {MAX_TEMPLATE_CHARS}")
    if options.continue_final_message and options.add_generation_prompt:
        allowed = "true only where add_generation_prompt is false"
        raise BadRequest("continue_final_message", True, allowed)
    return _tools(options.tools), _kwargs(options.kwargs)


def template_message(message: ChatMessage, where: str = "messages") -> dict[str, Any]:
    """A message as templates expect it: the arguments of its tool calls are objects.

    where: what the caller calls the message. Raises: BadRequest where they are none.
    """
    turn: dict[str, Any] = msgspec.to_builtins(message)
    if message.tool_calls is not None:
        turn["tool_calls"] = list(turn["tool_calls"])
    for index, call in enumerate(turn.get("tool_calls", ())):
        function = call["function"]
        try:
            function["arguments"] = _object_decoder.decode(function["arguments"] or "{}")
        except (msgspec.DecodeError, RecursionError):
            field = f"{where}.tool_calls[{index}].function.arguments"
            raise BadRequest(field, function["arguments"], "a JSON object, as text") from None
    return turn


def check_token_ids(column: bytes, card: ModelCard) -> None:
    """BadRequest for a column of ids that cannot be asked about."""
    try:
        ids = u32(column)
    except ProtocolError:
        raise BadRequest("token_ids", f"{len(column)} bytes", "u32 values") from None
    if len(ids) > MAX_QUESTION_TOKENS:
        raise BadRequest("token_ids", f"{len(ids)} tokens", f"at most {MAX_QUESTION_TOKENS}")
    if len(ids) and int(ids.max()) >= card.vocab_size:
        allowed = f"token ids in [0, {card.vocab_size})"
        raise BadRequest("token_ids", int(ids.max()), allowed)


def _as_json(name: str, value: Any) -> str:
    if value is None:
        return ""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, TypeError, RecursionError, ValueError) as error:
        given = f"a {type(value).__name__}"  # it may be too deep to be shown, too
        raise BadRequest(name, given, f"what JSON and UTF-8 can hold ({error})") from error


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
        raise BadRequest("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
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
        raise BadRequest("chat_template_kwargs", ", ".join(taken), allowed)
    return found
