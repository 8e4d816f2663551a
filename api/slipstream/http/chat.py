"""POST /v1/chat/completions: a conversation to a stream, and the shape of what it says.

Owns: what messages may be. Does not know: chat templates (the worker renders), how streams run.
"""

from __future__ import annotations

import secrets
import time

from msgspec import Raw

from slipstream.batch import TokenLogprobs
from slipstream.http.ask import (
    Ask,
    check_num_shown,
    names_of,
    num_shown,
    sampling_params,
    wants_usage,
)
from slipstream.http.decoding import BodyDecoder, refuse_unsupported
from slipstream.http.errors import bad_field
from slipstream.http.event_ids import AnswerId
from slipstream.http.logprobs import TextPlace, chat_logprobs
from slipstream.http.requests import ChatRequest, Message
from slipstream.http.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    Logprobs,
)
from slipstream.http.token_texts import TokenTexts
from slipstream.requests import new_submit, params_of_answers
from slipstream.stream_table import StreamState
from slipstream_ipc.messages import ChatMessage as Turn
from slipstream_ipc.messages import ModelCard

_ANSWERER = "assistant"
_decoder = BodyDecoder(ChatRequest)


def read_chat(content: bytes) -> ChatRequest:
    """Raises: ApiError."""
    body = _decoder.decode(content)
    refuse_unsupported(body)
    for index, message in enumerate(body.messages):
        refuse_unsupported(message, f"messages[{index}].")
    return body


def ask_chat(body: ChatRequest, model: ModelCard) -> Ask:
    """Raises: ApiError, BadRequestError."""
    num_logprobs = _num_logprobs(body)
    max_tokens, names = _max_tokens(body)
    params = sampling_params(
        body, model.default_sampling, max_tokens=max_tokens, num_logprobs=num_logprobs
    )
    if not body.messages:
        raise bad_field("messages", "messages: got none, allowed: one or more")
    check_num_shown(params, "top_logprobs", params.n, 0, model)
    turns = tuple(_turn(index, message) for index, message in enumerate(body.messages))
    answers = params_of_answers(params)
    answer_id = AnswerId("chatcmpl", secrets.token_bytes(16), num_answers=len(answers))
    submits = [
        new_submit(
            turns,
            each,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            model=model,
            stream_id=stream_id,
        )
        for stream_id, each in zip(answer_id.stream_ids(), answers, strict=True)
    ]
    return Ask(
        id=answer_id,
        model=model.name,
        created=int(time.time()),
        states=[StreamState(submit, wants_whole=not body.stream) for submit in submits],
        shape=ChatShape(),
        is_stream=bool(body.stream),
        with_usage=wants_usage(body),
        num_logprobs=num_shown(num_logprobs, model),
        param_names={"prompt": "messages", "logprobs": "top_logprobs", **names, **names_of(body)},
    )


class ChatShape:
    """See `Shape`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, text: str, logprobs: Logprobs | None, reason: str) -> Choice:
        return ChatChoice(index, ChatMessage(_ANSWERER, text), logprobs, reason)

    def first(self, index: int) -> Choice | None:
        return ChatChunkChoice(index, ChatDelta(_ANSWERER, ""), None, None)

    def chunk(
        self, index: int, text: str | Raw, logprobs: Logprobs | Raw | None, reason: str | None
    ) -> Choice:
        delta = ChatDelta(content=text) if text else ChatDelta()
        return ChatChunkChoice(index, delta, logprobs, reason)

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        return chat_logprobs(entries, k, texts)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None and body.top_logprobs != 0:
        raise bad_field("top_logprobs", "top_logprobs: allowed only where logprobs is true")
    return None


def _max_tokens(body: ChatRequest) -> tuple[int | None, dict[str, str]]:
    """The limit, and what the caller calls it."""
    if body.max_completion_tokens is None:
        return body.max_tokens, {}
    if body.max_tokens not in (None, body.max_completion_tokens):
        what = "max_tokens: got another number than max_completion_tokens, allowed: one of both"
        raise bad_field("max_tokens", what)
    return body.max_completion_tokens, {"max_tokens": "max_completion_tokens"}


def _turn(index: int, message: Message) -> Turn:
    content = message.content
    if content is None:
        field = f"messages[{index}].content"
        raise bad_field(field, f"{field}: got null, allowed: text, or a list of text parts")
    if not isinstance(content, str):
        content = "".join([part.text for part in content])
    return Turn(message.role, content)
