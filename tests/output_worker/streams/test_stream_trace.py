"""The phases of a traced request, whatever is known of it, and the ids of its trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs

from slipstream_ipc.messages import ChatMessage, FirstToken, RequestTimes, Submit, TraceContext
from slipstream_worker.streams.stream_trace import StreamTrace, context_of, times_of

CONTEXT = TraceContext(b"t" * 16, b"p" * 8)
SUBMIT = Submit(0, b"s" * 16, Raw(b""), text="x")
NAMES = ("tokenize", "queue", "prefill", "decode", "delivery")

moments = st.floats(1.0, 2.0) | st.just(0.0)


def traced(rendered_s: float = 0.0) -> StreamTrace:
    return StreamTrace(RequestTimes("chat", 1.0, rendered_s))


def test_a_whole_request_has_all_phases() -> None:
    trace = traced(2.0)
    trace.note_first_token(FirstToken(b"", 3.0, 4.0))
    trace.note_first_token(FirstToken(b"", 7.0, 8.0))  # a later core's
    trace.ended_at = 5.0
    assert trace.phases(4.5, 6.0) == [
        ("tokenize", 1.0, 2.0),
        ("queue", 2.0, 3.0),
        ("prefill", 3.0, 4.0),
        ("decode", 4.0, 5.0),
        ("delivery", 4.5, 6.0),
    ]


def test_a_phase_that_is_not_reached_is_left_out() -> None:
    assert traced().phases(0.0, 2.0) == [("tokenize", 1.0, 2.0)]
    assert [phase.name for phase in traced(2.0).phases(0.0, 3.0)] == ["tokenize", "queue"]


@given(moments, moments, moments, moments, moments)
def test_no_phase_ends_before_it_begins(
    rendered: float, scheduled: float, first: float, ended: float, sent: float
) -> None:
    trace = traced(rendered)
    trace.scheduled_at, trace.first_token_at, trace.ended_at = scheduled, first, ended
    phases = trace.phases(sent, 3.0)
    names = [phase.name for phase in phases]
    assert names == [name for name in NAMES if name in names]
    assert all(0 < phase.begin <= phase.end for phase in phases)


def test_a_trace_is_the_callers_or_follows_from_the_stream() -> None:
    submit = structs.replace(SUBMIT, trace=CONTEXT)
    assert context_of(submit) == CONTEXT
    assert times_of(submit, 1.0) == RequestTimes("text_completion", 1.0)
    chat = structs.replace(SUBMIT, text=None, messages=(ChatMessage("user", "x"),))
    again = structs.replace(chat, was_accepted=True)
    first = context_of(chat)
    assert first == context_of(again), "a stream that is submitted again stays in its trace"
    assert len(first.trace_id) == 16
    assert SUBMIT.stream_id not in first.trace_id
    assert times_of(chat, 1.0) == RequestTimes("chat", 1.0)
    assert times_of(again, 2.0) == RequestTimes("chat", 2.0, is_resubmitted=True)
    other = structs.replace(chat, stream_id=b"o" * 16)
    assert context_of(other) != first


@pytest.mark.parametrize(
    "context",
    [
        TraceContext(b"short"),
        TraceContext(bytes(16), b"p" * 8),
        TraceContext(b"t" * 16, b"p"),
        TraceContext(b"t" * 16, bytes(8)),
    ],
)
def test_a_context_that_cannot_be_is_ignored(context: TraceContext) -> None:
    expected = context_of(SUBMIT)
    assert context_of(structs.replace(SUBMIT, trace=context)) == expected
