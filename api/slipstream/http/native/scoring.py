"""POST /classify, /score and /rerank, in vLLM's shapes; /rerank in Jina's and Cohere's, too.

- A request is several queries, as one for embeddings is (`EmbeddingCall`).
- Texts of documents are encoded in time slices: a request with much text does not delay streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from slipstream.client.connection.embedding_call import EmbeddingCall, Part
from slipstream.client.connection.loop_io import LoopIO
from slipstream.errors import bad_request
from slipstream.http.api_errors import bad_field, error_of
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.native.embeddings import MAX_INPUTS, checked_types
from slipstream.http.openai.body_decoder import BodyDecoder
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import (
    ClassificationRequest,
    RerankRequest,
    ScoreRequest,
)
from slipstream.http.openai.response_bodies import (
    Classification,
    EmbeddingUsage,
    Reranked,
    RerankedText,
    Score,
)
from slipstream.http.planning.served_model import served_model
from slipstream.http.response_encoding import json_response
from slipstream.http.time_slice import TimeSlicedQueue
from slipstream.request.embedding_inputs import (
    ClassifyOptions,
    classify_queries,
    embedding_inputs,
)
from slipstream.request.scoring_inputs import (
    PairNames,
    Scores,
    ScoringOptions,
    ScoringPlan,
    checked_top_n,
    plan_scores,
    ranked,
    texts_of,
)
from slipstream.request.served_models import base_of
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Embed, ModelCard

_PART_CHARS = 2**16  # of documents, or numbers, that are encoded at once
_SIDES = ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")
_classify_decoder = BodyDecoder(ClassificationRequest)
_score_decoder = BodyDecoder(ScoreRequest)
_rerank_decoder = BodyDecoder(RerankRequest)
_encode = msgspec.json.Encoder().encode
_Encoder = Callable[[], bytes]
_Items = tuple[list[_Encoder], list[int], list[int]]


class _Listed(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Raw]
    usage: EmbeddingUsage
    object: str = "list"


class _Results(Struct, frozen=True):
    id: str
    model: str
    results: list[Raw]
    usage: EmbeddingUsage


def read_classification(
    content: bytes, ignored: IgnoredFields | None = None
) -> ClassificationRequest:
    """Decode a body. ignored: see `BodyDecoder`. Raises: ApiError."""
    return _classify_decoder.decode(content, ignored)


def read_score(content: bytes, ignored: IgnoredFields | None = None) -> ScoreRequest:
    """Decode a body. ignored: see `BodyDecoder`. Raises: ApiError."""
    return _score_decoder.decode(content, ignored)


def read_rerank(content: bytes, ignored: IgnoredFields | None = None) -> RerankRequest:
    """Decode a body. ignored: see `BodyDecoder`. Raises: ApiError."""
    return _rerank_decoder.decode(content, ignored)


def classify(
    io: LoopIO,
    body: ClassificationRequest,
    request: HttpRequest,
    exchange: Exchange,
    slices: TimeSlicedQueue,
) -> None:
    """Classify the inputs of a body. Raises: ApiError, BadRequestError."""
    model = served_model(io, body.model)
    inputs = embedding_inputs(checked_types(body.input))
    _check_num("input", len(inputs))
    options = ClassifyOptions(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        use_activation=body.use_activation,
        add_special_tokens=body.add_special_tokens,
    )
    queries = classify_queries(inputs, model, options)
    assert model.pooling is not None
    labels = model.pooling.labels

    def answer(part: Part) -> _Items:
        rows, nums = part
        best = rows.argmax(1).tolist()

        def encoded(index: int) -> bytes:
            label = labels[best[index]]
            return _encode(Classification(index, label, rows[index].tolist(), len(labels)))

        return (
            [partial(encoded, at) for at in range(len(rows))],
            [8 * len(labels)] * len(rows),
            nums,
        )

    def whole(data: list[Raw], usage: EmbeddingUsage) -> Struct:
        return _Listed(f"classify-{request.id}", int(time.time()), model.name, data, usage)

    _answer(io, queries, model, exchange, slices, None, answer, whole)


def score(
    io: LoopIO,
    body: ScoreRequest,
    request: HttpRequest,
    exchange: Exchange,
    slices: TimeSlicedQueue,
) -> None:
    """Score the pairs of a body. Raises: ApiError, BadRequestError."""
    model = served_model(io, body.model)
    first, second = _sides(body)
    names = PairNames(first, second)
    given = getattr(body, first), getattr(body, second)
    for name, texts in zip((first, second), given, strict=True):
        _check_num(name, len(texts) if isinstance(texts, list) else 1)
    plan = plan_scores(*given, model, _options(body), names)

    def answer(part: Part) -> _Items:
        found = plan.scores(*part)
        parts: list[_Encoder] = [
            partial(_encode, Score(at, each)) for at, each in enumerate(found.scores.tolist())
        ]
        return parts, [64] * len(parts), part[1]

    def whole(data: list[Raw], usage: EmbeddingUsage) -> Struct:
        return _Listed(f"score-{request.id}", int(time.time()), model.name, data, usage)

    _answer(io, plan.queries, model, exchange, slices, plan, answer, whole)


def rerank(
    io: LoopIO,
    body: RerankRequest,
    request: HttpRequest,
    exchange: Exchange,
    slices: TimeSlicedQueue,
) -> None:
    """Rank the documents of a body. Raises: ApiError, BadRequestError."""
    model = served_model(io, body.model)
    _check_num("documents", len(body.documents))
    try:
        most = checked_top_n(body.top_n)
        texts = texts_of("documents", body.documents) if body.documents else []
    except BadRequest as error:
        raise bad_request(error) from None

    def whole(results: list[Raw], usage: EmbeddingUsage) -> Struct:
        return _Results(f"rerank-{request.id}", model.name, results, usage)

    names = PairNames("query", "documents")
    # a request without documents is checked as one with a document
    plan = plan_scores(body.query, texts or [""], model, _options(body), names)
    if not texts:
        exchange.respond(json_response(200, whole([], EmbeddingUsage(0, 0))))
        return
    shows = body.return_documents is not False

    def answer(part: Part) -> _Items:
        found: Scores = plan.scores(*part)
        best = ranked(found, texts, most)

        def encoded(at: int) -> bytes:
            each = best[at]
            document = RerankedText(each.document) if shows else None
            return _encode(Reranked(each.index, each.relevance_score, document))

        sizes = [64 + len(each.document) for each in best]
        encoders: list[_Encoder] = [partial(encoded, at) for at in range(len(best))]
        return encoders, sizes, part[1]

    _answer(io, plan.queries, model, exchange, slices, plan, answer, whole)


def _sides(body: ScoreRequest) -> tuple[str, str]:
    """The names of the two fields that have the pairs. Raises: ApiError."""
    given = {name for pair in _SIDES for name in pair if getattr(body, name) is not None}
    for pair in _SIDES:
        if given == set(pair):
            return pair
    what = ", or ".join(f"{first} and {second}" for first, second in _SIDES)
    got = ", ".join(sorted(given)) or "none of them"
    raise bad_field("text_1", f"text_1: got {got}, allowed: {what}")


def _options(body: ScoreRequest | RerankRequest) -> ScoringOptions:
    return ScoringOptions(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        max_tokens_per_query=body.max_tokens_per_query,
        max_tokens_per_doc=body.max_tokens_per_doc,
        use_activation=body.use_activation,
        instruction=body.instruction,
    )


def _check_num(name: str, num: int) -> None:
    if num > MAX_INPUTS:
        raise bad_field(name, f"{name}: got {num} inputs, allowed: {MAX_INPUTS}")


def _answer(
    io: LoopIO,
    queries: list[Embed],
    model: ModelCard,
    exchange: Exchange,
    slices: TimeSlicedQueue,
    plan: ScoringPlan | None,
    parts_of: Callable[[Part], _Items],
    whole: Callable[[list[Raw], EmbeddingUsage], Struct],
) -> None:
    """Ask queries, and answer with what is made of them. parts_of: of all rows, what encodes the
    answer's items, how large each is about, and the tokens of the inputs.
    """
    tenant = exchange.request.tenant or b""

    def ask(query: Embed) -> Any:
        return io.ask(replace(query, tenant=tenant), base_of(model))

    call = EmbeddingCall(queries, ask, name_of=None if plan is None else plan.name_of)

    def disconnect() -> None:
        call.future.cancel()

    def done(future: Any) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            exchange.refuse(error_of(error, {}))
            return
        encoders, sizes, nums = parts_of(future.result())
        usage = EmbeddingUsage(sum(nums), sum(nums))
        data: list[Raw] = []
        cuts = _cuts(sizes)

        def work() -> bool:
            begin, end = next(cuts, (0, 0))
            if begin < end and exchange.is_open:
                data.extend(Raw(encode()) for encode in encoders[begin:end])
                return True
            exchange.respond(json_response(200, whole(data, usage)))
            return False

        slices.add(work, exchange.request.tenant)

    exchange.on_disconnect = disconnect
    call.future.add_done_callback(done)


def _cuts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of items of about `_PART_CHARS`."""
    begin, size = 0, 0
    for at, each in enumerate(sizes):
        if at > begin and size + each > _PART_CHARS:
            yield begin, at
            begin, size = at, 0
        size += each
    if begin < len(sizes):
        yield begin, len(sizes)
