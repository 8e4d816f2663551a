"""Resuming an answer: a request names an event or an answer, and gets the rest of its streams.

- For streams that still exist, the id of the client's last event is enough.
- If a stream is gone (front, worker and core died), the body is: if it is the request of the event,
  it is computed again under the same stream ids, hence with the same seeds, and continues after the
  event. The worker compares the tokens with the event's checksum. A GET has no body and uses what
  the front still knows of the request.
- A GET without an event id gets the answer from its beginning, written as the query says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from urllib.parse import parse_qs, unquote

from msgspec.structs import replace

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import BadRequestError
from slipstream.http.answers.answer_plan import AnswerPlan, AnswerShape
from slipstream.http.answers.event_ids import (
    MAX_CURSORS,
    AnswerId,
    EventId,
    StreamCursor,
    parse_answer_id,
    parse_event_id,
)
from slipstream.http.anthropic.message_printer import MESSAGES
from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.blocks.block_printer import BlockShape
from slipstream.http.exchange import HttpRequest
from slipstream.http.native.generate import GenerateShape
from slipstream.http.planning.chat import ChatShape
from slipstream.http.planning.completions import CompletionShape
from slipstream.http.planning.planner import OPEN_TOKENS
from slipstream.http.responses.response_object import ResponseObject
from slipstream.http.responses.response_printer import response_shape
from slipstream.request.requests import new_resume
from slipstream.request.served_models import base_of
from slipstream_ipc.messages import ModelCard, Resume, Submit

PREFIX = "/v1/streams/"
_SHAPES: dict[str, AnswerShape | BlockShape] = {
    "cmpl": CompletionShape(),
    "chatcmpl": ChatShape(),
    "gen": GenerateShape(),
    "msg": MESSAGES,
    "resp": response_shape(ResponseObject(id="", created_at=0, model="")),
}
_SAME_POST = (
    "POST the same request with this Last-Event-ID: it is computed again and continues after the "
    "event"
)
_BEGIN_AGAIN = "POST the request again"
_NO_REQUEST = "the body is no valid request; the event's own would be computed again"
QUERY = ("include_usage", "continuous_usage_stats", "logprobs", "last_event_id")


def accepts_events(request: HttpRequest) -> bool:
    """True if the client accepts `text/event-stream`, and so may use event ids."""
    # others take every line of a stream for data (decision 024)
    return b"text/event-stream" in request.headers.get(b"accept", b"").lower()


def last_event_id(request: HttpRequest) -> str | None:
    """The Last-Event-ID header, if any."""
    given = request.headers.get(b"last-event-id")
    return given.decode("latin-1").strip() if given else None


def plan_or_resume(
    request: HttpRequest, kind: str, model: ModelCard, new_plan: Callable[[], AnswerPlan]
) -> AnswerPlan:
    """The plan of a POST: a new answer, or the rest of the one that Last-Event-ID names.

    kind: of the path, see `AnswerId`. new_plan: makes a new `AnswerPlan` of the body.

    Raises: ApiError.
    """
    text = last_event_id(request)
    if text is None:
        return new_plan()
    event_id = parse_event_id(text)
    if event_id.answer.kind != kind:
        given = f"an event of {event_id.answer}"
        raise bad_field(
            "last-event-id", f"last-event-id: got {given}, allowed: an event of this path"
        )
    return _plan(event_id, model, is_begun=True, submits=_submits(event_id, new_plan))


def resumed_answer(request: HttpRequest) -> AnswerId:
    """The answer that GET /v1/streams/ID names. Raises: ApiError."""
    return parse_answer_id(unquote(request.path.removeprefix(PREFIX)))


def plan_resumed_stream(request: HttpRequest, model: ModelCard) -> AnswerPlan:
    """The streams of GET /v1/streams/ID. Raises: ApiError."""
    answer = resumed_answer(request)
    query = _query(request.query)
    text = last_event_id(request) or query.get("last_event_id")
    if text is not None:
        event_id = parse_event_id(text)
        if event_id.answer != answer:
            what = f"last-event-id: got an event of {event_id.answer}, allowed: of {answer}"
            raise bad_field("last-event-id", what)
        return _plan(event_id, model, is_begun=True)
    if answer.num_streams > MAX_CURSORS:
        what = f"id: got an answer of {answer.num_streams} choices, allowed: {MAX_CURSORS}"
        raise bad_field("id", what)
    cursors = (StreamCursor(),) * answer.num_streams
    with_usage = _flag(query, "include_usage")
    with_usage_so_far = _flag(query, "continuous_usage_stats") and with_usage
    usage = (with_usage, with_usage_so_far)
    event_id = EventId(answer, int(time.time()), _logprobs(query), *usage, cursors)
    return _plan(event_id, model, is_begun=False)


def _submits(event_id: EventId, new_plan: Callable[[], AnswerPlan]) -> list[Submit]:
    """The Submits of the body's streams, as they were sent; empty if the body is no valid
    request.

    Raises: ApiError for a body that is another request than the event's.
    """
    try:
        plan = new_plan()
    except (ApiError, BadRequestError):
        return []
    answer = event_id.answer
    is_same = (plan.id.num_prompts, plan.id.num_answers) == (answer.num_prompts, answer.num_answers)
    if not is_same or event_id.request not in (None, plan.request_checksum):
        what = "the body is another request than the event's; send the same one, or GET the stream"
        raise ApiError(409, f"last-event-id: {what}", param="last-event-id")
    found = [state.resubmittable for state in plan.states]
    return [
        replace(submit, stream_id=bytes.fromhex(each))
        for submit, each in zip(found, answer.stream_ids(), strict=True)
        if submit is not None
    ]


def _plan(
    event_id: EventId, model: ModelCard, *, is_begun: bool, submits: Sequence[Submit] | None = None
) -> AnswerPlan:
    """submits: made of the body; empty if it is no valid request, None without a body."""
    ids = event_id.answer.stream_ids()
    hint = "" if submits else (_SAME_POST if submits is None else _NO_REQUEST)
    if hint == _SAME_POST and not is_begun:  # there is no event that could be posted
        hint = _BEGIN_AGAIN
    return AnswerPlan(
        id=event_id.answer,
        model=model.name,
        base=base_of(model),
        created=event_id.created,
        states=[
            StreamState(
                _resume(each, cursor),
                wants_whole=False,
                resubmittable=submit,
                keeps_prompt_ids=_SHAPES[event_id.answer.kind].has_ids,
            )
            for each, cursor, submit in zip(
                ids, event_id.cursors, submits or repeat(None), strict=False
            )
        ],
        shape=_SHAPES[event_id.answer.kind],
        is_stream=True,
        with_usage=event_id.with_usage,
        with_usage_so_far=event_id.with_usage_so_far,
        num_logprobs=event_id.num_logprobs,
        cursors=event_id.cursors if is_begun else (),
        is_usage_sent=event_id.is_usage_sent,
        is_resumable=True,
        event_checksum=event_id.request,
        unknown_hint=hint,
        has_all_logprobs=event_id.has_all_logprobs,
        most_tokens=min(OPEN_TOKENS, model.max_model_len) * len(ids),
        names_calls=event_id.names_calls,
    )


def _resume(stream_id: str, cursor: StreamCursor) -> Resume:
    if cursor.number is not None:  # an answer by blocks is printed from its beginning
        cursor = StreamCursor()
    return new_resume(stream_id, cursor.num_chars, cursor.num_tokens, cursor.checksum)


def _query(query: str) -> dict[str, str]:
    """The parameters of a query. Raises: ApiError."""
    given = parse_qs(query, keep_blank_values=True)
    for name, values in given.items():
        if name not in QUERY or len(values) > 1:
            what = f"{name[:100]}: allowed in the query: {', '.join(QUERY)}, each at most once"
            raise bad_field(name[:100], what)
    return {name: values[0] for name, values in given.items()}


def _flag(query: dict[str, str], name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise bad_field(name, f"{name}: got {value[:100]!r}, allowed: true, false")
    return value == "true"


def _logprobs(query: dict[str, str]) -> int | None:
    value = query.get("logprobs")
    if value is not None and not (value.isascii() and value.isdigit() and len(value) < 8):
        raise bad_field("logprobs", f"logprobs: got {value[:100]!r}, allowed: a number")
    return None if value is None else int(value)
