"""An answer that repeats itself ends at the same token, whatever dies and however tokens arrive."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from tests.helpers.answer_stack import PROMPTS, kill_and_replace, of_read_answers
from tests.helpers.mini_stack import RawClient, Received
from tests.helpers.scripted import FILLER, catch_up, play

from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import (
    REPETITION_DETECTED,
    AnswerOptions,
    ChatMessage,
    RepetitionDetection,
    SamplingParams,
    Submit,
)
from slipstream_ipc.transport.codec import encode_params

PROMPT = (5, 6, 7)
LOOP = [300, 301, 302]
DETECTION = RepetitionDetection(max_pattern_size=4, min_count=3)


def distinct(num: int) -> list[int]:
    return list(range(400, 400 + num))


@pytest.mark.parametrize("interval", [1, 7])
@pytest.mark.parametrize(
    ("params", "num_tokens", "reason"),
    [
        ({}, 59, "repetition"),
        ({"detokenize": False}, 59, "repetition"),
        ({"logprobs": 2}, 59, "repetition"),
        ({"min_tokens": 59}, 59, "repetition"),
        ({"min_tokens": 61}, 61, "repetition"),  # the loop goes on
        ({"max_tokens": 59}, 59, "length"),
        ({"stop_token_ids": (LOOP[2],)}, 53, "stop"),
        ({"repetition_detection": None}, 200, "length"),
        ({"repetition_detection": RepetitionDetection()}, 200, "length"),
    ],
)
def test_it_ends_with_the_token_that_completes_the_repetition(
    make_stack: Any, interval: int, params: dict[str, Any], num_tokens: int, reason: str
) -> None:
    answer = [*distinct(50), *LOOP * 60]
    stack = play(make_stack, {PROMPT: answer}, grace_s=0.0)
    asked = {"max_tokens": 200, "repetition_detection": DETECTION, **params}
    it = stack.client().submit(list(PROMPT), stream_interval=interval, **asked)
    stack.until(lambda: it.is_over)
    assert it.end is not None
    assert (it.end.reason, it.end.num_tokens) == (reason, num_tokens)
    assert it.end.stop_reason == {
        "repetition": REPETITION_DETECTED,
        "length": None,
        "stop": LOOP[2],
    }.get(reason)
    assert it.token_ids == answer[:num_tokens]
    if "logprobs" in params:
        assert len(it.ranks) == num_tokens
    stack.until(stack.holds_nothing)


def test_nothing_behind_it_is_shown_where_it_comes_in_one_step(make_stack: Any) -> None:
    stack = play(make_stack, {PROMPT: [*distinct(30), *LOOP * 60]})
    it = stack.client().submit(list(PROMPT), max_tokens=200, repetition_detection=DETECTION)
    stack.until(lambda: len(it.token_ids) > 3)
    assert len(catch_up(stack, it, 50)) > 20
    stack.until(lambda: it.is_over)
    assert it.token_ids == [*distinct(30), *LOOP * 3]
    assert it.end is not None
    assert (it.end.reason, it.end.num_tokens) == ("repetition", 39)


def test_the_core_does_not_run_far_ahead(make_stack: Any) -> None:
    """As for all streams whose end only the worker sees."""
    stack = play(make_stack, {PROMPT: []})
    it = stack.client().submit(
        list(PROMPT), max_tokens=400, ignore_eos=True, repetition_detection=DETECTION
    )
    stack.until(lambda: it.accepted > 0)
    worker, stack.worker = stack.worker, None
    assert stack.core is not None
    tokens, stream = stack.core.tokens, stack.core.handler._streams.get(it.stream_id)
    assert stream is not None
    for _ in range(300):
        stack.step()
    assert tokens.length(stream.row) - stream.prompt_len < 100
    stack.worker = worker
    stack.until(lambda: it.is_over)
    assert it.token_ids == [FILLER] * 3


def ask(client: RawClient, prompt: str, *, is_read: bool, **params: Any) -> Received:
    handle = len(client.streams)
    params = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0, **params}
    return client.send_submit(
        Submit(
            handle,
            bytes([handle + 1]) * 16,
            encode_params(SamplingParams(**params)),
            messages=(ChatMessage("user", prompt),),
            answer=AnswerOptions() if is_read else None,
        )
    )


def outcome(streams: list[Received]) -> list[Any]:
    assert [s.fault for s in streams] == [None] * len(streams)
    return [(s.text, s.token_ids, joined_events(s.events), s.end) for s in streams]


def first_end(token_ids: list[int]) -> int | None:
    """By a look at every prefix: a pattern of 2 to 6 tokens, twice."""
    for num in count(1):
        if num > len(token_ids):
            return None
        for size in range(2, 7):
            if (
                num >= 2 * size
                and token_ids[num - size : num] == token_ids[num - 2 * size :][:size]
            ):
                return num
    raise AssertionError


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("what", ["worker", "core", "both"])
@pytest.mark.parametrize("num_steps", [8, 20, 45])
def test_a_death_changes_no_end(
    make_stack: Any, what: str, num_steps: int, *, is_read: bool
) -> None:
    """A model of few tokens, at random: most streams repeat themselves sooner or later."""
    make = of_read_answers(make_stack)
    detection = RepetitionDetection(min_pattern_size=2, max_pattern_size=6, min_count=2)

    def run(**params: Any) -> list[Received]:
        stack = make()
        client = stack.client()
        streams = [ask(client, prompt, is_read=is_read, **params) for prompt in PROMPTS]
        if params:
            for _ in range(num_steps):
                stack.step()
            kill_and_replace(stack, what)
        stack.until(lambda: all(s.is_over for s in streams))
        return streams

    whole = [it.token_ids for it in run()]
    ends = [first_end(token_ids) for token_ids in whole]
    assert sum(end is not None for end in ends) > len(ends) // 2
    found = run(repetition_detection=detection)
    assert [it.token_ids for it in found] == [
        token_ids[:end] for token_ids, end in zip(whole, ends, strict=True)
    ]
    for end, at in zip([it.end for it in found], ends, strict=True):
        assert end is not None
        assert (end.reason, end.num_tokens) == (
            ("length", 300) if at in (None, 300) else ("repetition", at)
        )


def test_a_reader_that_comes_later_gets_the_same_end(make_stack: Any) -> None:
    stack = play(make_stack, {PROMPT: [*distinct(20), *LOOP * 60]})
    it = stack.client().submit(list(PROMPT), max_tokens=200, repetition_detection=DETECTION)
    stack.until(lambda: it.is_over)
    late = stack.client()
    taken = late.take_over(it, 0, 0)
    stack.until(lambda: taken.is_over)
    assert (taken.text, taken.token_ids, taken.end) == (it.text, it.token_ids, it.end)
