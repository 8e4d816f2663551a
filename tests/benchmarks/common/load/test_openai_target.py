"""Event streams and the answers in them, however the bytes are cut; no sockets."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_bench.common.load import http_client
from slipstream_bench.common.load.http_client import EventSplitter, RequestFailedError
from slipstream_bench.common.load.openai_target import OpenAIAnswer


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(ends)]


def events_of(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [data for piece in pieces for data in splitter.feed(piece)]


fields = st.sampled_from([b"data: ", b"data:", b": ", b"event: ", b"id: ", b"data"])
values = st.binary(max_size=6).map(lambda value: value.translate(None, b"\r\n"))
lines = st.tuples(fields, values).map(b"".join)
endings = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.lists(lines, max_size=4), max_size=5), endings, st.lists(st.integers(0, 999)))
def test_events_are_the_same_however_they_are_cut(events, ending, cuts):
    stream = b"".join(b"".join(line + ending for line in event) + ending for event in events)
    expected = []
    for event in events:  # as the standard describes it, line by line
        told = [line for line in event if line.startswith(b"data:")]
        if told:
            expected.append(b"\n".join(line[5:].removeprefix(b" ") for line in told))
    found = events_of(pieces_of(stream, cuts))
    if ending == b"\r" and stream:  # a lone CR at the very end may be half of a CR LF
        found += events_of([*pieces_of(stream, cuts), b":\n\n"])[len(found) :]
    assert found == expected


def test_an_event_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    assert splitter.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(RequestFailedError, match="malformed"):
        splitter.feed(b"x" * 20)


def test_the_last_id_is_kept_until_another_comes():
    splitter = EventSplitter()
    assert splitter.feed(b"id: 1\ndata: a\n\ndata: b\n\nid: 2\ndata:") == [b"a", b"b"]
    assert splitter.last_id == b"1"
    assert splitter.feed(b" c\n\n: nothing\nid:3\n\n") == [b"c"]
    assert splitter.last_id == b"3"


# ---- answers -------------------------------------------------------------------------------


def stream(*events: object) -> bytes:
    told = [one if isinstance(one, str) else json.dumps(one) for one in events]
    return "".join(f"data: {one}\n\n" for one in told).encode()


def text(content: str | None, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"text": content, "finish_reason": finish}]}


def answered(body: bytes, *, ignore_eos: bool = True):
    answer = OpenAIAnswer(max_tokens=9, prompt_len=4, ignore_eos=ignore_eos)
    answer.take_piece(body)
    return answer.finish()


@pytest.mark.parametrize(
    ("events", "ignore_eos", "num_tokens", "counting"),
    [
        ([text("a"), text("b", "length"), {"usage": {"completion_tokens": 7}}], True, 7, "usage"),
        (
            [text("a"), {"choices": [], "usage": {"prompt_tokens": 4}}, "[DONE]"],
            True,
            9,
            "requested",
        ),
        ([text("a"), text("b", "length")], False, 9, "requested"),
        ([text("a"), text("b"), "[DONE]"], True, 9, "requested"),
        ([text("a"), text("b"), "[DONE]"], False, 2, "chunks"),
        ([text("a"), text("b", "stop")], True, 2, "chunks"),
        ([text(""), text(None, "stop")], True, 0, "chunks"),
    ],
)
def test_how_tokens_are_counted(events, ignore_eos, num_tokens, counting):
    timeline = answered(stream(*events), ignore_eos=ignore_eos)
    assert (timeline.num_tokens, timeline.counting) == (num_tokens, counting)
    assert timeline.prompt_len == 4


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_content_of_chats(name):
    deltas = [{"role": "assistant"}, {name: "a"}, {name: ""}, {name: "b"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    assert len(answered(stream(*events, "[DONE]")).times_s) == 2


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"error": {"message": "died"}}, "error_event"),
        ({"error": "died"}, "error_event"),
        ({"object": "error", "message": "died", "code": 400}, "error_event"),
        (text("", "error"), "finish_error"),
        ({"choices": "x"}, "malformed"),
        ("[1", "malformed"),
    ],
)
def test_events_that_fail_an_answer(event, reason):
    with pytest.raises(RequestFailedError) as caught:
        answered(stream(text("a"), event))
    assert caught.value.reason == reason


def test_nulls_are_nothing():
    event = {**text("a", "stop"), "error": None, "message": None, "usage": None}
    assert answered(stream(event)).num_tokens == 1
