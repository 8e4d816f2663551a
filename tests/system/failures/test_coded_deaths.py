"""Core and worker of a model with coded matrices die in mid-stream: the text stays the same, and is
that of the dequantised model in float32.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.helpers.quantised_models import KINDS, write_checkpoint

from slipstream_core.kernels.codes.coded_parameter import coded_parameters, dequantise_parameters
from slipstream_core.model.loader import load_model

PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(4)]
NUM_OUTPUTS = 30
CHECKPOINTS = {"gptq": "gptq", "compressed-tensors": "ct w4a16 with zeros"}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of bfloat16 whose answers wander."""
    folder = tmp_path_factory.mktemp("narrow")
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
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def dequantised(narrow: Path, folder: Path, quantization: str | None) -> Path:
    """The same model as a checkpoint of float32."""
    model = load_model(str(narrow), device="cpu", dtype="float32", quantization=quantization)
    assert list(coded_parameters(model.module))
    dequantise_parameters(model.module)
    config = transformers.AutoConfig.from_pretrained(narrow)
    config.__dict__.pop("quantization_config", None)
    wide: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wide.load_state_dict(model.module.state_dict())
    wide.save_pretrained(folder)
    return folder


def has_read(streams: list[Any], num_outputs: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num_outputs


def are_over(streams: list[Any]) -> bool:
    return all(it.is_over for it in streams)


@pytest.mark.parametrize("quantization", [None, "q8_0", "gptq", "compressed-tensors"])
def test_streams_of_coded_matrices_survive_core_and_worker(
    make_stack: Any, narrow: Path, tmp_path: Path, quantization: str | None
) -> None:
    torch.set_num_threads(1)
    if quantization in CHECKPOINTS:
        narrow = tmp_path / "narrow"
        write_checkpoint(narrow, *KINDS[CHECKPOINTS[quantization]])
    wide = dequantised(narrow, tmp_path / "wide", quantization)
    outputs = []
    for model, own, kills in (
        (wide, None, ()),
        (narrow, quantization, ()),
        (narrow, quantization, ("core", "worker", "core")),
    ):
        stack = make_stack(
            model=str(model),
            device="cpu",
            dtype="float32",
            quantization=own,
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
        outputs.append([it.token_ids for it in streams])
    assert outputs[0] == outputs[1] == outputs[2]
    assert [len(each) for each in outputs[0]] == [NUM_OUTPUTS] * len(PROMPTS)
    assert len({token for each in outputs[0] for token in each}) > 20
