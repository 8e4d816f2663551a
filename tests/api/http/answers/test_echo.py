"""Completions with `echo`, by the official client: the prompt's text and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from tests.helpers.patience import PATIENCE_S

from slipstream import Client, Stack
from slipstream.http.answers.echo import token_offsets
from slipstream.http.logprobs.vocabulary import TokenText

PROMPT = "Once upon a time, naïve 日本 said"


@pytest.fixture(scope="module")
def client(chain_stack: Stack) -> Iterator[OpenAI]:
    url = f"{chain_stack.http_address}/v1"
    with OpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def native(chain_stack: Stack) -> Iterator[Client]:
    with chain_stack.client() as client:
        yield client


def create(client: OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_tokens": 8, **options}
    given["model"] = client.models.list().data[0].id
    return client.completions.create(prompt=prompt, echo=True, **given)


def truth(native: Client, prompt: Any, k: int, num: int) -> tuple[str, list[float | None], Any]:
    """Text, values and ids of prompt and answer, by the native client."""
    whole = native.generate(prompt, temperature=0, max_tokens=num, logprobs=k, prompt_logprobs=k)
    assert whole.prompt_logprobs is not None
    assert whole.logprobs is not None
    entries = whole.prompt_logprobs + list(whole.logprobs)
    own = [None if entry is None else next(iter(entry.values())).logprob for entry in entries]
    return whole.text, own, whole


def check_logprobs(found: Any, own: list[float | None], k: int, shown: str) -> None:
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(own[1:], abs=1e-4)
    num = len(own)
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == num
    assert found.top_logprobs[0] is None
    for value, token, top in zip(
        found.token_logprobs[1:], found.tokens[1:], found.top_logprobs[1:], strict=True
    ):
        assert top[token] == pytest.approx(value, abs=1e-6)
        assert k <= len(top) <= k + 1
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert shown[offset:].startswith(token)


def test_the_prompts_text_comes_first(client: OpenAI, native: Client) -> None:
    (choice,) = create(client).choices
    whole = native.generate(PROMPT, temperature=0, max_tokens=8)
    assert choice.text == PROMPT + whole.text
    assert choice.logprobs is None
    assert choice.finish_reason == whole.finish_reason


def test_and_its_log_probabilities(client: OpenAI, native: Client) -> None:
    text, own, whole = truth(native, PROMPT, 3, 8)
    answer = create(client, logprobs=3)
    (choice,) = answer.choices
    assert choice.text == PROMPT + text
    check_logprobs(choice.logprobs, own, 3, choice.text)
    assert answer.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert answer.usage.completion_tokens == len(whole.token_ids)


@pytest.mark.parametrize("is_stream", [False, True])
def test_scoring_alone(client: OpenAI, native: Client, is_stream: bool) -> None:
    """As evaluation harnesses do it: max_tokens 0."""
    _, own, whole = truth(native, PROMPT, 1, 1)
    num = len(whole.prompt_token_ids)
    if is_stream:
        chunks = [
            chunk.choices[0] for chunk in create(client, logprobs=1, max_tokens=0, stream=True)
        ]
        text = "".join(chunk.text for chunk in chunks)
        values = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
        reason = chunks[-1].finish_reason
    else:
        answer = create(client, logprobs=1, max_tokens=0)
        (choice,) = answer.choices
        check_logprobs(choice.logprobs, own[:num], 1, PROMPT)
        text, values, reason = choice.text, choice.logprobs.token_logprobs, choice.finish_reason
        assert answer.usage.completion_tokens == 0
    assert (text, reason) == (PROMPT, "length")
    assert values == [None, *(pytest.approx(value, abs=1e-4) for value in own[1:num])]


def test_a_stream(client: OpenAI, native: Client) -> None:
    text, own, _ = truth(native, PROMPT, 2, 8)
    chunks = [chunk.choices[0] for chunk in create(client, logprobs=2, stream=True)]
    assert chunks[0].text.startswith(PROMPT)
    assert "".join(chunk.text for chunk in chunks) == PROMPT + text
    values = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
    assert values == [None, *(pytest.approx(value, abs=1e-4) for value in own[1:])]
    offsets = [offset for chunk in chunks for offset in chunk.logprobs.text_offset]
    tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert (PROMPT + text)[offset:].startswith(token)
    plain = [chunk.choices[0].text for chunk in create(client, stream=True)]
    assert "".join(plain) == PROMPT + text


def test_several_prompts_with_several_answers(client: OpenAI, native: Client) -> None:
    ids = native.generate(PROMPT, max_tokens=1).prompt_token_ids
    for is_stream in (False, True):
        found = create(client, [ids, ids[:4]], n=2, seed=3, logprobs=0, stream=is_stream)
        texts, nums = [""] * 4, [0] * 4
        for choice in (
            [one for part in found for one in part.choices] if is_stream else found.choices
        ):
            texts[choice.index] += choice.text
            nums[choice.index] += len(choice.logprobs.tokens)
        assert all(text.startswith(PROMPT) for text in texts[:2])  # as it is decoded
        assert all(text.startswith(PROMPT[:4]) for text in texts[2:])
        assert nums == [len(ids) + 8] * 2 + [4 + 8] * 2


def test_what_is_refused_names_the_callers_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, "x " * 200, logprobs=5000)
    assert caught.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, list(range(300, 600)), logprobs=-1, max_tokens=1)
    assert caught.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, max_tokens=0, extra_body={"echo": False})
    assert caught.value.param == "max_tokens"


class _Texts:
    def of(self, token_id: int) -> TokenText:
        known = {1: ("<s>", True), 2: (" Hello", False), 3: (" you", False), 4: ("</s>", True)}
        text, is_added = known[token_id]
        return TokenText(text, text, text.encode(), is_added)


def test_what_a_tokenizer_adds_takes_no_place() -> None:
    texts: Any = _Texts()

    def offsets(ids: list[int], text: str) -> list[int]:
        return [each for some in token_offsets(np.array(ids), texts, text) for each in some]

    assert offsets([1, 2, 3], "Hello you") == [0, 0, 5]
    assert offsets([1, 2, 3, 4, 2], "Hello you</s> Hello") == [0, 0, 5, 9, 13]
    assert offsets([2, 3], "hello you") == [0, 6]  # who changes what it reads
    assert offsets([2, 3, 3], "hi") == [0, 2, 2]
