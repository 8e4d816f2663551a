"""The official client, and curl, against a stack of real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.request

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.helpers.http_front import Front, Raw, events_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Client

KEY = "sk-test"
MODEL = "tiny"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
TURNS = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture
def client(chain_stack):
    with OpenAI(
        base_url=f"{chain_stack.http_address}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S
    ) as one:
        yield one


@pytest.fixture
def native(chain_stack):
    with Client(chain_stack.address) as one:
        yield one


def run_async(chain_stack, main):
    async def inner():
        url = f"{chain_stack.http_address}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as one:
            return await main(one)

    return asyncio.run(inner())


def test_the_stack_says_where_its_front_is(chain_stack):
    assert chain_stack.http_address.startswith("http://127.0.0.1:")
    assert set(chain_stack.pids) == {"supervisor", "core", "worker", "http"}
    with urllib.request.urlopen(f"{chain_stack.http_address}/ready", timeout=PATIENCE_S) as answer:
        assert json.load(answer) == {"status": "ready", "model": MODEL}


def test_a_completion(client, native):
    answer = client.completions.create(prompt="Once upon a time", **GREEDY)
    whole = native.generate("Once upon a time", temperature=0, max_tokens=24)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (whole.text, "length", 0)
    assert answer.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert answer.usage.completion_tokens == 24
    assert (answer.model, answer.object) == (MODEL, "text_completion")
    assert answer.id.startswith("cmpl-")


def test_a_streamed_completion(client, native):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = client.completions.create(prompt="Once", **GREEDY, **options)
    whole = native.generate("Once", temperature=0, max_tokens=24)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == 24


def test_kinds_of_prompts(client, native):
    ids = native.generate("Once upon", max_tokens=1).prompt_token_ids
    one = client.completions.create(prompt="Once upon", **GREEDY).choices[0].text
    both = client.completions.create(prompt=["Once upon", "A list"], **GREEDY).choices
    by_ids = client.completions.create(prompt=ids, **GREEDY).choices[0].text
    two_by_ids = client.completions.create(prompt=[ids, ids], **GREEDY).choices
    assert [choice.index for choice in both] == [0, 1]
    assert {one, both[0].text, by_ids, *(choice.text for choice in two_by_ids)} == {one}


def test_a_chat(client, native):
    answer = client.chat.completions.create(messages=TURNS, **GREEDY)
    whole = native.generate(TURNS, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == whole.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    longer = [*TURNS, answer.choices[0].message, {"role": "user", "content": "And a dict?"}]
    assert client.chat.completions.create(messages=longer, **GREEDY).choices[0].message.content
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]
    again = client.chat.completions.create(messages=[{**TURNS[0], "content": parts}], **GREEDY)
    assert again.choices[0].message.content == whole.text


def test_a_streamed_chat(client, native):
    with client.chat.completions.create(messages=TURNS, stream=True, **GREEDY) as stream:
        chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    whole = native.generate(TURNS, temperature=0, max_tokens=24)
    assert "".join(delta.content or "" for delta in deltas) == whole.text
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.process
def test_a_chat_goes_on_to_the_models_length(client):
    options = {"model": MODEL, "temperature": 0, "messages": TURNS}
    answer = client.chat.completions.create(**options)
    assert answer.usage.total_tokens == 4096
    short = client.chat.completions.create(max_completion_tokens=3, **options)
    assert short.usage.completion_tokens == 3


def test_several_answers(client, native):
    options = {"model": MODEL, "temperature": 1, "seed": 2**63 - 2, "max_tokens": 12, "n": 3}
    alone = [
        native.generate("Once upon", temperature=1, seed=seed, max_tokens=12).text
        for seed in (2**63 - 2, 2**63 - 1, -(2**63))
    ]
    answer = client.completions.create(prompt="Once upon", **options)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(alone))
    one = client.completions.create(prompt="Once upon", **{**options, "n": 1})
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 36
    both = client.completions.create(prompt=["Once upon", "A list is"], **options)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices[:3]] == alone
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt="Once upon", stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone
    chat = client.chat.completions.create(messages=TURNS, **options)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(messages=TURNS, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in chat.choices]


def test_stops(client):
    whole = client.completions.create(prompt="Once", **GREEDY).choices[0].text
    stop = whole[9:13]
    for given in (stop, ["never there", stop]):
        answer = client.completions.create(prompt="Once", stop=given, **GREEDY).choices[0]
        assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    extra = {"include_stop_str_in_output": True}
    kept = client.completions.create(prompt="Once", stop=stop, extra_body=extra, **GREEDY)
    assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]


def test_seeds_and_extras(client):
    options = {"model": MODEL, "prompt": "Once", "max_tokens": 24, "temperature": 1, "top_p": 0.9}
    extra = {"top_k": 50, "min_p": 0.01, "ignore_eos": True}
    texts = {
        client.completions.create(seed=seed, extra_body=extra, **options).choices[0].text
        for seed in (7, 7, 7, 8)
    }
    assert len(texts) == 2


def test_logprobs_of_a_completion(client):
    whole = client.completions.create(prompt="Once", logprobs=3, **GREEDY).choices[0]
    shown = whole.logprobs
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.top_logprobs) == 24
    for offset, token, top in zip(shown.text_offset, shown.tokens, shown.top_logprobs, strict=True):
        if not token.startswith("bytes:"):  # which is no whole character
            assert whole.text[offset : offset + len(token)] == token
        assert token in top
        assert len(top) in (3, 4)
    stream = client.completions.create(prompt="Once", logprobs=3, stream=True, **GREEDY)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for piece in pieces for token in piece.tokens] == shown.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == shown.text_offset


def test_logprobs_of_a_chat(client):
    options = {"messages": TURNS, "logprobs": True, **GREEDY}
    whole = client.chat.completions.create(top_logprobs=2, **options).choices[0]
    entries = whole.logprobs.content
    raw = b"".join(bytes(entry.bytes) for entry in entries)
    assert raw.decode(errors="replace") == whole.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    best = [entry.top_logprobs[0] for entry in entries]
    assert [each.token for each in best] == [entry.token for entry in entries]  # it is greedy
    stream = client.chat.completions.create(top_logprobs=2, stream=True, **options)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [entry for piece in pieces if piece is not None for entry in piece.content]
    assert [each.model_dump() for each in streamed] == [each.model_dump() for each in entries]
    none = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in none] == [[]] * 24


def test_the_async_client(chain_stack, client):
    async def main(one):
        whole = await one.chat.completions.create(messages=TURNS, **GREEDY)
        stream = await one.chat.completions.create(messages=TURNS, stream=True, **GREEDY)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        completion = await one.completions.create(prompt="Once", **GREEDY)
        return whole.choices[0].message.content, text, completion.choices[0].text

    whole, streamed, completion = run_async(chain_stack, main)
    assert whole == streamed
    assert completion == client.completions.create(prompt="Once", **GREEDY).choices[0].text


def test_64_streams_at_once_say_what_they_say_alone(chain_stack, client):
    prompts = [f"Tale {number}: once" for number in range(64)]
    options = {**GREEDY, "max_tokens": 100}
    wholes = client.completions.create(prompt=prompts, **options).choices

    async def main(one):
        async def read(prompt):
            stream = await one.completions.create(prompt=prompt, stream=True, **options)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*map(read, prompts))

    assert run_async(chain_stack, main) == [choice.text for choice in wholes]


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "word " * 5000}, openai.BadRequestError, "prompt"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"min_p": "nonsense"}}, openai.BadRequestError, "min_p"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ],
)
def test_errors_have_the_clients_classes(client, options, kind, param):
    for streamed in (False, True):
        with pytest.raises(kind) as caught:
            client.completions.create(stream=streamed, **{"prompt": "x", **GREEDY, **options})
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "slipstream")
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_wrong_key_has_the_clients_class(played):
    front = Front(played.address, api_keys=(KEY,))
    try:
        for streamed in (False, True):
            with (
                OpenAI(
                    base_url=f"http://127.0.0.1:{front.port}/v1", api_key="no", max_retries=0
                ) as one,
                pytest.raises(openai.AuthenticationError) as caught,
            ):
                one.completions.create(prompt="x", stream=streamed, **GREEDY)
            assert caught.value.param is None
            assert caught.value.type == "invalid_request_error"
    finally:
        front.stop()


@pytest.mark.process
def test_who_leaves_makes_room(tmp_path):
    """One request runs at a time: the second answers only because the first one was aborted."""
    with (
        spareless_stack("simulated:step_ms=20", max_num_seqs=1, http_port=0) as stack,
        Raw(int(stack.http_address.rpartition(":")[2])) as long,
        Raw(int(stack.http_address.rpartition(":")[2])) as short,
    ):
        long.post("/v1/chat/completions", {"messages": TURNS, "stream": True})
        long.read_until(b"data: ")  # and for a minute and more, if nobody ends it
        short.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        long.socket.close()
        assert short.read().json["usage"]["completion_tokens"] == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(chain_stack, native):
    def curl(path, body, *options):
        command = ["curl", "-sS", "-N", *options, f"{chain_stack.http_address}{path}"]
        command += ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"]
        done = subprocess.run(
            [*command, "-d", body], capture_output=True, check=True, timeout=PATIENCE_S
        )
        return done.stdout

    body = json.dumps({"prompt": "Once", "temperature": 0, "max_tokens": 24})
    whole = native.generate("Once", temperature=0, max_tokens=24).text
    assert json.loads(curl("/v1/completions", body))["choices"][0]["text"] == whole
    streamed = body.replace("{", '{"stream": true, ')
    for version in ("--http1.1", "--http1.0"):
        *events, done = events_of(curl("/v1/completions", streamed, version))
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        assert done == "[DONE]"
    long = json.dumps({"prompt": "word " * 3000, "max_tokens": 1})  # curl asks before it sends it
    assert json.loads(curl("/v1/completions", long, "-H", "Expect: 100-continue"))
