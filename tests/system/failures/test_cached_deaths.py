"""A core that holds keys and values in 8 bits dies in mid-stream: another one computes them again,
and the text stays the same.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(4)]
NUM_OUTPUTS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers wander."""
    folder = tmp_path_factory.mktemp("cached")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3",
        vocab_size=203,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
        max_position_embeddings=512,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def has_read(streams: list[Any], num_outputs: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num_outputs


def are_over(streams: list[Any]) -> bool:
    return all(it.is_over for it in streams)


def answers(make_stack: Any, folder: Path, kind: str, kills: tuple[str, ...]) -> list[list[int]]:
    torch.set_num_threads(1)
    stack = make_stack(
        model=str(folder),
        device="cpu",
        dtype="float32",
        kv_cache_dtype=kind,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=200,
        threads=1,
    )
    client = stack.client()
    params = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "detokenize": False}
    streams = [client.submit(prompt, **params) for prompt in PROMPTS]
    for killed, num_outputs in zip(kills, (6, 14, 23), strict=False):
        stack.until(partial(has_read, streams, num_outputs))
        assert not are_over(streams)
        kill, start = (getattr(stack, f"{do}_{killed}") for do in ("kill", "start"))
        kill()
        for _ in range(5):
            stack.step()
        start()
    stack.until(partial(are_over, streams))
    return [it.token_ids for it in streams]


@pytest.mark.parametrize("kind", ["fp8", "int8_per_token_head"])
def test_streams_of_a_cache_of_8_bits_survive_core_and_worker(
    make_stack: Any, folder: Path, kind: str
) -> None:
    undisturbed = answers(make_stack, folder, kind, ())
    assert answers(make_stack, folder, kind, ("core", "worker", "core")) == undisturbed
    assert [len(each) for each in undisturbed] == [NUM_OUTPUTS] * len(PROMPTS)
    assert len({token for each in undisturbed for token in each}) > 20
    if kind == "fp8":  # 8 bits and a scale to each token and head choose the same ids here
        assert undisturbed != answers(make_stack, folder, "auto", ())
