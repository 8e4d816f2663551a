"""Answers that are read as events: the same ones whatever dies, and for every reader."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from tests.helpers.answer_stack import PROMPTS, kill_and_replace, of_read_answers
from tests.helpers.mini_stack import RawClient, Received

from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import (
    AnswerOptions,
    ChatMessage,
    EventKind,
    SamplingParams,
    Submit,
)
from slipstream_ipc.transport.codec import encode_params

KINDS = set(EventKind)


@pytest.fixture
def make(make_stack: Any) -> Any:
    return of_read_answers(make_stack)


def ask(client: RawClient, prompt: str, **params: Any) -> Received:
    handle = len(client.streams)
    params = {"max_tokens": 120, "ignore_eos": True, "temperature": 0.0, **params}
    return client.send_submit(
        Submit(
            handle,
            bytes([handle + 1]) * 16,
            encode_params(SamplingParams(**params)),
            messages=(ChatMessage("user", prompt),),
            answer=AnswerOptions(),
        )
    )


def outcome(streams: list[Received]) -> list[Any]:
    assert [s.fault for s in streams] == [None] * len(streams)
    return [(s.text, s.token_ids, joined_events(s.events), s.end) for s in streams]


def plain(make: Any, **params: Any) -> list[Any]:
    """What clients get where nothing dies."""
    stack = make()
    client = stack.client()
    streams = [ask(client, prompt, **params) for prompt in PROMPTS]
    stack.until(lambda: all(s.is_over for s in streams))
    return outcome(streams)


def test_answers_have_events_of_all_kinds(make: Any) -> None:
    found = plain(make)
    assert {event.kind for _, _, events, _ in found for event in events} == KINDS
    assert all(end.num_tokens == 120 for _, _, _, end in found)
    assert any(end.num_reasoning_tokens for _, _, _, end in found)


@pytest.mark.parametrize("what", ["worker", "core", "both"])
@pytest.mark.parametrize("num_steps", [10, 60])
@pytest.mark.parametrize("stop", [(), ("b<", "a a")])
def test_a_death_changes_no_event(
    make: Any, what: str, num_steps: int, stop: tuple[str, ...]
) -> None:
    expected = plain(make, stop=stop)
    stack = make()
    client = stack.client()
    streams = [ask(client, prompt, stop=stop) for prompt in PROMPTS]
    for _ in range(num_steps):
        stack.step()
    kill_and_replace(stack, what)
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == expected


def test_a_worker_dies_again_and_again(make: Any) -> None:
    expected = plain(make)
    stack = make()
    client = stack.client()
    streams = [ask(client, prompt) for prompt in PROMPTS]
    for at in range(10, 120, 30):
        stack.until(lambda at=at: all(len(s.token_ids) > at for s in streams))
        kill_and_replace(stack, "worker")
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == expected


def test_another_client_reads_the_same_events_from_any_position_on(make: Any) -> None:
    stack = make()
    first, second = stack.client(), stack.client()
    it = ask(first, PROMPTS[0])
    positions = [(0, 0, 0)]
    while not it.is_over:
        stack.step()
        here = (len(it.text), len(it.token_ids), len(it.events))
        if here != positions[-1]:
            positions.append(here)
    events = joined_events(it.events)
    for num_chars, num_tokens, num_events in positions[::7]:
        taken = second.take_over(it, num_chars, num_tokens)
        stack.until(lambda taken=taken: taken.is_over)
        assert (taken.text, taken.token_ids) == (it.text, it.token_ids)
        assert joined_events([*it.events[:num_events], *taken.events]) == events
        assert taken.end == it.end


def test_a_successor_with_another_table_ends_the_stream_as_diverged(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make()
    client = stack.client()
    it = ask(client, PROMPTS[0])
    stack.until(lambda: len(it.token_ids) > 10)
    stack.kill_worker()
    monkeypatch.setattr(
        "slipstream_worker.output.answer_reading.digest", lambda entry: b"another entry"
    )
    _clear_compiled()
    stack.start_worker()
    stack.until(lambda: it.is_over)
    fault = it.fault or it.end.fault
    assert fault is not None
    assert fault.code == "diverged"
    monkeypatch.undo()
    _clear_compiled()
    stack.let_pass(stack.worker.retention.grace_s + 1)
    stack.until(stack.holds_nothing)


def test_an_answer_without_a_known_format_is_text_alone(make: Any) -> None:
    stack = make(answer=None)
    client = stack.client()
    it = ask(client, PROMPTS[0])
    stack.until(lambda: it.is_over)
    assert it.end.reason == "length"
    assert not it.events


def test_without_text_there_are_no_events_to_read(make: Any) -> None:
    stack = make()
    client = stack.client()
    it = ask(client, PROMPTS[0], detokenize=False)
    stack.until(lambda: it.is_over)
    assert it.fault.code == "bad_request"
    assert it.fault.field == "detokenize"


def test_how_the_answer_is_read_is_part_of_what_was_asked_for(make: Any) -> None:
    stack = make()
    client = stack.client()
    it = ask(client, PROMPTS[0])
    stack.until(lambda: bool(it.accepted))
    again = structs.replace(it.submit, handle=1, answer=AnswerOptions(stop_scope="all"))
    other = client.send_submit(again)
    stack.until(lambda: other.is_over)
    assert other.fault.code == "conflict"


def _clear_compiled() -> None:
    from slipstream_worker.output.answer_reading import _compiled

    _compiled.cache_clear()
