"""POST /v1/chat/completions: from a body to an `AnswerPlan`, and the shape of the answer.

The worker renders the chat template; the front only checks the messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import msgspec
from msgspec import UNSET
from msgspec.structs import replace as replace_field

from slipstream.answers.answer_options import answer_options as checked_options
from slipstream.client.connection.queries import checked_template, new_tokenize
from slipstream.http.answers.answer_plan import AnswerPlan, ChoiceContent
from slipstream.http.api_errors import bad_field, callers_fields, composed_names
from slipstream.http.blocks.block_printer import BlockShape
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_encoding import chat_logprobs_json
from slipstream.http.logprobs.logprob_pieces import ShownLogprobs, chat_pieces
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.openai.allowed_tools import name_of, tools_of_names
from slipstream.http.openai.answer_parts import ASSISTANT, delta_of_kind
from slipstream.http.openai.body_decoder import (
    BodyDecoder,
    refuse_unsupported,
    refuse_unsupported_in,
)
from slipstream.http.openai.chat_tools import (
    functions_of,
    name_unenforced_formats,
    with_functions,
)
from slipstream.http.openai.chat_turns import chat_of_turns, reasoning_target, template_variables
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import ChatRequest, TokenizeRequest
from slipstream.http.openai.response_bodies import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    Choice,
)
from slipstream.http.planning.planner import (
    caller_names,
    check_num_logprobs,
    check_num_prompt_logprobs,
    plan_answer,
    sampling_params,
)
from slipstream.outputs import Delta
from slipstream.request.parallel_sampling import params_of_answers
from slipstream_ipc.messages import (
    MAX_CHAT_TURNS,
    AnswerOptions,
    ChatMessage,
    ModelCard,
    TemplateOptions,
    Tokenize,
)

_TURN_TOKENS = 16  # that a template adds around a turn, estimated
_decoder = BodyDecoder(ChatRequest)


def read_chat(content: bytes, ignored: IgnoredFields | None = None) -> ChatRequest:
    """Decode a body and refuse unsupported fields. ignored: see `BodyDecoder`. Raises: ApiError."""
    body = _decoder.decode(content, ignored)
    refuse_unsupported(body)
    if len(body.messages) > MAX_CHAT_TURNS:
        what = f"messages: got {len(body.messages)} messages, allowed: at most {MAX_CHAT_TURNS}"
        raise bad_field("messages", what)
    refuse_unsupported_in(body.messages, "messages")
    name_unenforced_formats(body, ignored)
    return body


def plan_chat(
    body: ChatRequest,
    model: ModelCard,
    *,
    kind: str = "chatcmpl",
    shape: BlockShape | None = None,
    strict_finish: bool = False,
    param_names: dict[str, str] | None = None,
) -> AnswerPlan:
    """The streams of a new chat completion, or of another endpoint's answer to the same body.

    kind: see `AnswerId`. shape: if the answer is printed by blocks. strict_finish: a call of a
    named function has OpenAI's finish reason, `stop`. param_names: the other endpoint's name for
    each of a chat's fields whose name differs.

    Raises: ApiError.
    """
    max_tokens, names = _max_tokens(body)
    names |= {"prompt": "messages", "logprobs": "top_logprobs", "prediction": "prediction.content"}
    names |= caller_names(body)
    names = composed_names(names, param_names or {})
    with callers_fields(names):
        functions, custom_tools = with_functions(body)
        own = ChatShape(has_ids=bool(body.return_token_ids), custom_tools=custom_tools)
        plan = _plan(with_allowed_tools(functions), model, max_tokens, kind, shape or own, names)
    choice = functions.tool_choice
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    return replace(
        plan,
        has_all_logprobs=body.logprobs_scope == "all",
        names_calls=not (strict_finish and is_named),
    )


def _plan(
    body: ChatRequest,
    model: ModelCard,
    max_tokens: int | None,
    kind: str,
    shape: ChatShape | BlockShape,
    names: dict[str, str],
) -> AnswerPlan:
    num_logprobs = _num_logprobs(body)
    params = sampling_params(
        body,
        model.default_sampling,
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    chat, places = chat_of_turns(body.messages, model)
    answer = answer_options_of_body(body)
    form = body.response_format
    if answer.forces_calls and form is not None and form.type != "text":
        params = replace_field(params, structured_outputs=None)  # of content, and there is none
    template = template_options(body)
    check_num_logprobs(params, "top_logprobs", params.n, 0, model)
    if body.prompt_logprobs is not None:
        most_tokens = _most_tokens(chat.messages, template, model)
        check_num_prompt_logprobs(body.prompt_logprobs, most_tokens, model)
    return plan_answer(
        kind,
        shape,
        body,
        model,
        prompts=[chat],
        params=params,
        answers=params_of_answers(params),
        param_names={**names, **places},
        template=template,
        answer=answer,
        prediction=None if body.prediction is None else body.prediction.text,
    )


class ChatShape:
    """See `AnswerShape`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_many_prompts = False
    reads_events = True

    def __init__(self, *, has_ids: bool = False, custom_tools: Collection[str] = ()) -> None:
        self.has_ids = has_ids
        self.custom_tools = custom_tools

    def choice(self, content: ChoiceContent) -> Choice:
        parts = content.parts
        message = AnswerMessage(ASSISTANT, content.text) if parts is None else parts.message()
        ids = content.token_ids if self.has_ids else UNSET
        return ChatChoice(content.index, message, content.logprobs, content.finish_reason, ids)

    def first_chunk(self, index: int) -> Choice | None:
        return ChatChunkChoice(index, ChatDelta(ASSISTANT, ""), None, None)

    def chunk(self, content: ChoiceContent) -> Choice:
        if content.parts is not None:
            delta = content.parts.delta()
        else:
            delta = delta_of_kind(content.kind, content.text) if content.text else ChatDelta()
        ids = content.token_ids if self.has_ids else UNSET
        return ChatChunkChoice(content.index, delta, content.logprobs, content.finish_reason, ids)

    def logprobs(self, shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
        return chat_pieces(shown, is_line=is_line)

    def logprobs_json(
        self, delta: Delta, texts: TokenTexts, position: TextPosition
    ) -> bytes | None:
        return chat_logprobs_json(delta, texts)


def answer_options_of_body(body: ChatRequest) -> AnswerOptions:
    """The options by which the worker reads the answer. Raises: BadRequestError."""
    options = checked_options(
        body.tool_choice, body.parallel_tool_calls, body.stop_scope or "content"
    )
    assert options is not None
    options = replace_field(options, reasoning_target=reasoning_target(body))
    if options.tool_choice == "auto" and not body.tools:
        return replace_field(options, tool_choice="none")
    return options


def with_allowed_tools(body: ChatRequest) -> ChatRequest:
    """The body with just the tools that `allowed_tools` lists. Raises: ApiError."""
    match body.tool_choice:
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)},
        }:
            field = "tool_choice.allowed_tools.tools"
            names = [name_of(each) if isinstance(each, dict) else None for each in listed]
            tools = tools_of_names(body.tools or (), names, field)
            return replace_field(body, tools=tools, tool_choice=mode)
    return body


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None and body.top_logprobs != 0:
        raise bad_field("top_logprobs", "top_logprobs: allowed only if logprobs is true")
    return None


