"""Which of the served models a name stands for."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import structs
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Client, Stack
from slipstream.request.requests import new_submits
from slipstream.request.served_models import (
    AdaptedModel,
    LoRARequest,
    base_of,
    checked_model,
    find_model,
    listed_names,
    names_of,
    with_adapter,
)
from slipstream.stack.plan.process_plan import core_config
from slipstream.stack.settings import settings_from
from slipstream_ipc.messages import AdapterRef, ModelCard, RequestSpec, SamplingParams
from slipstream_ipc.validation.request_spec import root_digest


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
    *older, _aliases, _adapters, _is_drafted, _pooling, _media = msgspec.msgpack.decode(
        msgspec.msgpack.encode(A)
    )
    encoded = msgspec.msgpack.encode(older)
    assert msgspec.msgpack.decode(encoded, type=ModelCard) == card("a")


ADAPTED = (
    structs.replace(
        card("base", "alias", "s*"),
        adapters=(AdapterRef("sql", "/sql", b"1"), AdapterRef("tone", "/tone", b"2")),
    ),
    structs.replace(card("other"), adapters=(AdapterRef("tone", "/tone2", b"3"),)),
)


@pytest.mark.parametrize(
    ("name", "base", "path"),
    [
        ("base", "base", None),
        ("alias", "base", None),
        ("some", "base", None),
        ("sql", "base", "/sql"),  # before the beginning of names
        ("tone", "base", "/tone"),
        ("other", "other", None),
    ],
)
def test_an_adapter_is_a_model_of_its_own(name: str, base: str, path: str | None) -> None:
    found = find_model(ADAPTED, name)
    assert found is not None
    assert base_of(found) == base
    assert isinstance(found, AdaptedModel) == (path is not None)
    (submit,) = new_submits("x", [SamplingParams()], stream_ids=[None], model=found)
    if isinstance(found, AdaptedModel):
        assert (found.name, found.adapter.path) == (name, path)
        assert (found.aliases, found.adapters) == ((), ())
        assert (submit.adapter, submit.adapter_digest) == (name, found.adapter.digest)
    else:
        assert (submit.adapter, submit.adapter_digest) == ("", b"")


def test_a_call_names_one_adapter() -> None:
    """A model that is an adapter, and another one as `lora_request`, are no one's request."""
    wanted = LoRARequest("sql")
    for name in (None, "base", "alias", "sql"):
        assert with_adapter(ADAPTED[:1], name, wanted).name == "sql"
    with pytest.raises(BadRequestError, match="got 'sql', allowed: none but 'tone'"):
        with_adapter(ADAPTED[:1], "tone", wanted)


def test_adapters_are_listed_behind_a_models_names() -> None:
    assert listed_names(ADAPTED[0]) == ("base", "alias", "sql", "tone")
    assert names_of(ADAPTED[:1]) == "one of 'base', 'alias', 's*', 'sql', 'tone'"


def test_prefixes_are_shared_by_the_content_of_adapters() -> None:
    params = SamplingParams()
    plain = RequestSpec(params)
    specs = [
        plain,
        RequestSpec(params, adapter="a", adapter_digest=b"1"),
        RequestSpec(params, adapter="b", adapter_digest=b"1"),
        RequestSpec(params, adapter="a", adapter_digest=b"2"),
        RequestSpec(params, adapter="a", adapter_digest=b"1", cache_salt="x"),
    ]
    roots = [root_digest("m", spec) for spec in specs]
    assert roots[1] == roots[2]
    assert len({*roots}) == 4
    assert roots[0] == root_digest("m", RequestSpec(params, label="x"))


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
