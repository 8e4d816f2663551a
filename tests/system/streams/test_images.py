"""Streams with images from a client's Submit to its tokens: those of transformers' `generate`,
whichever of core, worker and the process that decodes images dies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.helpers.mini_stack import MiniStack, RawClient, Received
from tests.helpers.vision_models import PLACEHOLDER, Reference, make_vision_model, picture

from slipstream_core.config import LoraConfig
from slipstream_ipc.messages import OtherAnswer
from slipstream_ipc.validation.media import media_item

pytestmark = pytest.mark.process

NUM_TOKENS = 30
ONE, TWO = picture(1), picture(2, 64, 32, "JPEG")
IMAGES: list[tuple[bytes, ...]] = [(ONE,), (), (TWO, ONE)]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 12,
    "block_size": 4,
    "num_blocks": 400,
    "threads": 1,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[tuple[list[int], tuple[bytes, ...], list[int]]]:
    """Prompts, their images, and the answers of `generate`."""
    reference = Reference(folder)
    prompts = [reference.prompt(seed, images) for seed, images in enumerate(IMAGES)]
    other = reference.other_picture(prompts[0], ONE, NUM_TOKENS)
    pairs = [*zip(prompts, IMAGES, strict=True), (prompts[0], (other,))]
    return [(*pair, reference.answer(*pair, NUM_TOKENS)) for pair in pairs]


def submit(
    client: RawClient, prompt: Sequence[int], images: Sequence[bytes], **params: Any
) -> Received:
    given = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | params
    received = client.submit(list(prompt), **given)
    client._waiting.pop()
    media = tuple(media_item("image", image) for image in images)
    return client.send_submit(structs.replace(received.submit, media=media))


def are_over(streams: Sequence[Received]) -> bool:
    return all(it.is_over for it in streams)


def images_of(stack: MiniStack) -> Any:
    assert stack.core is not None
    return stack.core.images


def kill_media_process(stack: MiniStack) -> None:
    pid = images_of(stack)._encoder._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_answers_are_those_of_generate_over_deaths(
    make_stack: Callable[..., MiniStack],
    folder: Path,
    asked: list[tuple[list[int], tuple[bytes, ...], list[int]]],
) -> None:
    stack = make_stack(model=str(folder), **SETTINGS)
    client = stack.client()
    streams = [submit(client, prompt, images) for prompt, images, _ in asked]
    kill_media_process(stack)

    def have(num: int) -> bool:
        return min(len(it.token_ids) for it in streams) >= num

    for num, dies in ((3, "core"), (8, "worker"), (12, "both"), (18, "core")):
        stack.until(partial(have, num))
        if dies != "worker":
            stack.kill_core()
        if dies != "core":
            stack.kill_worker()
        if dies != "worker":
            stack.start_core()
        if dies != "core":
            stack.start_worker()
    stack.until(partial(are_over, streams))
    assert [it.token_ids for it in streams] == [expected for *_, expected in asked]
    images = images_of(stack)
    stack.until(lambda: images.cache.num_held == 0)
    assert stack.worker is not None
    assert stack.worker._from_clients._lifecycle.media.num_bytes == 0
    # the next turn finds what the turn before has computed, and its picture
    kept, (prompt, seen, expected) = images.cache.num_kept, asked[2]
    again = submit(client, [*prompt, *expected[:9], 5], seen)
    stack.until(partial(are_over, [again]))
    assert again.end is not None
    assert again.end.num_cached_tokens >= len(prompt) // 4 * 4
    assert images.cache.num_kept == kept


def test_several_answers_share_an_image_and_requests_with_grammars_wait_for_both(
    make_stack: Callable[..., MiniStack],
    folder: Path,
    asked: list[tuple[list[int], tuple[bytes, ...], list[int]]],
) -> None:
    stack = make_stack(model=str(folder), **SETTINGS)
    client = stack.client()
    prompt, seen, expected = asked[2]
    streams = [submit(client, prompt, seen, seed=seed) for seed in range(3)]
    del client._waiting[-3:]
    others = tuple(OtherAnswer(it.submit.handle, it.stream_id, 0) for it in streams[1:])
    client._waiting.append(structs.replace(streams[0].submit, others=others))
    stack.until(partial(are_over, streams))
    assert [it.token_ids for it in streams] == [expected] * 3
    assert images_of(stack).cache.num_kept == sum(
        list(prompt).count(PLACEHOLDER) for prompt, *_ in asked[2:3]
    )


def test_bad_images_are_refused_and_harm_nobody(
    make_stack: Callable[..., MiniStack],
    folder: Path,
    asked: list[tuple[list[int], tuple[bytes, ...], list[int]]],
) -> None:
    stack = make_stack(model=str(folder), **SETTINGS)
    client = stack.client()
    prompt, seen, expected = asked[2]
    honest = submit(client, prompt, seen)
    bad = [
        (submit(client, prompt, (ONE, TWO[:-200])), "media[1]"),
        (submit(client, prompt, (ONE,)), "media"),
        (submit(client, [*prompt, PLACEHOLDER], seen), "media"),
        (submit(client, prompt, seen, prompt_logprobs=1), "prompt_logprobs"),
    ]
    stack.until(partial(are_over, [honest, *(it for it, _ in bad)]))
    assert honest.token_ids == expected
    for received, field in bad:
        assert received.fault is not None
        assert (received.fault.code, received.fault.field) == ("bad_request", field)
    stack.until(lambda: images_of(stack).cache.num_held == 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"language_model_only": True}, "language_model_only is set"),
        ({"quantization": "q8_0"}, "images need weights that are not quantised"),
        (
            {"lora": LoraConfig(is_updatable=True, max_rank=8, max_loras=2)},
            "enable_lora is set, and adapters do not reach its images",
        ),
    ],
)
def test_models_that_are_served_as_text_say_why(
    make_stack: Callable[..., MiniStack], folder: Path, settings: dict[str, Any], why: str
) -> None:
    stack = make_stack(model=str(folder), **SETTINGS, **settings)
    client = stack.client()
    refused, text = submit(client, [5, PLACEHOLDER], (ONE,)), submit(client, [5, PLACEHOLDER], ())
    stack.until(partial(are_over, [refused, text]))
    assert refused.fault is not None
    assert refused.fault.message == why
    assert len(text.token_ids) == NUM_TOKENS
