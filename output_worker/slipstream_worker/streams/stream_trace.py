"""The times and events of a traced request, of which its spans are made when it is over.

The worker that serves a stream at its end makes the spans. What an earlier worker knew comes with
the registration, and the core sends its times again, so a trace outlives either of them; events
that only a dead worker knew are lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from slipstream_ipc.messages import FirstToken, RequestTimes, Submit, TraceContext

_TRACE_ID_BYTES = 16
_PARENT_ID_BYTES = 8


class TraceEvent(NamedTuple):
    """Something that happened to a request. at: CLOCK_MONOTONIC, s. took_s: None if unknown."""

    at: float
    name: str
    took_s: float | None


class RequestPhase(NamedTuple):
    """A part of a request's time. CLOCK_MONOTONIC, s."""

    name: str
    begin: float
    end: float


@dataclass(slots=True, eq=False)
class StreamTrace:
    """A traced stream. Times: CLOCK_MONOTONIC, s; 0.0 where unknown, or not reached.

    is_reported: an earlier worker has decided the stream's end. It made the spans if it could send
    that end to the stream's first reader.
    """

    origin: RequestTimes
    scheduled_at: float = 0.0  # when it was first in a step
    first_token_at: float = 0.0  # when its first token was known to the core
    ended_at: float = 0.0  # when its end was decided
    events: list[TraceEvent] = field(default_factory=list)
    is_reported: bool = False

    def note_first_token(self, times: FirstToken) -> None:
        """The core's times; those of a later core, which runs it again, do not count."""
        if not self.first_token_at:
            self.scheduled_at, self.first_token_at = times.scheduled_s, times.sampled_s

    def note_event(self, at: float, name: str, since: float = 0.0) -> None:
        """Something has happened that lasted from `since` to `at`; 0.0: unknown for how long."""
        self.events.append(TraceEvent(at, name, max(0.0, at - since) if since else None))

    def phases(self, first_sent_at: float, now: float) -> list[RequestPhase]:
        """The phases that the request has begun, in order, as of its end.

        first_sent_at: when its first delta was sent; 0.0: by another worker, or never.
        """
        origin, ended = self.origin, self.ended_at or now
        if not origin.rendered_s:
            return [RequestPhase("tokenize", origin.arrived_s, now)]
        scheduled, first = self.scheduled_at, self.first_token_at
        bounds = [
            ("tokenize", origin.arrived_s, origin.rendered_s),
            ("queue", origin.rendered_s, scheduled or ended),
        ]
        if scheduled:
            bounds.append(("prefill", scheduled, first or ended))
        if first:
            bounds.append(("decode", first, ended))
            bounds.append(("delivery", first_sent_at or first, now))
        return [RequestPhase(name, begin, max(begin, end)) for name, begin, end in bounds]


def context_of(submit: Submit) -> TraceContext:
    """The trace of a submission: its caller's, or one whose id follows from the stream's id, so
    that a stream that is submitted again stays in its trace.
    """
    context = submit.trace
    if context is not None and _is_valid(context):
        return context
    return TraceContext(derived_id(submit.stream_id, b"trace", _TRACE_ID_BYTES))


def times_of(submit: Submit, now: float) -> RequestTimes:
    """The times of a submission that arrives now."""
    operation = "chat" if submit.messages else "text_completion"
    return RequestTimes(operation, now, is_resubmitted=submit.was_accepted)


def derived_id(stream_id: bytes, what: bytes, num_bytes: int) -> bytes:
    """The id of a stream's trace or span; the stream's own id cannot be derived from it.

    what: at most 16 bytes.
    """
    return blake2b(stream_id, digest_size=num_bytes, person=what).digest()


def _is_valid(context: TraceContext) -> bool:
    has_parent = len(context.parent_id) == _PARENT_ID_BYTES and any(context.parent_id)
    is_trace = len(context.trace_id) == _TRACE_ID_BYTES and any(context.trace_id)
    return is_trace and (has_parent or not context.parent_id)
