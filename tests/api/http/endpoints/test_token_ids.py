"""Token ids in answers (`return_token_ids`), and what is told of a tokenizer: as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tests.helpers.http_front import Front, Raw
from tests.helpers.openapi import DOCUMENT, schema_of

from slipstream import Stack
from slipstream.demo_model import MODEL_PATH

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURNS = [{"role": "user", "content": "hi"}]
EVENTS = "Accept: text/event-stream"
SPECIAL = 0  # the bundled tokenizer's <|endoftext|>


@pytest.fixture
def connection(chain_stack: Stack) -> Iterator[Raw]:
    with Raw(int(chain_stack.http_address.rpartition(":")[2])) as raw:
        yield raw


def ask(raw: Raw, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer at once, which is as the description says."""
    jsonschema.validate(body, schema_of(path, "body"))
    raw.post(path, {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **body})
    answer = raw.read()
    assert answer.status == 200, answer.body
    jsonschema.validate(answer.json, schema_of(path, "application/json"))
    found: dict[str, Any] = answer.json
    return found


def chunks(raw: Raw, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of a stream: its events."""
    raw.post(path, {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "stream": True, **body})
    *events, done = raw.read().events
    assert done == "[DONE]"
    for event in events:
        jsonschema.validate(event, schema_of(path, "text/event-stream"))
    return events


def ids_of(raw: Raw, body: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Prompt and answer, as /generate has always told them."""
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    raw.post("/generate", {**body, "sampling_params": params})
    found = raw.read().json
    return found["prompt_token_ids"], found["choices"][0]["token_ids"]


def test_a_completions_ids_are_told_where_they_are_asked_for(connection: Raw) -> None:
    wanted = [ids_of(connection, {"text": prompt}) for prompt in ("some text", "another")]
    body = {"prompt": ["some text", "another"], "n": 2, "return_token_ids": True}
    answer = ask(connection, COMPLETIONS, body)
    found = [(each["prompt_token_ids"], each["token_ids"]) for each in answer["choices"]]
    assert found == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert "prompt_token_ids" not in answer


def test_a_chats_ids_are_told_where_they_are_asked_for(connection: Raw) -> None:
    answer = ask(connection, CHAT, {"messages": TURNS, "return_token_ids": True})
    connection.post("/tokenize", {"messages": TURNS})
    assert answer["prompt_token_ids"] == connection.read().json["tokens"]
    (choice,) = answer["choices"]
    assert choice["token_ids"] == ids_of(connection, {"token_ids": answer["prompt_token_ids"]})[1]


@pytest.mark.parametrize("body", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
def test_and_not_where_they_are_not(connection: Raw, body: dict[str, Any]) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": TURNS})):
        for told in (
            ask(connection, path, {**prompt, **body}),
            *chunks(connection, path, {**prompt, **body}),
        ):
            for part in (told, *told["choices"]):
                assert not {"token_ids", "prompt_token_ids"} & set(part)


def test_a_streams_chunks_have_theirs_and_the_first_one_the_prompts(connection: Raw) -> None:
    prompt_ids, token_ids = ids_of(connection, {"text": "some text"})
    body = {"prompt": ["some text"], "n": 2, "return_token_ids": True}
    for index in (0, 1):
        choices = [
            choice
            for event in chunks(connection, COMPLETIONS, body)
            for choice in event["choices"]
            if choice["index"] == index
        ]
        assert choices[0]["prompt_token_ids"] == prompt_ids
        assert all("prompt_token_ids" not in choice for choice in choices[1:])
        assert [each for choice in choices for each in choice["token_ids"]] == token_ids


def test_a_streamed_chat_tells_the_prompts_before_all_else(connection: Raw) -> None:
    whole = ask(connection, CHAT, {"messages": TURNS, "return_token_ids": True})
    first, *more = chunks(connection, CHAT, {"messages": TURNS, "return_token_ids": True})
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in more)
    told = [each for event in more for each in event["choices"][0]["token_ids"]]
    assert told == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_where_the_prompt_is_repeated_so_are_its_ids(
    connection: Raw, is_stream: bool, max_tokens: int
) -> None:
    prompt_ids, token_ids = ids_of(connection, {"text": "some text"})
    body = {"prompt": "some text", "echo": True, "return_token_ids": True}
    body["max_tokens"] = max_tokens
    told = chunks if is_stream else ask
    found: Any = told(connection, COMPLETIONS, body)
    events = found if is_stream else [found]
    ids = [each for event in events for each in event["choices"][0]["token_ids"]]
    assert ids == prompt_ids + token_ids[:max_tokens]


def test_such_a_stream_says_nowhere_that_it_can_be_come_back_to(connection: Raw) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    for is_resumable, more in ((True, {}), (False, {"return_token_ids": True})):
        connection.post(COMPLETIONS, {**body, **more}, EVENTS)
        said = connection.read().body
        assert (b"id: " in said) == is_resumable


def test_prompt_logprobs_are_null_where_they_are_not_asked_for(connection: Raw) -> None:
    completion = ask(connection, COMPLETIONS, {"prompt": ["x", "y"]})
    assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [None, None]
    assert "prompt_logprobs" not in completion
    chat = ask(connection, CHAT, {"messages": TURNS})
    assert chat["prompt_logprobs"] is None
    for event in chunks(connection, COMPLETIONS, {"prompt": "x"}):
        assert "prompt_logprobs" not in event["choices"][0]


@pytest.mark.parametrize("skips", [True, False])
def test_a_prompt_of_ids_is_repeated_with_its_special_tokens(connection: Raw, skips: bool) -> None:
    tokens = [SPECIAL, *ids_of(connection, {"text": "some text"})[0], SPECIAL]
    connection.post("/detokenize", {"tokens": tokens})
    text = connection.read().json["prompt"]
    assert text.count("<|endoftext|>") == 2
    body = {"prompt": tokens, "echo": True, "skip_special_tokens": skips, "logprobs": 1}
    (choice,) = ask(connection, COMPLETIONS, body)["choices"]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    ends = [*logprobs["text_offset"][1 : len(tokens)], len(text)]
    for token, begin, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=False):
        assert text[begin:end] == token


