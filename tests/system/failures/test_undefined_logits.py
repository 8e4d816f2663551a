"""A model whose logits are not numbers for some tokens: the requests that reach these end with an
error that says so, once, also over a core's death; others are as if they were alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream_lab.models import tiny_models

PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(4)]
NUM_OUTPUTS = 24
KINDS = ["dense", "LFM2"]


@pytest.fixture(scope="module", params=KINDS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers wander."""
    folder = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    if request.param == "dense":
        config = transformers.AutoConfig.for_model(
            "qwen3",
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.15,
            tie_word_embeddings=False,
            max_position_embeddings=512,
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        [tiny] = (each for each in tiny_models.HYBRIDS if each.name == request.param)
        tiny_models.save(tiny, folder)
    return folder


def with_undefined(sound: Path, folder: Path, token: int) -> Path:
    """The same model, which says nothing that is a number once this token is behind."""
    folder.mkdir()
    for each in sound.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    weights = load_file(folder / "model.safetensors")
    [name] = (each for each in weights if each.endswith("embed_tokens.weight"))
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights[name].clone()
        config = transformers.AutoConfig.from_pretrained(folder)
        config.tie_word_embeddings = False
        config.save_pretrained(folder)
    weights[name][token] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def are_over(streams: list[Any]) -> bool:
    return all(it.is_over for it in streams)


def has_read(streams: list[Any], num_outputs: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num_outputs


def streams_of(make_stack: Any, folder: Path, kills: tuple[int, ...] = (), **params: Any) -> Any:
    torch.set_num_threads(1)
    stack = make_stack(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=4,
        num_blocks=200,
        threads=1,
    )
    client = stack.client()
    params = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "detokenize": False} | params
    streams = [client.submit(prompt, **params) for prompt in PROMPTS]
    for num_outputs in kills:
        stack.until(partial(has_read, streams, num_outputs))
        stack.kill_core()
        for _ in range(5):
            stack.step()
        stack.start_core()
    stack.until(partial(are_over, streams))
    return streams


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 1}])
def test_streams_end_where_logits_are_not_numbers(
    make_stack: Any, sound: Path, tmp_path: Path, params: dict[str, Any]
) -> None:
    answers = [it.token_ids for it in streams_of(make_stack, sound, **params)]
    behind = 9
    token = answers[2][behind - 1]
    folder = with_undefined(sound, tmp_path / "undefined", token)
    for kills in ((), (4, 16)):
        streams = streams_of(make_stack, folder, kills, **params)
        is_sound = []
        for prompt, answer, it in zip(PROMPTS, answers, streams, strict=True):
            ids = [*prompt, *answer]
            is_sound.append(token not in ids[:-1])
            if is_sound[-1]:
                assert it.token_ids == answer
                assert it.end.reason == "length"
                continue
            num = max(ids.index(token) + 1 - len(prompt), 0)
            assert it.token_ids == answer[:num]
            assert it.end.reason == "error"
            assert it.end.fault.code == "engine"
            assert f"behind {num} tokens of the answer" in it.end.fault.message
            assert "not numbers" in it.end.fault.message
            assert "weights" in it.end.fault.message
        assert True in is_sound
        assert not is_sound[2]
