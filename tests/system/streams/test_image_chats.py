"""Chats with images over a whole stack: the answers of transformers' `generate`, whichever API asks
for them, and whatever dies meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from tests.helpers.poisoned_core import with_deadly_image
from tests.helpers.stacks import spareless_stack
from tests.helpers.vision_folders import chatting_model
from tests.helpers.vision_models import picture

from slipstream import BadRequestError as Refused
from slipstream import Client, SlipstreamError, Stack
from slipstream.cli.main import main
from slipstream.stack import stack as stack_module
from slipstream_verify.fuzz.damaged_images import damaged_image

pytestmark = pytest.mark.process

NUM_TOKENS = 12
ONE, TWO = picture(1), picture(2, 64, 32, "JPEG")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    torch.set_num_threads(1)
    folder = chatting_model(tmp_path_factory.mktemp("chatting"))
    options = {"max_model_len": 1024, "threads": 1, "served_model_name": "seer"}
    with spareless_stack(str(folder), http_port=0, grace_s=600.0, **options) as running:
        yield running


class Oracle:
    """transformers' own processor and `generate`."""

    def __init__(self, folder: Path) -> None:
        import transformers

        from slipstream_worker.tokenizer.image_placeholders import load_placeholders

        auto: Any = transformers.AutoModelForMultimodalLM
        self.module = auto.from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.processor = load_placeholders(self.tokenizer, str(folder)).processor

    def answer(self, turns: Sequence[dict[str, Any]], *files: bytes) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the answer."""
        from PIL import Image

        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        images = [Image.open(BytesIO(file)).convert("RGB") for file in files]
        inputs = self.processor(images=images, text=[text], return_tensors="pt")
        ids = inputs["input_ids"][0].tolist()
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == pad).long()
        made = self.module.generate(
            **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
        return ids, made[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def oracle(stack: Stack) -> Oracle:
    with Client(stack.address) as client:
        return Oracle(Path(client.model.path))


IMAGE = {"type": "image"}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def url(data: bytes) -> dict[str, Any]:
    address = "data:;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": address}}


def block(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    return {"type": "image", "source": source}


def posted(stack: Stack, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{stack.http_address}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.fixture
def ask(stack: Stack) -> Iterator[Any]:
    with OpenAI(base_url=f"{stack.http_address}/v1", api_key="x", max_retries=0) as client:
        create: Any = client.chat.completions.create
        extra = {"ignore_eos": True, "return_token_ids": True}
        yield partial(create, model="seer", temperature=0, max_tokens=NUM_TOKENS, extra_body=extra)


def test_a_chat_is_answered_as_generate_answers_it(ask: Any, oracle: Oracle) -> None:
    for files in ((ONE,), (TWO,), (TWO, ONE)):
        shown = [IMAGE for _ in files]
        turns = [{"role": "user", "content": [text("what is "), *shown, text("?")]}]
        ids, expected = oracle.answer(turns, *files)
        parts = [text("what is "), *map(url, files), text("?")]

        answer = ask(messages=[{"role": "user", "content": parts}])

        assert answer.prompt_token_ids == ids
        assert answer.choices[0].token_ids == expected
        assert answer.usage.prompt_tokens == len(ids)


def test_a_screenshot_in_a_tools_result_is_seen(stack: Stack) -> None:
    """As Claude Code reads one; its tokens count."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    seen = []
    for data in (ONE, TWO):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(data)]}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        body = {"model": "seer", "messages": turns}
        counted = posted(stack, "/v1/messages/count_tokens", body)
        found = posted(stack, "/v1/messages", {**body, "max_tokens": NUM_TOKENS, "temperature": 0})
        usage = found["usage"]
        num_tokens = usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0)
        assert counted["input_tokens"] == num_tokens > 30
        seen.append(found["content"])
    assert seen[0] != seen[1]


def test_python_and_the_command_line_show_files(
    stack: Stack, oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(ONE)
    turns = [{"role": "user", "content": [IMAGE, text("?")]}]
    ids, expected = oracle.answer(turns, ONE)
    with Client(stack.address) as client:
        chat = [{"role": "user", "content": [{"type": "image", "image": path}, text("?")]}]
        found = client.generate(chat, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        assert list(client.tokenize(chat)) == ids == list(found.prompt_token_ids)
        with pytest.raises(Refused, match="a file that can be read"):
            client.generate([{"role": "user", "content": [{"type": "image", "image": "/no"}]}])
    assert list(found.token_ids) == expected
    options = ["--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--address", stack.address]
    assert main(["chat", "--image", str(path), *options, "--quick", "?"]) == 0
    said = capsys.readouterr().out
    assert said.strip()[:1] == found.text.strip()[:1]


def test_a_stream_with_an_image_survives_core_and_worker(
    stack: Stack, ask: Any, oracle: Oracle
) -> None:
    turns = [{"role": "user", "content": [IMAGE, text("go on")]}]
    _, expected = oracle.answer(turns, ONE)
    for role in ("core", "worker"):
        messages = [{"role": "user", "content": [url(ONE), text("go on")]}]
        ids: list[int] = []
        for number, chunk in enumerate(ask(messages=messages, stream=True)):
            ids += getattr(chunk.choices[0], "token_ids", None) or []
            if number == 2:
                os.kill(stack.pids[role], signal.SIGKILL)
        assert ids == expected, role


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (ONE[:-40], ""),
        (TWO[: len(TWO) // 2], ""),
        (ONE[:16] + b"\0\0\xff\xff\0\0\xff\xff" + ONE[24:], "at most 33554432 pixels"),
        (b"GIF89a", "cut off"),
    ],
)
def test_a_damaged_file_is_a_400_that_names_its_place(ask: Any, data: bytes, said: str) -> None:
    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[1\]: ") as caught:
        ask(messages=[{"role": "user", "content": [text("?"), url(data)]}])
    assert said in str(caught.value)


def test_files_of_a_fuzzer_are_answered_or_refused_and_others_go_on(
    ask: Any, oracle: Oracle
) -> None:
    turns = [{"role": "user", "content": [IMAGE, text("still?")]}]
    _, expected = oracle.answer(turns, ONE)
    refused = []
    for seed in range(60):
        data = damaged_image(Random(seed))
        try:
            ask(messages=[{"role": "user", "content": [text("?"), url(data)]}])
        except BadRequestError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all("messages[0].content[1]" in each for each in refused)
    answer = ask(messages=[{"role": "user", "content": [url(ONE), text("still?")]}])
    assert answer.choices[0].token_ids == expected


def test_an_image_that_kills_every_core_ends_its_stream_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chatting_model(tmp_path)
    monkeypatch.setattr(stack_module, "plan_stack", with_deadly_image(TWO))
    options = {"max_model_len": 1024, "threads": 1, "max_restarts": 20, "spare_worker": False}
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    with Stack(str(folder), **options) as stack, stack.client() as client:

        def stream(*files: bytes) -> Any:
            shown = [{"type": "image", "image": file} for file in files]
            turn = {"role": "user", "content": [*shown, text("so")]}
            return client.stream([turn], **asked)

        others = [stream(), stream(ONE)]
        deadly = stream(TWO)
        others += [stream(), stream(ONE)]
        with pytest.raises(SlipstreamError, match="crashed the engine 3 times in a row"):
            list(deadly)
        for each in others:
            assert sum(len(delta.token_ids) for delta in each) == NUM_TOKENS
        assert stack.is_running
