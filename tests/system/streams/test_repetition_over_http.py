"""Repetitions end answers of all interfaces at the same token, and are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.helpers.http_front import Answer, Raw
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import LLM, Client, RepetitionDetection, SamplingParams, Stack
from slipstream.cli.main import main

pytestmark = pytest.mark.process

LOOP = " la la" * 100
LINES = [
    {"text": "I sing:" + LOOP},
    {"text": "<think>\nHm." + LOOP, "when": "think"},
    {"text": '<tool_call>\n{"name": "now", "arguments": {"x": "' + LOOP, "when": "call"},
]
DETECTION = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 5}
PARAMS: dict[str, Any] = {"max_tokens": 150, "repetition_detection": DETECTION}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return f"simulated:step_ms=0.5,answers={path}"


@pytest.fixture(scope="module")
def stack(model: str) -> Iterator[Stack]:
    options: dict[str, Any] = {"tool_format": "hermes", "reasoning_format": "qwen3"}
    with spareless_stack(model, http_port=0, served_model_name="any", **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with stack.client() as one:
        yield one


@pytest.fixture(scope="module")
def raw(stack: Stack) -> Iterator[Raw]:
    with Raw(int(stack.http_address.rpartition(":")[2])) as one:
        yield one


def posted(raw: Raw, path: str, body: dict[str, Any]) -> Answer:
    raw.post(path, body)
    return raw.read()


@pytest.fixture(scope="module")
def expected(client: Client) -> str:
    """The answer to `Sing!` up to the token that completes the repetition."""
    whole = client.generate("Sing!", max_tokens=150)
    assert whole.finish_reason == "length"
    ids = list(whole.token_ids)

    def is_repeated(num: int) -> bool:
        return any(
            num >= 5 * size and ids[num - 5 * size : num] == ids[num - size : num] * 5
            for size in range(2, 9)
        )

    end = next(num for num in range(1, 150) if is_repeated(num))
    return client.detokenize(ids[:end])


def test_python(client: Client, expected: str) -> None:
    options = {"max_tokens": 150}
    as_object = RepetitionDetection(**DETECTION)  # type: ignore[typeddict-item]
    params = SamplingParams(**options, repetition_detection=as_object)  # type: ignore[typeddict-item]
    for found in (client.generate("Sing!", params), client.generate("Sing!", **PARAMS)):
        assert found.text == expected
        assert (found.finish_reason, found.stop_reason) == ("repetition", "repetition_detected")
    deltas = list(client.stream("Sing!", **PARAMS))
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason == "repetition"


def test_n_answers(client: Client, expected: str) -> None:
    [*outputs] = client.generate("Sing!", **PARAMS, n=3).outputs
    assert [(one.text, one.finish_reason) for one in outputs] == [(expected, "repetition")] * 3


def test_offline(model: str, expected: str) -> None:
    with LLM(model) as llm:
        found = llm.generate(["Sing!", "Sing again!"], SamplingParams(**PARAMS))
    assert [one.outputs[0].text for one in found] == [expected] * 2
    assert {one.outputs[0].finish_reason for one in found} == {"repetition"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_openais_endpoints(stack: Stack, expected: str, is_stream: bool) -> None:
    options: dict[str, Any] = {"model": "any", "extra_body": PARAMS, "stream": is_stream}
    with OpenAI(base_url=f"{stack.http_address}/v1", api_key="x", timeout=PATIENCE_S) as openai:
        completion = openai.completions.create(prompt="Sing!", **options)
        chat = openai.chat.completions.create(
            messages=[{"role": "user", "content": "Sing!"}], **options
        )
        if is_stream:
            of_text = [chunk.choices[0] for chunk in completion]
            of_chat = [chunk.choices[0] for chunk in chat]
            texts = ["".join(each.text or "" for each in of_text)]
            texts.append("".join(each.delta.content or "" for each in of_chat))
            reasons = [of_text[-1].finish_reason, of_chat[-1].finish_reason]
        else:
            texts = [completion.choices[0].text, chat.choices[0].message.content]
            reasons = [completion.choices[0].finish_reason, chat.choices[0].finish_reason]
    assert texts == [expected, expected]
    assert reasons == ["repetition", "repetition"]


def test_generate(raw: Raw, expected: str) -> None:
    answer = posted(raw, "/generate", {"text": "Sing!", "sampling_params": PARAMS}).json
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "repetition"
    assert answer["choices"][0]["stop_reason"] == "repetition_detected"


@pytest.mark.parametrize("prompt", ["think", "call"])
def test_it_may_come_within_reasoning_or_a_call(raw: Raw, prompt: str) -> None:
    """A call that it cuts off is incomplete, and no reason to call anything."""
    body = {"messages": [{"role": "user", "content": prompt}], "tools": [NOW], **PARAMS}
    [choice] = posted(raw, "/v1/chat/completions", body).json["choices"]
    assert choice["finish_reason"] == "repetition"
    if prompt == "think":
        assert choice["message"]["reasoning_content"].startswith("Hm. la la la")
        assert not choice["message"]["content"]
    else:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["arguments"].startswith('{"x": " la la la')


@pytest.mark.parametrize(
    ("detection", "field"),
    [
        ({"max_pattern_size": 10**6, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 8}, "repetition_detection.min_count"),
        ({"max_pattern_size": "8", "min_count": 2}, "repetition_detection.max_pattern_size"),
    ],
)
def test_bad_values_are_refused(raw: Raw, detection: Any, field: str) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = posted(raw, path, {**prompt, "repetition_detection": detection})
        assert answer.status == 400
        assert answer.error["param"] == field
    params = {"repetition_detection": detection}
    answer = posted(raw, "/generate", {"text": "x", "sampling_params": params})
    assert answer.status == 400
    assert answer.error["param"].endswith(field)


def num_ended_by_repetition(raw: Raw) -> float:
    """Requests that ended so, as /metrics tells."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in raw.get("/metrics").body.decode().splitlines()
        if line.startswith("slipstream:request_success_total{")
        and 'finished_reason="repetition"' in line
    )


def test_they_are_counted(raw: Raw, expected: str) -> None:
    posted(raw, "/v1/completions", {"prompt": "Sing!", **PARAMS})
    patience = Patience()
    while not num_ended_by_repetition(raw):  # a process tells its counts now and then
        patience.wait("the end is not counted")


def test_a_batch(stack: Stack, expected: str, tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "any", "prompt": "Sing!", **PARAMS},
    }
    given.write_text(json.dumps(line) + "\n")
    assert main(["run-batch", str(given), str(output), "--address", stack.address]) == 0
    [row] = [json.loads(text) for text in output.read_text().splitlines()]
    [choice] = row["response"]["body"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, "repetition")
