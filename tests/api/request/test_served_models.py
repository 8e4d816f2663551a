"""Which of the served models a name stands for."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Client, Stack
from slipstream.request.served_models import checked_model, find_model, listed_names
from slipstream.stack.plan.process_plan import core_config
from slipstream.stack.settings import settings_from
from slipstream_ipc.messages import ModelCard


def card(name: str, *aliases: str) -> ModelCard:
    return ModelCard(name, "", 10, 10, (), aliases=aliases)


A = card("a", "gpt-4o", "claude-*")
B = card("claude-b", "gpt-5", "claude-opus", "*")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a", A),
        ("gpt-4o", A),
        ("gpt-5", B),
        ("claude-b", B),  # its own name, before the other's beginning of names
        ("claude-opus", B),
        ("claude-haiku-4-5", A),
        ("claude-", A),
        ("claude", B),
        ("anything", B),
    ],
)
def test_own_names_come_before_aliases_and_these_before_beginnings(
    name: str, found: ModelCard
) -> None:
    assert find_model([A, B], name) is found


def test_without_a_name_there_must_be_one_model() -> None:
    assert find_model([A], None) is A
    assert find_model([A, B], None) is None


def test_an_unknown_name_is_told_all_names() -> None:
    with pytest.raises(BadRequestError) as caught:
        checked_model([A], "x")
    assert str(caught.value) == "model: got 'x', allowed: one of 'a', 'gpt-4o', 'claude-*'"


def test_beginnings_are_not_listed() -> None:
    assert listed_names(A) == ("a", "gpt-4o")


@pytest.mark.parametrize(
    ("given", "name", "aliases"),
    [
        (None, "simulated:", ()),
        ((), "simulated:", ()),
        ("x", "x", ()),
        (["x", "y", "x", "z*"], "x", ("y", "z*")),
    ],
)
def test_names_of_a_stack(given: Any, name: str, aliases: tuple[str, ...]) -> None:
    settings = settings_from({"model": "simulated:", "served_model_name": given})
    config = core_config(settings, "simulated:")
    assert (config["served_model_name"], config["aliases"]) == (name, aliases)


@pytest.mark.parametrize("given", ["x*", ["*"], [""], ["x", "y" * 1025]])
def test_names_that_cannot_be(given: Any) -> None:
    settings = settings_from({"model": "simulated:", "served_model_name": given})
    with pytest.raises(BadRequestError, match=r"^served_model_name: got "):
        core_config(settings, "simulated:")


def test_an_older_server_has_no_aliases() -> None:
    *older, _aliases = msgspec.msgpack.decode(msgspec.msgpack.encode(A))
    encoded = msgspec.msgpack.encode(older)
    assert msgspec.msgpack.decode(encoded, type=ModelCard) == card("a")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    names = ["first", "gpt-4o", "claude-*"]
    with spareless_stack("simulated:mode=chain", http_port=0, served_model_name=names) as one:
        yield one


def answered(stack: Stack, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{stack.http_address}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: bytes = answer.read()
    return text.decode() if path == "/metrics" else json.loads(text)


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
}


@pytest.mark.process
@pytest.mark.parametrize("name", ["first", "gpt-4o", "claude-sonnet-9"])
def test_each_api_serves_all_names_and_answers_with_the_first(stack: Stack, name: str) -> None:
    for path, body in BODIES.items():
        assert answered(stack, path, {**body, "model": name})["model"] == "first"
    assert answered(stack, "/v1/messages/count_tokens", {**CHAT, "model": name})["input_tokens"]
    assert answered(stack, "/tokenize", {"prompt": "x", "model": name})["count"]
    assert answered(stack, f"/v1/models/{name}")["id"] == name
    with Client(stack.address) as client:
        assert client.generate("x", model=name, max_tokens=1).text
    with pytest.raises(urllib.error.HTTPError) as caught:
        answered(stack, "/v1/completions", {"prompt": "x", "model": f"no-{name}"})
    assert caught.value.code == 404


@pytest.mark.process
def test_all_names_are_listed_and_metrics_have_the_first(stack: Stack) -> None:
    assert [each["id"] for each in answered(stack, "/v1/models")["data"]] == ["first", "gpt-4o"]
    metrics = answered(stack, "/metrics")
    assert 'model_name="first"' in metrics
    assert "gpt-4o" not in metrics
