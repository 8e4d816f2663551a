"""GGUF files answer with the tokens that transformers generates from what their blocks mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers.gguf_models import FAMILIES, TYPES, WIDE, make_model, write_gguf
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
    own = dict(loaded.module.named_parameters())
    for name, parameter in model.named_parameters():
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


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen3moe", "gpt-oss", "glm4"])
def test_transforms_apply_to_blocks(family: str, tmp_path: Path) -> None:
    kind = "MXFP4" if family == "gpt-oss" else "Q8_0"
    model = make_model(family)
    check(write_gguf(tmp_path / "x.gguf", family, model, kind), model, tmp_path / "cache")
