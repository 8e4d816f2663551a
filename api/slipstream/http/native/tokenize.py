"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes.

- The worker's tokenizer process does the work.
- /detokenize takes at most max(MAX_IDS_FLOOR, max_model_len) ids, and never more than
  MAX_QUERY_TOKENS: decoding more JSON would delay all streams. Ids are counted before decoding.
- /tokenizer_info returns tokenizer_config.json without the paths of its files.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs

import msgspec

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.connection.queries import ids_of, new_detokenize, new_tokenize
from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel, TokenTexts
from slipstream.http.openai.body_decoder import (
    BodyDecoder,
    refuse_unsupported,
    refuse_unsupported_in,
)
from slipstream.http.openai.chat_turns import chat_of_turns
from slipstream.http.openai.request_bodies import DetokenizeRequest, TokenizeRequest
from slipstream.http.openai.response_bodies import Text, Tokens
from slipstream.http.planning.chat import template_options
from slipstream.http.planning.served_model import (
    ask,
    respond_when_done,
    served_model,
    served_models,
)
from slipstream.http.response_encoding import Response, json_response
from slipstream.request.served_models import base_of
from slipstream_ipc.messages import Detokenized, ModelCard, Tokenize, Tokenized
from slipstream_ipc.validation.chat_template import MAX_QUERY_CHARS, MAX_QUERY_TOKENS

_FOR_MESSAGES = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)
MAX_IDS_FLOOR = 2**16
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_PATH_FIELDS = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file")
_DEFAULT_CLASS = "PreTrainedTokenizerFast"
_SLACK = 1024  # commas elsewhere in the body, in the model's name for example
_tokenize_decoder = BodyDecoder(TokenizeRequest)
_detokenize_decoder = BodyDecoder(DetokenizeRequest)


def tokenize(io: LoopIO, request: HttpRequest, exchange: Exchange) -> None:
    """POST /tokenize. Raises: ApiError, BadRequestError."""
    body = _tokenize_decoder.decode(request.body)
    model = served_model(io, body.model)
    refuse_unsupported(body, supported=("add_special_tokens",))
    asked, names = _tokenize_query(body, model)

    def response_of(found: Tokenized) -> Response:
        ids = ids_of(found)
        strings = list(found.strings) if body.return_token_strs else None
        return json_response(200, Tokens(len(ids), model.max_model_len, ids, strings))

    names["with_strings"] = "return_token_strs"
    if body.messages is not None:
        names["prompt"] = "messages"
    respond_when_done(ask(io, asked, base_of(model), exchange), exchange, response_of, names)


def detokenize(io: LoopIO, request: HttpRequest, exchange: Exchange) -> None:
    """POST /detokenize. Raises: ApiError, BadRequestError."""
    most = max([_max_ids(model) for model in served_models(io)])
    if (num := request.body.count(b",") + 1) > most + _SLACK:
        raise bad_field("tokens", f"tokens: got {num}, allowed: at most {most}")
    body = _detokenize_decoder.decode(request.body)
    model = served_model(io, body.model)
    most = _max_ids(model)
    if len(body.tokens) > most:
        raise bad_field("tokens", f"tokens: got {len(body.tokens)}, allowed: at most {most}")
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < model.vocab_size):
        raise bad_field("tokens", f"tokens: allowed: token ids in [0, {model.vocab_size})")

    def response_of(found: Detokenized) -> Response:
        return json_response(200, Text(found.text))

    asked = new_detokenize(body.tokens, model)
    names = {"token_ids": "tokens"}
    respond_when_done(ask(io, asked, base_of(model), exchange), exchange, response_of, names)


def tokenizer_info(
    io: LoopIO, texts: TextsByModel, request: HttpRequest, exchange: Exchange
) -> None:
    """GET /tokenizer_info?model=NAME; the name may be left out where one model is served.

    Raises: ApiError.
    """
    [name] = parse_qs(request.query).get("model", [None])[-1:]
    model = served_model(io, name)
    exchange.respond(Response(200, _tokenizer_info(texts.of(base_of(model)))))


@lru_cache(maxsize=16)
def _tokenizer_info(texts: TokenTexts) -> bytes:
    """Raises: ApiError."""
    try:
        folder = texts.folder()
        config: dict[str, Any] = msgspec.json.decode((folder / _CONFIG).read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        raise ApiError(404, f"this model has no {_CONFIG}", code="not_found") from None
    for name in _PATH_FIELDS:
        config.pop(name, None)
    config.setdefault("tokenizer_class", _DEFAULT_CLASS)
    template = folder / _TEMPLATE
    if "chat_template" not in config and template.is_file():
        config["chat_template"] = template.read_text()
    return msgspec.json.encode(config)


def _max_ids(model: ModelCard) -> int:
    return min(MAX_QUERY_TOKENS, max(MAX_IDS_FLOOR, model.max_model_len))


def _tokenize_query(body: TokenizeRequest, model: ModelCard) -> tuple[Tokenize, dict[str, str]]:
    """The query, and the caller's names of its images, for errors. Raises: ApiError."""
    if (body.prompt is None) == (body.messages is None):
        what = "prompt: got both or neither of prompt and messages, allowed: one of them"
        raise bad_field("prompt", what)
    if body.prompt is not None and len(body.prompt) > MAX_QUERY_CHARS:
        given = f"{len(body.prompt)} characters"
        raise bad_field("prompt", f"prompt: got {given}, allowed: at most {MAX_QUERY_CHARS}")
    with_strings = bool(body.return_token_strs)
    if body.messages is None:
        for name in _FOR_MESSAGES:
            if getattr(body, name) is not None:
                raise bad_field(name, f"{name}: allowed only with messages")
        asked = new_tokenize(
            body.prompt, add_special_tokens=body.add_special_tokens, with_strings=with_strings
        )
        return asked, {}
    refuse_unsupported_in(body.messages, "messages")
    chat, names = chat_of_turns(body.messages, model)
    asked = new_tokenize(
        chat,
        template_options(body),
        add_special_tokens=body.add_special_tokens,
        with_strings=with_strings,
    )
    return asked, names
