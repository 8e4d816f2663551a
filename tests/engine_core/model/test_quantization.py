"""Quantised checkpoints beside transformers, which dequantises them with their own packages; and
what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.torch_driver import BLOCK, Driver, Request, prompts_of
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig

from slipstream_core.kernels.codes.coded_parameter import CodedParameter, coded_parameters
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.sharding.rank import Rank

Weights = dict[str, torch.Tensor]
NUM_TOKENS = 12
SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "pad_token_id": 0,
}
BLOCKS = 64  # FP8 weights have a scale for each square of this size


def llama() -> Any:
    return LlamaConfig(**SMALL)


def gpt_oss() -> Any:
    return GptOssConfig(**SMALL, sliding_window=11, num_local_experts=4, num_experts_per_tok=2)


def fp8(name: str, weight: torch.Tensor) -> Weights:
    if "_proj." not in name:
        return {name: weight}
    rows, columns = weight.shape
    squares = weight.float().reshape(rows // BLOCKS, BLOCKS, columns // BLOCKS, BLOCKS)
    scales = squares.abs().amax((1, 3)) / 448
    rounded = (squares / scales[:, None, :, None]).reshape(rows, columns)
    return {name: rounded.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def mxfp4(name: str, weight: torch.Tensor) -> Weights:
    """Experts of random blocks: whatever the bits are, they mean something."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}
    experts, inner, outer = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=generator)
    scales = torch.randint(120, 124, (experts, outer, inner // 32), generator=generator)
    return {f"{name}_blocks": blocks.byte(), f"{name}_scales": scales.byte()}


def compressed(name: str, weight: torch.Tensor) -> Weights:
    if "_proj." not in name:
        return {name: weight}
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    rounded = (weight.float() / scales).to(torch.float8_e4m3fn)
    return {name: rounded, f"{name}_scale": scales.bfloat16()}


NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {**NUMBERS, "strategy": "channel", "dynamic": False},
    "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True},
}
METHODS: dict[str, tuple[Callable[[], Any], Callable[..., Weights], dict[str, Any]]] = {
    "fp8": (
        llama,
        fp8,
        {"activation_scheme": "dynamic", "weight_block_size": [BLOCKS, BLOCKS]},
    ),
    "mxfp4": (
        gpt_oss,
        mxfp4,
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
    ),
    "compressed-tensors": (
        llama,
        compressed,
        {
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": GROUP},
        },
    ),
}
PACKAGES = {"fp8": "accelerate", "compressed-tensors": "compressed_tensors"}


def checkpoint(folder: Path, method: str) -> Path:
    """A small model's checkpoint, with its weights quantised by hand."""
    make, quantise, settings = METHODS[method]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make(), dtype=torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    found: Weights = {}
    for name, weight in load_file(file).items():
        found.update(quantise(name, weight))
    save_file(found, file, metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] = {"quant_method": method, **settings}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_transformers(method: str, tmp_path: Path) -> None:
    if (package := PACKAGES.get(method)) is not None:
        pytest.importorskip(package)
    torch.set_num_threads(1)
    folder = checkpoint(tmp_path / method, method)
    prompts = prompts_of(5, 23, 1, 12)
    config: Any = AutoConfig.from_pretrained(folder)
    config.quantization_config["dequantize"] = True
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    expected = [
        reference.float()
        .generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :]
        .tolist()
        for prompt in prompts
    ]
    model = load_model(str(folder), device="cpu", dtype="float32")
    assert {weight.dtype for weight in model.module.parameters()} == {torch.float32}
    coded = list(coded_parameters(model.module))
    assert len(coded) == (2 * 6 + 2 if method == "mxfp4" else 2 * 7 + 2)
    runner = TorchRunner(
        model,
        num_blocks=100,
        block_size=BLOCK,
        max_num_seqs=8,
        kernel_config=KernelConfig(threads=1),
    )
    requests = [Request(prompt, NUM_TOKENS) for prompt in prompts]
    Driver(runner, budget=16).run(requests)
    runner.close()
    assert [request.output for request in requests] == expected
    assert len({token for tokens in expected for token in tokens}) > 8


@pytest.mark.parametrize("method", ["aqlm", "exl3", "unheard-of"])
def test_a_method_that_is_not_served_is_refused_with_what_is(method: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(tmp_path), device="cpu")
    assert f"its weights are quantised by '{method}', which is not served" in str(refused.value)
    served = "auto-round, awq, bitnet, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gemma"
    assert served in str(refused.value)


def test_what_is_not_told_of_a_method_is_refused(tmp_path: Path) -> None:
    """MLX may change the weights of models that it does not leave as they are."""
    GptOssConfig(**SMALL).save_pretrained(tmp_path)
    for told, said in (
        (
            {"quantization_config": {"bits": 4}},
            "by a method that is not named, which is not served",
        ),
        (
            {"quantization": {"bits": 4, "group_size": 64}},
            "MLX, which may change .* 'gpt_oss'; se.*GPTQ",
        ),
    ):
        own = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(own | told))
        with pytest.raises(ModelLoadError, match=said):
            load_model(str(tmp_path), device="cpu")
        (tmp_path / "config.json").write_text(json.dumps(own))


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "INT4_AWQ"])
def test_an_algorithm_of_modelopt_that_is_not_served(algorithm: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(tmp_path), device="cpu")
    said = f"'modelopt' ({algorithm}, as hf_quant_config.json says), of which FP8, FP8_PB_WO"
    assert said in str(refused.value)


def test_a_method_that_another_file_names_and_is_not_served(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"quant_method": "aqlm"}))
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(tmp_path), device="cpu")
    assert "'aqlm' (as quantize_config.json says), which is not served" in str(refused.value)


def test_a_file_that_tells_of_the_cache_alone(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    told = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    assert load_model(str(tmp_path), device="cpu").vocab_size == SMALL["vocab_size"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_narrow_weights_without_a_method(dtype: torch.dtype, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].to(
        dtype
    )
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight of type .*8"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("location", ["input", "output"])
def test_rotations_of_activations(location: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "compressed-tensors")
    rotate(folder, location, "weight_input")
    with pytest.raises(ModelLoadError, match=f"rotates the {location} of layers"):
        load_model(str(folder), device="cpu")


def test_rotations_that_are_in_the_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "compressed-tensors")
    told = dict(load_model(str(folder), device="cpu").module.named_parameters())
    rotate(folder, "weight_input", "weight_output")
    for name, weight in load_model(str(folder), device="cpu").module.named_parameters():
        expected = told[name]
        if isinstance(expected, CodedParameter):
            assert isinstance(weight, CodedParameter)
            assert torch.equal(weight.matrix.dequantised(), expected.matrix.dequantised())
        else:
            assert torch.equal(weight, expected)


def rotate(folder: Path, *locations: str) -> None:
    """Have a checkpoint say that its layers are rotated in these places."""
    places = [{"targets": ["Linear"], "location": each} for each in locations]
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"]["transform_config"] = {
        "config_groups": {"v": {"type": "hadamard", "apply": places}}
    }
    (folder / "config.json").write_text(json.dumps(told))


def test_what_transformers_dequantises_is_not_cut_into_slices(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "mxfp4")
    with pytest.raises(ModelLoadError, match="set tensor_parallel_size to 1"):
        load_model(str(folder), device="cpu", rank=Rank(0, 2))
