"""A core dies in mid-stream, again and again: another one computes keys and values anew, also of
8 bits, and tokens and log-probabilities stay the same, to the bit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(4)]
NUM_OUTPUTS = 120

Answers = list[tuple[list[int], bytes]]  # ids, and float32 log-probabilities of all candidates


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


def answers(make_stack: Any, folder: Path, kind: str, kills: dict[int, str]) -> Answers:
    """Answers to all prompts. kills: what dies, by the tokens that the longest answer has then."""
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
    params = {
        "max_tokens": NUM_OUTPUTS,
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 3,
    }
    streams = [client.submit(prompt, **params) for prompt in PROMPTS]
    for num_outputs, killed in kills.items():
        stack.until(partial(has_read, streams, num_outputs))
        assert not are_over(streams)
        kill, start = (getattr(stack, f"{do}_{killed}") for do in ("kill", "start"))
        kill()
        for _ in range(5):
            stack.step()
        start()
    stack.until(partial(are_over, streams))
    return [(it.token_ids, bytes(it.logprobs)) for it in streams]


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8_per_token_head"])
def test_streams_survive_core_and_worker_to_the_bit(
    make_stack: Any, folder: Path, kind: str
) -> None:
    undisturbed = answers(make_stack, folder, kind, {})
    kills = {6: "core", 14: "worker", 23: "core", 61: "core", 97: "core"}
    assert answers(make_stack, folder, kind, kills) == undisturbed
    ids = [each for each, _ in undisturbed]
    assert [len(each) for each in ids] == [NUM_OUTPUTS] * len(PROMPTS)
    assert len({token for each in ids for token in each}) > 20
    if kind == "fp8":  # 8 bits and a scale to each token and head choose the same ids here
        assert ids != [each for each, _ in answers(make_stack, folder, "auto", {})]
