"""POST /v1/chat/completions: from a body to an `Ask`, and the shape of the answer.

The worker renders the chat template; the front only checks the messages.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw

from slipstream.client.connection.queries import checked_template
from slipstream.delta_batch import TokenLogprobs
from slipstream.http.errors import bad_field
from slipstream.http.openai.decoding import BodyDecoder, refuse_unsupported
from slipstream.http.openai.logprob_json import chat_json
from slipstream.http.openai.logprobs import TextPlace, chat_logprobs
from slipstream.http.openai.plan_answer import (
    Ask,
    Said,
    check_num_shown,
    check_prompt_shown,
    names_of,
    new_ask,
    sampling_params,
)
from slipstream.http.openai.requests import ChatRequest, Message, TokenizeRequest
from slipstream.http.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    Logprobs,
)
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.outputs import Delta
from slipstream.requests import params_of_answers
from slipstream_ipc.messages import ChatMessage as Turn
from slipstream_ipc.messages import ModelCard, TemplateOptions

_ANSWERER = "assistant"
_TURN_TOKENS = 16  # that a template adds around a turn, estimated
_decoder = BodyDecoder(ChatRequest)


def read_chat(content: bytes) -> ChatRequest:
    """Decode a body and refuse unsupported fields. Raises: ApiError."""
    body = _decoder.decode(content)
    refuse_unsupported(body)
    for index, message in enumerate(body.messages):
        refuse_unsupported(message, f"messages[{index}].")
    return body


def ask_chat(body: ChatRequest, model: ModelCard) -> Ask:
    """The streams of a new chat completion. Raises: ApiError, BadRequestError."""
    num_logprobs = _num_logprobs(body)
    max_tokens, names = _max_tokens(body)
    params = sampling_params(
        body,
        model.default_sampling,
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    turns = turns_of(body.messages)
    template = template_of(body)
    check_num_shown(params, "top_logprobs", params.n, 0, model)
    check_prompt_shown(body.prompt_logprobs, _most_tokens(turns, template, model), model)
    return new_ask(
        "chatcmpl",
        ChatShape(has_ids=bool(body.return_token_ids)),
        body,
        model,
        prompts=[turns],
        params=params,
        answers=params_of_answers(params),
        param_names={"prompt": "messages", "logprobs": "top_logprobs", **names, **names_of(body)},
        template=template,
    )


class ChatShape:
    """See `Shape`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_many_prompts = False

    def __init__(self, *, has_ids: bool = False) -> None:
        self.has_ids = has_ids

    def whole(
        self, index: int, text: str, logprobs: Logprobs | None, reason: str, said: Said
    ) -> Choice:
        ids = said.token_ids if self.has_ids else UNSET
        return ChatChoice(index, ChatMessage(_ANSWERER, text), logprobs, reason, ids)

    def first(self, index: int) -> Choice | None:
        return ChatChunkChoice(index, ChatDelta(_ANSWERER, ""), None, None)

    def chunk(
        self,
        index: int,
        text: str | Raw,
        logprobs: Logprobs | Raw | None,
        reason: str | None,
        said: Said,
    ) -> Choice:
        delta = ChatDelta(content=text) if text else ChatDelta()
        ids = said.token_ids if self.has_ids else UNSET
        return ChatChunkChoice(index, delta, logprobs, reason, ids)

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        return chat_logprobs(entries, k, texts)

    def logprobs_json(self, delta: Delta, texts: TokenTexts, place: TextPlace) -> bytes | None:
        return chat_json(delta, texts)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None and body.top_logprobs != 0:
        raise bad_field("top_logprobs", "top_logprobs: allowed only where logprobs is true")
    return None


def _max_tokens(body: ChatRequest) -> tuple[int | None, dict[str, str]]:
    """The token limit, and the caller's name for it."""
    if body.max_completion_tokens is None:
        return body.max_tokens, {}
    if body.max_tokens not in (None, body.max_completion_tokens):
        what = "max_tokens: got another number than max_completion_tokens, allowed: one of both"
        raise bad_field("max_tokens", what)
    return body.max_completion_tokens, {"max_tokens": "max_completion_tokens"}


def turns_of(messages: tuple[Message, ...]) -> tuple[Turn, ...]:
    """The messages as the worker renders them. Raises: ApiError."""
    if not messages:
        raise bad_field("messages", "messages: got none, allowed: one or more")
    return tuple(_turn(index, message) for index, message in enumerate(messages))


def template_of(body: ChatRequest | TokenizeRequest) -> TemplateOptions:
    """What the chat template is given besides the messages. Raises: BadRequestError."""
    return checked_template(
        body.tools,
        body.chat_template_kwargs,
        body.add_generation_prompt,
        body.continue_final_message,
    )


def _turn(index: int, message: Message) -> Turn:
    content = message.content
    if content is None and message.tool_calls:
        content = ""
    if content is None:
        field = f"messages[{index}].content"
        raise bad_field(field, f"{field}: got null, allowed: text, or a list of text parts")
    if not isinstance(content, str):
        content = "".join([part.text for part in content])
    calls = message.tool_calls or None
    return Turn(message.role, content, message.name, calls, message.tool_call_id)


def _most_tokens(turns: tuple[Turn, ...], template: TemplateOptions, model: ModelCard) -> int:
    """An estimated upper bound of the rendered prompt's tokens, assuming one per byte."""
    num_bytes = len(msgspec.json.encode(turns)) + len(template.tools) + len(template.kwargs)
    return min(num_bytes + _TURN_TOKENS * len(turns), model.max_model_len)
