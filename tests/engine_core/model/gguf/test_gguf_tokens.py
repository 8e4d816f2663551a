"""GGUF files answer with the tokens that transformers generates from what their blocks mean."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.helpers.gguf_models import (
    FAMILIES,
    SCALED,
    TYPES,
    WIDE,
    make_model,
    weights_of,
    write_gguf,
    write_tokenizer,
)
from tests.helpers.torch_driver import BLOCK, Driver, Request, generate_by, prompts_of
from transformers import PreTrainedModel

from slipstream_core.kernels.codes.coded_parameter import CodedParameter, dequantised
from slipstream_core.model.gguf.folder import unfold
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner

NUM_TOKENS = 10
PROMPTS = prompts_of(5, 23, 1, 40)


def generated(model: PreTrainedModel) -> list[list[int]]:
    reference = type(model)(model.config)
    reference.load_state_dict(model.state_dict())
    reference.eval().set_attn_implementation("eager")
    return generate_by(reference, PROMPTS, NUM_TOKENS)


def served(model: LoadedModel) -> list[list[int]]:
    runner = TorchRunner(
        model,
        num_blocks=100,
        block_size=BLOCK,
        max_num_seqs=8,
        kernel_config=KernelConfig(threads=1),
    )
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=16).run(requests)
    runner.close()
    return [request.output for request in requests]


def check(file: Path, model: PreTrainedModel, cache: Path) -> None:
    torch.set_num_threads(1)
    loaded = load_model(
        str(unfold(file, cache=cache)), device="cpu", dtype="float32", max_model_len=256
    )
    own = weights_of(loaded.module)
    for name, parameter in weights_of(model).items():
        values = own[name]
        if isinstance(values, CodedParameter):
            values = dequantised(values)
        assert torch.equal(parameter, values), name
    expected = generated(model)
    assert served(loaded) == expected
    # with tied embeddings, random models repeat themselves
    least = 4 if model.config.tie_word_embeddings else 8
    assert len({token for tokens in expected for token in tokens}) > least


@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_computes_as_transformers_does(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    check(write_gguf(tmp_path / "x.gguf", family, model), model, tmp_path / "cache")


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "F32"])
def test_each_type_computes_as_its_dequantised_model(kind: str, tmp_path: Path) -> None:
    model = make_model("qwen3", **WIDE)
    check(write_gguf(tmp_path / "x.gguf", "qwen3", model, kind), model, tmp_path / "cache")


@pytest.mark.parametrize(("family", "kind"), [("qwen3moe", "Q4_0"), ("gpt-oss", "MXFP4")])
def test_experts_keep_the_codes_of_the_file(family: str, kind: str, tmp_path: Path) -> None:
    model = make_model(family)
    file = write_gguf(tmp_path / "x.gguf", family, model, kind)
    folder = unfold(file, cache=tmp_path / "cache")
    loaded = load_model(str(folder), device="cpu", dtype="float32", max_model_len=256)
    experts = [each for each in loaded.module.parameters() if each.ndim == 3]
    assert experts
    for each in experts:
        assert isinstance(each, CodedParameter)
        assert each.matrix.format.name == kind.lower()
        assert 4 * each.nbytes < each.numel() * 4


def test_matrices_keep_the_codes_of_the_file(tmp_path: Path) -> None:
    model = make_model("llama 3.1")
    file = write_gguf(tmp_path / "x.gguf", "llama 3.1", model, "Q4_0")
    folder = unfold(file, cache=tmp_path / "cache")
    loaded = load_model(str(folder), device="cpu", dtype="float32", max_model_len=256)
    own = dict(loaded.module.named_parameters())
    matrices = {name for name, parameter in own.items() if parameter.ndim == 2}
    assert {name for name in own if isinstance(own[name], CodedParameter)} == matrices
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight
    assert sum(own[name].nbytes for name in matrices) < file.stat().st_size < 4 * loaded.kept_bytes


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma3", "phi3", "qwen3moe", "gpt-oss", "glm4"),
        *("granitemoe", "deepseek2", "qwen3next", "qwen35"),
    ],
)
def test_transforms_apply_to_blocks(family: str, tmp_path: Path) -> None:
    kind = "MXFP4" if family == "gpt-oss" else "Q8_0"
    model = make_model(family)
    check(write_gguf(tmp_path / "x.gguf", family, model, kind), model, tmp_path / "cache")


def test_what_falcon_h1_multiplies_by_is_in_its_weights(tmp_path: Path) -> None:
    """The converter folds each factor into the matrix before or behind it."""
    scaled = make_model("falcon-h1", **SCALED)
    model = make_model("falcon-h1")
    model.load_state_dict(scaled.state_dict())
    config = scaled.config
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    parts = torch.repeat_interleave(
        torch.tensor(config.ssm_multipliers),
        torch.tensor([inner, inner, state, state, config.mamba_n_heads]),
    )
    queries = config.attention_in_multiplier
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "q_proj": queries,
        "k_proj": queries * config.key_multiplier,
        "v_proj": queries,
        "o_proj": config.attention_out_multiplier,
        "mamba.in_proj": config.ssm_in_multiplier * parts[:, None],
        "mamba.out_proj": config.ssm_out_multiplier,
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for of, factor in factors.items():
                if name.endswith(f"{of}.weight"):
                    weight.mul_(factor)
    assert generated(model) == generated(scaled)
    check(write_gguf(tmp_path / "x.gguf", "falcon-h1", model), model, tmp_path / "cache")


def test_blocks_that_draft_are_left_out(tmp_path: Path) -> None:
    model = make_model("glm4moe")
    drafting = model.config.num_hidden_layers

    def draft(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        writer.add_block_count(drafting + 1)
        writer.add_nextn_predict_layers(1)
        for name in ("attn_q", "nextn.eh_proj", "nextn.shared_head_norm"):
            writer.add_tensor(f"blk.{drafting}.{name}.weight", np.zeros((4, 32), np.float32))

    file = write_gguf(tmp_path / "x.gguf", "glm4moe", model, extra=draft)
    check(file, model, tmp_path / "cache")


def test_keys_of_blocks_that_use_those_of_others_are_left_out(tmp_path: Path) -> None:
    """Gemma's checkpoints have them, and transformers ignores them."""
    model = make_model("gemma4")
    last = model.config.num_hidden_layers - 1

    def keyed(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            writer.add_tensor(f"blk.{last}.{name}.weight", np.zeros((64, 64), np.float32))

    file = write_gguf(tmp_path / "x.gguf", "gemma4", model, extra=keyed)
    check(file, model, tmp_path / "cache")


def test_blocks_of_nemotron_are_what_their_tensors_are(tmp_path: Path) -> None:
    """With transformers 5 the converter says that an MLP has no width."""
    model = make_model("nemotron_h")

    def narrow(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer)
        writer.add_feed_forward_length([0] * model.config.num_hidden_layers)

    file = write_gguf(tmp_path / "x.gguf", "nemotron_h", model, extra=narrow)
    check(file, model, tmp_path / "cache")