def _max_tokens(body: ChatRequest) -> tuple[int | None, dict[str, str]]:
    """The token limit, and the caller's name for it."""
    if body.max_completion_tokens is None:
        return body.max_tokens, {}
    if body.max_tokens not in (None, body.max_completion_tokens):
        what = "max_tokens: differs from max_completion_tokens, allowed: only one of them"
        raise bad_field("max_tokens", what)
    return body.max_completion_tokens, {"max_tokens": "max_completion_tokens"}


def template_options(body: ChatRequest | TokenizeRequest) -> TemplateOptions:
    """The input of the chat template besides the messages. Raises: BadRequestError."""
    return checked_template(
        None if body.tools is None else functions_of(body.tools),
        template_variables(body) if isinstance(body, ChatRequest) else body.chat_template_kwargs,
        body.add_generation_prompt,
        body.continue_final_message,
    )


def prompt_query(body: ChatRequest, model: ModelCard) -> tuple[Tokenize, dict[str, str]]:
    """Asks for the tokens of a chat's prompt. Returns the names of its images, too, for errors.
    Raises: ApiError, BadRequestError.
    """
    body = with_allowed_tools(body)
    if answer_options_of_body(body).tool_choice == "none":  # the model does not see them
        body = replace_field(body, tools=None)
    chat, places = chat_of_turns(body.messages, model)
    return new_tokenize(chat, template_options(body)), places


def _most_tokens(
    messages: tuple[ChatMessage, ...], template: TemplateOptions, model: ModelCard
) -> int:
    """An estimated upper bound of the rendered prompt's tokens, assuming one per byte."""
    num_bytes = len(msgspec.json.encode(messages)) + len(template.tools) + len(template.kwargs)
    return min(num_bytes + _TURN_TOKENS * len(messages), model.max_model_len)
