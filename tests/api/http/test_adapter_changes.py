"""/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes, and the same in Python."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.loras import ALL_LINEAR, Lora, save_lora
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import AsyncClient, BadRequestError, Client, Stack
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

KEYS = "chief-key", "other-key"
PROMPT = "def main("
GREEDY = {"temperature": 0, "max_tokens": 24}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loras")
    save_lora(Lora(ALL_LINEAR, 8, 16, seed=1, std=0.05), MODEL_PATH, root / "tone")
    save_lora(Lora(("q_proj", "v_proj"), 4, 8, seed=2, std=0.2), MODEL_PATH, root / "sql")
    return root


@pytest.fixture(scope="module")
def stack(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    chiefs = tmp_path_factory.mktemp("keys") / "chiefs"
    chiefs.write_text(KEYS[0])
    chiefs.chmod(0o600)
    with spareless_stack(
        http_port=0,
        http_workers=2,
        api_key=KEYS,
        lora_key_file=str(chiefs),
        served_model_name="base",
        enable_lora=True,
        allow_runtime_lora_updating=True,
        lora_root=str(root),
        device="cpu",
    ) as one:
        yield one


def answered(stack: Stack, path: str, body: Any = None, key: str = KEYS[0]) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{stack.http_address}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def listed(stack: Stack) -> list[str]:
    return [each["id"] for each in json.loads(answered(stack, "/v1/models")[1])["data"]]


def test_bodies_and_answers_are_vllms(stack: Stack, root: Path) -> None:
    tone = {"lora_name": "x", "lora_path": str(root / "tone")}
    completion = {"prompt": PROMPT, "model": "x", **GREEDY}
    added = (200, "Success: LoRA adapter 'x' added successfully.")
    assert answered(stack, LOAD, tone) == added
    with Client(stack.address) as client:
        said = client.generate(PROMPT, model="x", **GREEDY).text
        status, text = answered(stack, LOAD, {**tone, "lora_path": str(root / "sql")})
        assert (status, "which is loaded" in text) == (400, True)
        changed = {**tone, "lora_path": str(root / "sql"), "load_inplace": True}
        assert answered(stack, LOAD, changed) == added
        other = client.generate(PROMPT, model="x", **GREEDY).text
        assert other != said
        assert answered(stack, UNLOAD, {"lora_name": "x", "lora_int_id": 3}) == (
            200,
            "Success: LoRA adapter 'x' removed successfully.",
        )
        with pytest.raises(BadRequestError):
            client.generate(PROMPT, model="x", **GREEDY)
    status, text = answered(stack, UNLOAD, {"lora_name": "x"})
    assert (status, text) == (404, "lora_name: got 'x', allowed: names of adapters that are loaded")
    assert answered(stack, "/v1/completions", completion)[0] == 404


def test_each_front_serves_what_another_has_loaded(stack: Stack, root: Path) -> None:
    """At once: each request here has a connection of its own, so either front gets it."""
    body = {"lora_name": "x", "lora_path": str(root / "tone")}
    for _ in range(10):
        assert answered(stack, LOAD, body)[0] == 200
        completion = {"prompt": PROMPT, "model": "x", "max_tokens": 1}
        assert {answered(stack, "/v1/completions", completion)[0] for _ in range(3)} == {200}
        assert answered(stack, UNLOAD, {"lora_name": "x"})[0] == 200
        assert {answered(stack, "/v1/completions", completion)[0] for _ in range(3)} == {404}


def test_what_is_wrong_has_its_status(stack: Stack, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "tone", tmp_path / "tone")
    for body, status, says in (
        ({}, 400, "lora_name and lora_path are needed"),
        ({"lora_name": "y"}, 400, "lora_name and lora_path are needed"),
        ({"lora_name": "base", "lora_path": f"{root}/tone"}, 400, "names that the model has not"),
        ({"lora_name": "y", "lora_path": f"{tmp_path}/tone"}, 403, "allowed: folders below"),
        ({"lora_name": "y", "lora_path": f"{root}/none"}, 404, "there is no folder"),
        ({"lora_name": "y", "lora_path": "org/name"}, 403, "nothing is fetched"),
        ({"lora_name": "y", "lora_path": 3}, 400, "lora_path"),
        ({"lora_name": "y", "lora_path": str(root), "load_inplace": "yes"}, 400, "load_inplace"),
    ):
        found, text = answered(stack, LOAD, body)
        assert (found, says in text) == (status, True), (body, found, text)
    assert answered(stack, UNLOAD, {})[0] == 400
    assert listed(stack) == ["base"]


def test_only_keys_that_are_named_change_adapters(stack: Stack, root: Path) -> None:
    body = {"lora_name": "x", "lora_path": str(root / "tone")}
    for path in (LOAD, UNLOAD):
        status, text = answered(stack, path, body if path == LOAD else {"lora_name": "x"}, KEYS[1])
        assert (status, "--lora-key-file" in text) == (403, True)
        assert answered(stack, path, body, "wrong")[0] == 401


def test_in_python(stack: Stack, root: Path) -> None:
    async def change() -> str:
        async with AsyncClient(stack.address) as client:
            await client.load_lora_adapter("y", root / "sql")
            text = (await client.generate(PROMPT, model="y", **GREEDY)).text
            await client.unload_lora_adapter("y")
        return text

    with Client(stack.address) as client:
        client.load_lora_adapter("x", root / "tone")
        one = client.generate(PROMPT, model="x", **GREEDY).text
        client.load_lora_adapter("x", root / "sql", load_inplace=True)
        assert client.generate(PROMPT, model="x", **GREEDY).text == asyncio.run(change()) != one
        client.unload_lora_adapter("x")
        for wrong in (
            lambda: client.load_lora_adapter("x", "/nowhere"),
            lambda: client.load_lora_adapter("", root / "tone"),
            lambda: client.unload_lora_adapter("x"),
        ):
            with pytest.raises(BadRequestError):
                wrong()
