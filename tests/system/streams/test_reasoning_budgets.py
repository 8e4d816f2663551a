"""Budgets for reasoning from the client's text on: exact, and the same whatever dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.answer_stack import ANSWER, DELIMITERS, kill_and_replace, of_read_answers
from tests.helpers.given_lengths import give
from tests.helpers.mini_stack import MiniStack, RawClient, Received

from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import (
    AnswerOptions,
    ChatMessage,
    ReasoningIds,
    SamplingParams,
    Submit,
)
from slipstream_ipc.transport.codec import encode_params

PROMPTS = ["Chapter" + n * "e" for n in range(6)]
BEGIN, END = DELIMITERS["<think>"], DELIMITERS["</think>"]
NEWLINE = 9
IDS = ReasoningIds("start", (BEGIN,), (END,), blanks=(NEWLINE,))
WITHOUT_CALLS = structs.replace(ANSWER, options=AnswerOptions(tool_choice="none"))  # all are text


@pytest.fixture
def make(make_stack: Any) -> Any:
    made = of_read_answers(make_stack)
    return lambda **options: made(**{"reasoning": IDS, "answer": WITHOUT_CALLS, **options})


def ask(client: RawClient, prompt: str, budget: int | None, **params: Any) -> Received:
    handle = len(client.streams)
    params = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0, **params}
    return client.send_submit(
        Submit(
            handle,
            bytes([handle + 1]) * 16,
            encode_params(SamplingParams(thinking_token_budget=budget, **params)),
            messages=(ChatMessage("user", prompt),),
            answer=AnswerOptions(),
        )
    )


def outcome(streams: list[Received]) -> list[Any]:
    assert [s.fault for s in streams] == [None] * len(streams)
    return [(s.text, s.token_ids, joined_events(s.events), s.end) for s in streams]


def serve(
    stack: MiniStack, budget: int | None, counts: Sequence[int] | None = None, **params: Any
) -> list[Received]:
    if counts is not None:
        assert stack.core is not None
        give(stack.core.engine._runner, counts)
    client = stack.client()
    streams = [ask(client, prompt, budget, **params) for prompt in PROMPTS]
    stack.until(lambda: all(s.is_over for s in streams))
    return streams


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_what_the_worker_counts_as_reasoning_is_within_the_budget(make: Any, budget: int) -> None:
    """The reader of answers and the core say the same of where reasoning is."""
    free = serve(make(), None)
    assert max(s.end.num_reasoning_tokens for s in free if s.end) > 5
    streams = serve(make(), budget)
    numbers = [s.end.num_reasoning_tokens for s in streams if s.end]
    assert max(numbers) == budget
    for limited, own in zip(streams, free, strict=True):
        pairs = enumerate(zip(limited.token_ids, own.token_ids, strict=True))
        differs = next((at for at, (one, other) in pairs if one != other), None)
        assert differs is None or limited.token_ids[differs] == END


@pytest.mark.parametrize("what", ["worker", "core", "both"])
@pytest.mark.parametrize("num_steps", [6, 12, 40])
@pytest.mark.parametrize("budget", [0, 4])
def test_a_death_changes_nothing(make: Any, what: str, num_steps: int, budget: int) -> None:
    expected = outcome(serve(make(), budget))
    stack = make()
    client = stack.client()
    streams = [ask(client, prompt, budget) for prompt in PROMPTS]
    for _ in range(num_steps):
        stack.step()
    kill_and_replace(stack, what)
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == expected


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    budget=st.sampled_from([0, 1, 3, 4, 9]),
    logprobs=st.sampled_from([None, 2]),
)
@example(counts=[6], budget=4, logprobs=None)
@example(counts=[2, 5, 1, 4, 1], budget=3, logprobs=2)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_budget_holds_where_steps_give_several_tokens(
    make: Any, counts: list[int], budget: int, logprobs: int | None
) -> None:
    """Also where a step gives more reasoning than is allowed."""
    plain = serve(make(), budget, logprobs=logprobs)
    assert outcome(serve(make(), budget, counts, logprobs=logprobs)) == outcome(plain)


@pytest.mark.parametrize(
    ("ids", "params", "why"),
    [
        (None, {}, "no end that is made of tokens"),
        (IDS, {"allowed_token_ids": [5, 6]}, "allowed_token_ids"),
        (IDS, {"min_tokens": 1, "stop_token_ids": [END]}, "min_tokens"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    make: Any, ids: ReasoningIds | None, params: dict[str, Any], why: str
) -> None:
    stack = make(reasoning=ids)
    it = ask(stack.client(), PROMPTS[0], 3, **params)
    stack.until(lambda: it.is_over)
    assert it.fault is not None
    assert it.fault.field == "thinking_token_budget"
    assert why in it.fault.message


def test_a_budget_without_messages_is_refused(make: Any) -> None:
    stack = make()
    client = stack.client()
    it, free = (client.submit("abc", thinking_token_budget=budget) for budget in (3, -1))
    stack.until(lambda: it.is_over and free.is_over)
    assert it.fault is not None
    assert it.fault.field == "thinking_token_budget"
    assert free.fault is None