def test_developers_and_tools_speak_to_the_bundled_model(connection: Raw) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What is the time?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "clock", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    assert ask(connection, CHAT, {"messages": turns})["choices"][0]["message"]["content"]


def test_what_is_told_of_the_tokenizer_is_how_it_is_set_up(connection: Raw) -> None:
    answer = connection.get("/tokenizer_info")
    assert answer.status == 200
    given = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())
    told = answer.json
    assert told["tokenizer_class"] == given["tokenizer_class"]
    assert told["chat_template"] == (MODEL_PATH / "chat_template.jinja").read_text()
    assert {**told, **given} == told
    assert str(MODEL_PATH) not in answer.body.decode()
    assert "/tokenizer_info" in DOCUMENT["paths"]


def test_a_key_is_needed_for_that(played: Any) -> None:
    front = Front(played.address, api_keys=("right",))
    try:
        with Raw(front.port) as raw:
            assert raw.get("/tokenizer_info").status == 401
        with Raw(front.port) as raw:
            assert raw.get("/tokenizer_info", "Authorization: Bearer right").status == 200
    finally:
        front.stop()


LISTED = [300, 7, 41]


def values_by_id(raw: Raw, body: dict[str, Any]) -> list[dict[int, float]]:
    """What /generate says of each token: the reference for the other shapes."""
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprob_token_ids": LISTED}
    raw.post("/generate", {**body, "sampling_params": params})
    entries = raw.read().json["choices"][0]["logprobs"]
    found = [{int(key): it["logprob"] for key, it in entry.items()} for entry in entries]
    assert len(found) == 6
    assert all(set(LISTED) <= set(entry) and len(entry) >= 3 for entry in found)
    return found


def tokens_of(raw: Raw) -> list[str]:
    raw.post("/detokenize", {"tokens": []})
    raw.read()
    texts = []
    for token_id in LISTED:
        raw.post("/detokenize", {"tokens": [token_id]})
        texts.append(raw.read().json["prompt"])
    return texts


@pytest.mark.parametrize("is_stream", [False, True])
def test_listed_ids_have_their_log_probabilities(connection: Raw, is_stream: bool) -> None:
    wanted = values_by_id(connection, {"prompt": "hi there"})
    names = tokens_of(connection)
    body = {"prompt": "hi there", "logprobs": 1, "logprob_token_ids": LISTED}
    if is_stream:
        parts = [it["choices"][0]["logprobs"] for it in chunks(connection, COMPLETIONS, body)]
    else:
        parts = [ask(connection, COMPLETIONS, body)["choices"][0]["logprobs"]]
    tops = [top for part in parts if part for top in part["top_logprobs"]]
    assert len(tops) == len(wanted)
    for top, values in zip(tops, wanted, strict=True):
        assert set(names) <= set(top)
        for name, token_id in zip(names, LISTED, strict=True):
            assert top[name] == pytest.approx(values[token_id])


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chats_listed_ids_are_its_top_logprobs(connection: Raw, is_stream: bool) -> None:
    names = tokens_of(connection)
    body = {"messages": TURNS, "logprobs": True, "logprob_token_ids": LISTED}
    if is_stream:
        parts = [it["choices"][0]["logprobs"] for it in chunks(connection, CHAT, body)]
    else:
        parts = [ask(connection, CHAT, body)["choices"][0]["logprobs"]]
    entries = [entry for part in parts if part for entry in part["content"]]
    assert len(entries) == 6
    for entry in entries:
        shown = [top["token"] for top in entry["top_logprobs"]]
        assert [token for token in shown if token in names] == names
        assert set(shown) <= {entry["token"], *names}


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        (COMPLETIONS, {"prompt": "x"}, "allowed only if logprobs is set"),
        (CHAT, {"messages": TURNS, "logprobs": False}, "allowed only if logprobs is set"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 1, "echo": True}, "if echo is false"),
    ],
)
def test_where_listed_ids_mean_nothing_they_are_refused(
    connection: Raw, path: str, body: dict[str, Any], what: str
) -> None:
    connection.post(path, {**body, "logprob_token_ids": LISTED})
    answer = connection.read()
    assert answer.status == 400
    assert answer.json["error"]["param"] == "logprob_token_ids"
    assert what in answer.json["error"]["message"]
