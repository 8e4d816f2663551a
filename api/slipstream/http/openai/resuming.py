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
from slipstream.http.errors import ApiError, bad_field
from slipstream.http.exchange import HttpRequest
from slipstream.http.openai.chat import ChatShape
from slipstream.http.openai.completions import CompletionShape
from slipstream.http.openai.event_ids import (
    MAX_PLACES,
    Place,
    Told,
    parse_answer_id,
    parse_event_id,
)
from slipstream.http.openai.generate import GenerateShape
from slipstream.http.openai.plan_answer import Ask, Shape
from slipstream.requests import new_resume
from slipstream_ipc.messages import ModelCard, Resume, Submit

PREFIX = "/v1/streams/"
_SHAPES: dict[str, Shape] = {
    "cmpl": CompletionShape(),
    "chatcmpl": ChatShape(),
    "gen": GenerateShape(),
}
_SAME_POST = (
    "POST the same request with this Last-Event-ID: it is computed again, and goes on behind it"
)
_OTHER_BODY = "the body is another request than the event's; with the same one it is computed again"
QUERY = ("include_usage", "continuous_usage_stats", "logprobs", "last_event_id")


def wants_events(request: HttpRequest) -> bool:
    """Whether the client accepts `text/event-stream`, and so may use event ids."""
    return b"text/event-stream" in request.headers.get(b"accept", b"").lower()


def last_event(request: HttpRequest) -> str | None:
    """The Last-Event-ID header, if any."""
    given = request.headers.get(b"last-event-id")
    return given.decode("latin-1").strip() if given else None


def ask_again(event_id: str, kind: str, model: ModelCard, same: Callable[[], Ask]) -> Ask:
    """The streams of a POST that resumes after an event. kind: of the path, see `AnswerId`. same:
    makes a new `Ask` of the body.

    Raises: ApiError.
    """
    told = parse_event_id(event_id)
    if told.answer.kind != kind:
        given = f"one of {told.answer}"
        raise bad_field("last-event-id", f"last-event-id: got {given}, allowed: one of this path's")
    return _ask(told, model, is_begun=True, submits=_submits(told, same))


def ask_for_stream(request: HttpRequest, model: ModelCard) -> Ask:
    """The streams of GET /v1/streams/ID. Raises: ApiError."""
    answer = parse_answer_id(unquote(request.path.removeprefix(PREFIX)))
    query = _query(request.query)
    event_id = last_event(request) or query.get("last_event_id")
    if event_id is not None:
        told = parse_event_id(event_id)
        if told.answer != answer:
            what = f"last-event-id: got one of {told.answer}, allowed: one of {answer}"
            raise bad_field("last-event-id", what)
        return _ask(told, model, is_begun=True)
    if answer.num_streams > MAX_PLACES:
        what = f"id: got an answer of {answer.num_streams} choices, allowed: {MAX_PLACES}"
        raise bad_field("id", what)
    places = (Place(),) * answer.num_streams
    with_usage = _flag(query, "include_usage")
    with_usage_so_far = _flag(query, "continuous_usage_stats") and with_usage
    usage = (with_usage, with_usage_so_far)
    told = Told(answer, int(time.time()), _logprobs(query), *usage, places)
    return _ask(told, model, is_begun=False)


def _submits(told: Told, same: Callable[[], Ask]) -> list[Submit]:
    """What the streams were submitted as; empty if the body is not the request of the event."""
    try:
        ask = same()
    except (ApiError, BadRequestError):
        return []
    answer = told.answer
    if (ask.id.num_prompts, ask.id.num_answers) != (answer.num_prompts, answer.num_answers):
        return []
    if told.request not in (None, ask.request_checksum):
        return []
    found = [state.resubmittable for state in ask.states]
    return [
        replace(submit, stream_id=bytes.fromhex(each))
        for submit, each in zip(found, answer.stream_ids(), strict=True)
        if submit is not None
    ]


def _ask(
    told: Told, model: ModelCard, *, is_begun: bool, submits: Sequence[Submit] | None = None
) -> Ask:
    """submits: made of the body; empty if it is another request, None without a body."""
    ids = told.answer.stream_ids()
    hint = "" if submits else (_SAME_POST if submits is None else _OTHER_BODY)
    return Ask(
        id=told.answer,
        model=model.name,
        created=told.created,
        states=[
            StreamState(_resume(each, place), wants_whole=False, resubmittable=submit)
            for each, place, submit in zip(ids, told.places, submits or repeat(None), strict=False)
        ],
        shape=_SHAPES[told.answer.kind],
        is_stream=True,
        with_usage=told.with_usage,
        with_usage_so_far=told.with_usage_so_far,
        num_logprobs=told.num_logprobs,
        places=told.places if is_begun else (),
        is_usage_told=told.is_usage_told,
        is_resumable=True,
        told_request=told.request,
        if_unknown=hint,
    )


def _resume(stream_id: str, place: Place) -> Resume:
    return new_resume(stream_id, place.num_chars, place.num_tokens, place.checksum)


def _query(query: str) -> dict[str, str]:
    """The parameters of a query. Raises: ApiError."""
    given = parse_qs(query, keep_blank_values=True)
    for name, values in given.items():
        if name not in QUERY or len(values) > 1:
            what = f"{name[:100]}: allowed in the query: {', '.join(QUERY)}, each of them once"
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
