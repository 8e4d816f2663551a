"""Adapters of a served model, by name: in each HTTP API, in Python, in the list of models and in
/metrics.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.loras import ALL_LINEAR, Lora, save_lora
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Client, LoRARequest, Stack
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import error_from
from slipstream.http.api_errors import error_of
from slipstream_ipc.errors import BadRequest

pytestmark = pytest.mark.process

LORAS = {
    "tone": Lora(ALL_LINEAR, 8, 16, seed=1, std=0.05),
    "team/sql": Lora(("q_proj", "v_proj"), 4, 8, seed=2, std=0.2),
}
NAMES = (None, "slipstream-demo", "alias", *LORAS)
PROMPT = "def main("
CHAT = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("loras")
    return {
        name: save_lora(lora, MODEL_PATH, root / name.replace("/", "-"))
        for name, lora in LORAS.items()
    }


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path]) -> Iterator[Stack]:
    by_json = json.dumps({"name": "team/sql", "path": str(folders["team/sql"])})
    with spareless_stack(
        http_port=0,
        served_model_name=["slipstream-demo", "alias"],
        enable_lora=True,
        lora_modules=[f"tone={folders['tone']}", by_json],
        device="cpu",
    ) as one:
        yield one


def answered(stack: Stack, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{stack.http_address}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: bytes = answer.read()
    return text.decode() if path == "/metrics" else json.loads(text)


def test_each_api_serves_each_adapter_by_its_name(stack: Stack) -> None:
    chat = {"messages": CHAT, **GREEDY}
    texts: dict[str, set[str]] = {}
    with Client(stack.address) as client:
        for name in NAMES:
            named = {} if name is None else {"model": name}
            shown = name if name in LORAS else "slipstream-demo"
            text = client.generate(PROMPT, **named, **GREEDY).text
            found = answered(stack, "/v1/completions", {"prompt": PROMPT, **GREEDY, **named})
            assert (found["model"], found["choices"][0]["text"]) == (shown, text)
            native = {"prompt": PROMPT, "sampling_params": GREEDY, **named}
            assert answered(stack, "/generate", native)["choices"][0]["text"] == text
            said = client.generate(CHAT, **named, **GREEDY).text
            found = answered(stack, "/v1/chat/completions", {**chat, **named})
            assert (found["model"], found["choices"][0]["message"]["content"]) == (shown, said)
            found = answered(stack, "/v1/messages", {**chat, "model": name or "alias"})
            assert (found["model"], found["content"][0]["text"]) == (shown, said)
            body = {"input": PROMPT, "temperature": 0, "max_output_tokens": 24, **named}
            found = answered(stack, "/v1/responses", body)
            assert (found["model"], found["output"][0]["content"][0]["text"]) == (shown, said)
            texts.setdefault(text, set()).add(shown)
            ids = client.tokenize(PROMPT, **named)
            assert answered(stack, "/tokenize", {"prompt": PROMPT, **named})["tokens"] == ids
            assert client.detokenize(ids, **named) == PROMPT
            counted = {"messages": CHAT, "model": name or "alias"}
            assert answered(stack, "/v1/messages/count_tokens", counted)["input_tokens"]
    assert sorted(map(sorted, texts.values())) == [["slipstream-demo"], ["team/sql"], ["tone"]]


def test_log_probabilities_have_the_bases_vocabulary(stack: Stack) -> None:
    body = {"prompt": PROMPT, "model": "tone", "logprobs": 2, **GREEDY}
    found = answered(stack, "/v1/completions", body)["choices"][0]
    assert "".join(found["logprobs"]["tokens"]) == found["text"]


def events_of(stack: Stack, path: str, body: Any = None, last: str = "") -> list[tuple[str, Any]]:
    """The ids and data of a stream's events."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"accept": "text/event-stream", "content-type": "application/json"}
    headers |= {"last-event-id": last} if last else {}
    request = urllib.request.Request(f"{stack.http_address}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    found = re.findall(r"^id: (.*)\n(?:event: .*\n)?data: (\{.*)$", text, re.MULTILINE)
    return [(its_id, json.loads(data)) for its_id, data in found]


def said(events: list[tuple[str, Any]]) -> str:
    return "".join(each["choices"][0]["text"] for _, each in events if each["choices"])


def test_a_resumed_answer_is_its_adapters(stack: Stack) -> None:
    body = {"prompt": PROMPT, "model": "tone", "stream": True, "stream_interval": 4, **GREEDY}
    events = events_of(stack, "/v1/completions", body)
    assert len(events) > 3
    last, chunk = events[1]
    for path, again in (("/v1/completions", body), (f"/v1/streams/{chunk['id']}", None)):
        rest = events_of(stack, path, again, last)
        assert {each["model"] for _, each in rest} == {"tone"}
        assert said(events[:2]) + said(rest) == said(events)


def test_models_are_listed_with_their_parent(stack: Stack, folders: dict[str, Path]) -> None:
    listed = {each["id"]: each for each in answered(stack, "/v1/models")["data"]}
    assert list(listed) == ["slipstream-demo", "alias", *LORAS]
    for name, folder in folders.items():
        assert listed[name]["parent"] == "slipstream-demo"
        assert listed[name]["root"] == str(folder)
        assert answered(stack, f"/v1/models/{name.replace('/', '%2F')}")["id"] == name
    assert "parent" not in listed["slipstream-demo"]


def test_a_name_that_is_not_served_is_told_those_that_are(stack: Stack) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        answered(stack, "/v1/completions", {"prompt": "x", "model": "none"})
    assert caught.value.code == 404
    said = json.loads(caught.value.read())["error"]["message"]
    assert "'slipstream-demo', 'alias', 'tone', 'team/sql'" in said


def test_an_adapter_that_a_front_alone_knows_is_an_unknown_model() -> None:
    """A replaced core has no adapter whose files are gone; fronts have the list of before."""
    fault = BadRequest("model", "tone", "one of 'team/sql'").fault
    found = error_of(error_from(fault), {})
    fields = found.body.error
    assert (found.status, fields.code, fields.param) == (404, "model_not_found", "model")
    assert fields.message == "model: got 'tone', allowed: one of 'team/sql'"


def test_lora_requests_are_vllms(stack: Stack, folders: dict[str, Path]) -> None:
    tone, sql = (
        LoRARequest(name, at, str(folder)) for at, (name, folder) in enumerate(folders.items(), 1)
    )
    with Client(stack.address) as client:
        expected = [client.generate(PROMPT, model=name, **GREEDY).text for name in NAMES[2:]]
        prompts = [PROMPT] * 3
        found = client.generate_many(prompts, lora_request=[None, tone, sql], **GREEDY)
        assert [each.text for each in found] == expected
        found = client.generate_many(prompts, lora_request=tone, **GREEDY)
        assert [each.text for each in found] == [expected[1]] * 3
        named = LoRARequest("tone")
        assert client.generate(PROMPT, lora_request=named, **GREEDY).text == expected[1]
        for wrong, says in (
            (LoRARequest("nothing", 1, "/x"), "got 'nothing', allowed: one of 'tone', 'team/sql'"),
            (LoRARequest("tone", 1, "/x"), "got '/x', allowed: /"),
            ("tone", "allowed: LoRARequest, or a list with one for each"),
            ([tone], "1 of them, allowed: one for all, or 2 for 2 prompts"),
        ):
            with pytest.raises(BadRequestError) as caught:
                client.generate_many(prompts[:2], lora_request=wrong)  # type: ignore[arg-type]
            assert caught.value.field == "lora_request"
            assert says in str(caught.value)


def test_metrics_name_the_adapters_that_are_in_use(stack: Stack) -> None:
    patience, found, streams = Patience(), "", []
    with Client(stack.address) as client:
        while 'running_lora_adapters="tone"' not in found:  # as statistics come
            patience.wait(found)
            streams.append(client.stream(PROMPT, model="tone", max_tokens=1500, ignore_eos=True))
            if len(streams) > 4:  # one of them runs
                streams.pop(0).close()
            found = answered(stack, "/metrics")
        for each in streams:
            each.close()
    [line] = re.findall(r"^slipstream:lora_requests_info\{.*$", found, re.MULTILINE)
    assert 'max_lora="2"' in line
