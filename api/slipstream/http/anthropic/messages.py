"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over that of a chat."""

from __future__ import annotations

from msgspec.structs import replace as replace_field

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.connection.queries import ids_of
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.anthropic.chat_request import PARAM_NAMES, chat_request
from slipstream.http.anthropic.message_printer import MESSAGES
from slipstream.http.anthropic.request_bodies import CountTokensRequest, MessagesRequest
from slipstream.http.anthropic.response_bodies import InputTokens
from slipstream.http.api_errors import callers_fields
from slipstream.http.exchange import Exchange
from slipstream.http.openai.body_decoder import BodyDecoder, refuse_unsupported
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.planning.chat import plan_chat, prompt_query
from slipstream.http.planning.served_model import ask, respond_when_done
from slipstream.http.response_encoding import Response, json_response
from slipstream.request.served_models import base_of
from slipstream_ipc.messages import ModelCard, Tokenized

KIND = "msg"
_decoder = BodyDecoder(MessagesRequest)
_count_decoder = BodyDecoder(CountTokensRequest)


def read_messages(content: bytes, ignored: IgnoredFields | None = None) -> MessagesRequest:
    """Decode a body and refuse unsupported fields. ignored: see `BodyDecoder`. Raises: ApiError."""
    body = _decoder.decode(content, ignored)
    refuse_unsupported(body)
    return body


def read_count_tokens(content: bytes, ignored: IgnoredFields | None = None) -> CountTokensRequest:
    """Read a body of `count_tokens`; see `read_messages`."""
    body = _count_decoder.decode(content, ignored)
    refuse_unsupported(body)
    return body


def plan_messages(body: MessagesRequest, model: ModelCard) -> AnswerPlan:
    """The stream of a new message. Raises: ApiError."""
    with callers_fields(PARAM_NAMES):
        chat = chat_request(body)
        if body.max_tokens >= model.max_model_len:
            # the field is required, so libraries fill in what their own models can
            chat = replace_field(chat, max_tokens=None)
    return plan_chat(chat, model, kind=KIND, shape=MESSAGES, param_names=PARAM_NAMES)


def count_tokens(
    io: LoopIO, body: CountTokensRequest, model: ModelCard, exchange: Exchange
) -> None:
    """Answer with the number of the prompt's tokens. Raises: ApiError."""
    asked, places = prompt_query(chat_request(body), model)

    def response_of(found: Tokenized) -> Response:
        return json_response(200, InputTokens(len(ids_of(found))))

    names = {**places, "prompt": "messages"}
    respond_when_done(ask(io, asked, base_of(model), exchange), exchange, response_of, names)
