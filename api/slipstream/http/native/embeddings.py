"""POST /v1/embeddings, in OpenAI's shapes, with vLLM's fields.

- A request is several queries (`EmbeddingCall`), whose vectors are encoded as they come, in time
  slices: a request with many does not delay streams.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct

from slipstream.client.connection.embedding_call import EmbeddingCall, Part
from slipstream.client.connection.loop_io import LoopIO
from slipstream.http.api_errors import bad_field, callers_fields, error_of
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.openai.body_decoder import BodyDecoder
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import EmbeddingRequest
from slipstream.http.openai.response_bodies import Embedding, EmbeddingUsage
from slipstream.http.planning.served_model import served_model
from slipstream.http.response_encoding import json_response
from slipstream.http.time_slice import TimeSlicedQueue
from slipstream.request.embedding_inputs import (
    EmbeddingOptions,
    embed_queries,
    embedding_inputs,
)
from slipstream.request.served_models import base_of
from slipstream_ipc.messages import Embed
from slipstream_ipc.validation.field_types import field_error

MAX_INPUTS = 2048  # of a request, as OpenAI's
_FLOATS = 2**13  # that are encoded at once
_decoder = BodyDecoder(EmbeddingRequest)
_encode = msgspec.json.Encoder().encode


class _EmbeddingList(Struct, frozen=True):
    data: list[Raw]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


def read_embeddings(content: bytes, ignored: IgnoredFields | None = None) -> EmbeddingRequest:
    """Decode a body. ignored: see `BodyDecoder`. Raises: ApiError."""
    body = _decoder.decode(content, ignored)
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise bad_field("use_activation", "use_activation: allowed: the value of normalize")
    return body


def embeddings(
    io: LoopIO,
    body: EmbeddingRequest,
    request: HttpRequest,
    exchange: Exchange,
    slices: TimeSlicedQueue,
) -> None:
    """Embed the inputs of a body. Raises: ApiError, BadRequestError."""
    model = served_model(io, body.model)
    inputs = embedding_inputs(checked_types(body.input))
    if len(inputs) > MAX_INPUTS:
        raise bad_field("input", f"input: got {len(inputs)} inputs, allowed: {MAX_INPUTS}")
    options = EmbeddingOptions(
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        prompt_name=body.prompt_name,
        normalize=body.use_activation if body.normalize is None else body.normalize,
        add_special_tokens=body.add_special_tokens,
    )
    names = {"normalize": "use_activation"} if body.normalize is None else {}
    with callers_fields(names):
        queries = embed_queries(inputs, model, options)
    answer = _Answer(body, model.name, queries, exchange, slices)
    tenant = request.tenant or b""
    asked = [msgspec.structs.replace(query, tenant=tenant) for query in queries]
    answer.begin(EmbeddingCall(asked, partial(_ask, io, base_of(model)), answer.add))


def _ask(io: LoopIO, model: str, query: Embed) -> Any:
    return io.ask(query, model)


def checked_types(given: str | list[Any]) -> Any:
    """The input of a body. Raises: ApiError."""
    if isinstance(given, str) or not given:
        return given
    first = given[0]
    kind: type = list[str] if isinstance(first, str) else list[int]
    if isinstance(first, list):
        kind = list[list[int]]
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        wrong = field_error(error, kind, given, where="input")
        what = "text, token ids, or a list of several of either"
        raise bad_field(wrong.field, f"{wrong} (input is {what})") from None


class _Answer:
    """The answer to a request, made of its queries' answers in any order."""

    def __init__(
        self,
        body: EmbeddingRequest,
        model: str,
        queries: list[Embed],
        exchange: Exchange,
        slices: TimeSlicedQueue,
    ) -> None:
        self._is_base64 = body.encoding_format == "base64"
        self._model = model
        self._exchange = exchange
        self._slices = slices
        nums = [len(query.texts) or len(query.counts) // 4 for query in queries]
        self._begins = np.cumsum([0, *nums]).tolist()
        self._parts: list[list[Raw]] = [[] for _ in queries]
        self._num_left = len(queries)
        self._num_tokens = 0

    def begin(self, call: EmbeddingCall) -> None:
        """Refuse the request if the call fails; end the call if the client disconnects."""

        def disconnect() -> None:
            call.future.cancel()

        self._exchange.on_disconnect = disconnect
        call.future.add_done_callback(self._done)

    def add(self, index: int, part: Part) -> None:
        """A query is answered: encode its vectors, some at a time."""
        vectors, nums = part
        self._num_tokens += sum(nums)
        rows = max(1, _FLOATS // max(1, vectors.shape[1]))
        cuts = iter(range(0, len(vectors), rows))

        def work() -> bool:
            begin = next(cuts, None)
            if begin is not None and self._exchange.is_open:
                self._parts[index] += self._encoded(
                    self._begins[index] + begin, vectors[begin : begin + rows]
                )
                return True
            self._num_left -= 1
            if not self._num_left:
                self._respond()
            return False

        self._slices.add(work, self._exchange.request.tenant)

    def _encoded(self, first: int, vectors: Any) -> Iterator[Raw]:
        for index, vector in enumerate(vectors, first):
            value = base64.b64encode(vector).decode() if self._is_base64 else vector.tolist()
            yield Raw(_encode(Embedding(index, value)))

    def _respond(self) -> None:
        usage = EmbeddingUsage(self._num_tokens, self._num_tokens)
        data = [each for part in self._parts for each in part]
        self._exchange.respond(json_response(200, _EmbeddingList(data, self._model, usage)))

    def _done(self, future: Any) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._exchange.refuse(error_of(error, {}))
