"""Models of random weights: their shapes, what may be said of them, that they are served."""

from __future__ import annotations

import pytest
import torch

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import load_model
from slipstream_core.model.random_weights import is_random, random_config, random_module
from slipstream_core.model.tokenizer_file import find_tokenizer
from slipstream_core.runner.factory import load_runner

TINY = (
    "vocab_size=97,hidden_size=32,intermediate_size=48,num_hidden_layers=2,"
    "num_attention_heads=4,num_key_value_heads=2,head_dim=8"
)
EXPERTS = ",num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16"
SHAPES = {"qwen3-0.6b": "", "llama-3.1-8b": "", "qwen3-30b-a3b": EXPERTS}


def tiny(name: str) -> str:
    return f"random:{name},{TINY}{SHAPES[name]}"


@pytest.mark.parametrize(
    ("name", "millions"),
    # as the models' own pages have them: 0.6 B (of which 0.44 B are no embeddings), 8.03 B, 30.5 B
    [("qwen3-0.6b", 596), ("llama-3.1-8b", 8030), ("qwen3-30b-a3b", 30532)],
)
def test_shapes_have_the_published_number_of_weights(name: str, millions: int) -> None:
    with torch.device("meta"):
        module = random_module(
            random_config(f"random:{name}"), torch.bfloat16, torch.device("meta")
        )
    assert round(sum(p.numel() for p in module.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_is_loaded_without_a_file(name: str) -> None:
    model = load_model(tiny(name), device="cpu", dtype="bfloat16", max_model_len=64)
    assert model.name == tiny(name)
    assert (model.vocab_size, model.max_model_len) == (97, 64)
    assert model.eos_token_ids == ()
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert [layer.num_kv_heads for layer in model.geometry] == [2, 2]
    # a weight is as wide as it is to be, and no two layers are the same
    first, second = (layer.self_attn.q_proj.weight for layer in model.module.model.layers)
    assert 0.015 < float(first.detach().float().std()) < 0.025
    assert not torch.equal(first, second)


def test_the_same_string_is_the_same_model_whatever_was_drawn_before() -> None:
    first = load_model(tiny("qwen3-0.6b"), device="cpu").module.state_dict()
    before = torch.random.get_rng_state()
    second = load_model(tiny("qwen3-0.6b"), device="cpu").module.state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_runner_serves_it() -> None:
    model = tiny("llama-3.1-8b")  # bfloat16 where the processor has it, else float32
    config = CoreConfig(model=model, address="", device="cpu", dtype="float32", num_blocks=8)
    runner = load_runner(config)
    try:
        assert runner.info.vocab_size == 97
        assert runner.info.block_bytes == 16 * 2 * 2 * 2 * 8 * 4
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "random:gpt-5",
            "'gpt-5' is not a shape; allowed: qwen3-0.6b, llama-3.1-8b, qwen3-30b-a3b",
        ),
        ("random:", "'' is not a shape"),
        ("random:qwen3-0.6b,layers=2", "unknown option 'layers'; allowed: vocab_size"),
        ("random:qwen3-0.6b,rms_norm_eps=2", "unknown option 'rms_norm_eps'"),
        ("random:qwen3-0.6b,tie_word_embeddings=1", "unknown option"),
        ("random:qwen3-0.6b,head_dim=8,head_dim=8", "option 'head_dim' is given twice"),
        ("random:qwen3-0.6b,head_dim=0", "option 'head_dim' is '0'; allowed: a whole number"),
        ("random:qwen3-0.6b,head_dim=-1", "option 'head_dim' is '-1'"),
        ("random:qwen3-0.6b,head_dim=1e3", "option 'head_dim' is '1e3'"),
        ("random:qwen3-0.6b,head_dim", "option 'head_dim' is ''"),
        ("random:qwen3-0.6b,", "unknown option ''"),
    ],
)
def test_what_is_wrong_with_a_string_is_told(model: str, told: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        load_model(model, device="cpu")
    assert told in str(error.value)
    assert repr(model) in str(error.value)


def test_only_the_prefix_makes_it_random() -> None:
    assert is_random("random:qwen3-0.6b")
    assert not is_random("random")
    assert not is_random("./random:qwen3-0.6b")


def test_a_grammar_finds_no_tokenizer() -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        find_tokenizer("random:qwen3-0.6b")
