"""What a request says of single tokens, asked of a whole stack with the demo model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Client, SamplingParams, Stack
from slipstream.stack.supervisor_events import ProcessRestarted

PROMPT = "The list type"

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with spareless_stack(threads=1) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with stack.client() as client:
        yield client


def greedy(client: Client, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.generate(prompt, **{"temperature": 0, "max_tokens": 40, **options})


def test_bad_words_are_not_said(client: Client) -> None:
    plain = greedy(client)
    words = [word for word in plain.text.split() if word.isalpha()][:4]
    assert len(words) == 4
    for prompt in (
        PROMPT,
        plain.prompt_token_ids,
    ):  # given as ids, words are tokenised all the same
        said = greedy(client, prompt, bad_words=words)
        assert said.text != plain.text
        tokens = said.text.split()
        assert not [word for word in words if word in tokens]


def test_biases_and_allowed_ids(client: Client) -> None:
    plain = greedy(client)
    first, other = plain.token_ids[0], plain.token_ids[7]
    assert greedy(client, logit_bias={first: -100}).token_ids[0] != first
    assert set(greedy(client, logit_bias={other: 100}).token_ids) == {other}
    allowed = sorted(set(plain.token_ids))[:5]
    assert set(greedy(client, allowed_token_ids=allowed).token_ids) <= set(allowed)


def test_penalties_make_for_variety(client: Client) -> None:
    def num_different(**options: Any) -> int:
        return len(set(greedy(client, max_tokens=200, ignore_eos=True, **options).token_ids))

    plain = num_different()
    for name, value in (("presence", 2), ("frequency", 2), ("repetition", 1.5)):
        assert num_different(**{f"{name}_penalty": value}) > plain
    assert num_different(frequency_penalty=-2) < plain


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("logit_bias", {"logit_bias": {10**6: 1}}),
        ("allowed_token_ids", {"allowed_token_ids": [10**6]}),
        ("bad_words", {"bad_words": ["\U0001f9ff" * 20]}),
    ],
)
def test_refusals_name_the_field(client: Client, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        greedy(client, **options)
    assert caught.value.field == field


def test_settings_that_leave_nothing_to_say_are_refused(client: Client) -> None:
    only = greedy(client, "a", max_tokens=1).prompt_token_ids[-1:]
    assert greedy(client, allowed_token_ids=only, max_tokens=3).token_ids == [*only] * 3
    with pytest.raises(BadRequestError, match="no token that could be sampled") as caught:
        greedy(client, allowed_token_ids=only, bad_words=["a"])
    assert caught.value.field == "bad_words"


def test_a_killed_core_changes_nothing(stack: Stack, client: Client) -> None:
    drawn = {"temperature": 0.9, "seed": 3, "max_tokens": 200, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {**drawn, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {**drawn, "repetition_penalty": 1.3, "top_k": 40},
        {**drawn, "bad_words": ["list", "is a", "the"], "logit_bias": {300: 5.0}},
        {**drawn},
    ]
    params = [SamplingParams(**kind) for kind in kinds]
    plain = [client.generate(PROMPT, each).text for each in params]
    assert len(set(plain)) == len(plain)
    streams = [client.stream(PROMPT, each) for each in params]
    texts = ["".join(next(stream).text for _ in range(3)) for stream in streams]
    os.kill(stack.pids["core"], signal.SIGKILL)
    rest = ["".join(delta.text for delta in stream) for stream in streams]
    while not isinstance(event := stack.next_event(PATIENCE_S), ProcessRestarted):
        assert event is not None
    assert [a + b for a, b in zip(texts, rest, strict=True)] == plain
