"""Quantised checkpoints: their parameters, tokens, memory, and what of damaged ones is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.quantised_models import (
    KINDS,
    PERMUTED,
    SMALL,
    Weights,
    change_config,
    change_tensors,
    plain_model,
    write_checkpoint,
)
from tests.helpers.torch_driver import BLOCK, Driver, Request, generate_by, prompts_of
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from slipstream.stack.settings import Quantization
from slipstream_core.forward.trace import OwnValue, trace
from slipstream_core.kernels.codes.coded_parameter import (
    CodedParameter,
    coded_parameters,
    dequantise_parameters,
    dequantised,
)
from slipstream_core.kernels.codes.online import ONLINE
from slipstream_core.kernels.cpu.coded_panels import panel_format
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.model.quantised.checkpoint import READERS, QuantisedTensors
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner

NUM_TOKENS = 10
PROMPTS = prompts_of(5, 23, 1, 12)
ALL = KINDS | PERMUTED


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype="float32", **settings)


def values_of(model: LoadedModel) -> Weights:
    return {
        name: each.matrix.dequantised() if isinstance(each, CodedParameter) else each.data
        for name, each in model.module.named_parameters()
    }


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


def logits(model: LoadedModel) -> list[torch.Tensor]:
    """The logits of one token and of seven, of a recorded forward in our kernels."""
    own = kernels()
    assert own is not None
    forward = trace(model.module, own, model.vocab_size)
    assert forward is not None
    found = []
    for num_tokens in (1, 7):
        positions = torch.arange(num_tokens)
        ids = (positions[None] * 31 + 1) % model.vocab_size
        with torch.inference_mode():
            found.append(forward(ids, positions[None], positions, OwnValue()))
    return found


@pytest.mark.parametrize("kind", ALL)
def test_parameters_and_tokens_are_those_of_the_dequantised_model(
    kind: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    means = write_checkpoint(tmp_path, *ALL[kind])
    model = load(tmp_path)
    found = values_of(model)
    for name, expected in means.items():
        assert torch.equal(found[name], expected), name
    expected_tokens = generate_by(plain_model(tmp_path, means), PROMPTS, NUM_TOKENS)
    assert served(model) == expected_tokens
    assert len({token for tokens in expected_tokens for token in tokens}) > 8


WIDENED = (
    *("ct w2a16", "ct w3a16", "ct w7a16", "gptq of 2", "gptq of 3", "gptq of 7"),
    *("mlx of 3", "gemma of 2", "bitnet"),
    *("ct nvfp4", "modelopt nvfp4", "auto-round nvfp4"),
)
"""Kinds whose codes or scales take a wider panel."""


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_stay_coded_in_the_memory_of_the_file(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KINDS[kind])
    model = load(tmp_path)
    coded = list(coded_parameters(model.module))
    assert len(coded) == 2 * 7 + 2
    assert all(panel_format(each.matrix.format) is not None for each in coded)
    if not kind.startswith(WIDENED):
        size = (tmp_path / "model.safetensors").stat().st_size
        assert sum(each.nbytes for each in coded) <= 1.08 * size
    others = [each for each in model.module.parameters() if not isinstance(each, CodedParameter)]
    own = sum(each.nbytes for each in coded if each.matrix.format.bits < 16)
    assert model.kept_bytes == own + sum(each.nbytes for each in others)


@pytest.mark.quick
@pytest.mark.skipif(kernels() is None, reason="there is no C compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_to_the_bit_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_checkpoint(tmp_path, *KINDS[kind])
    coded, plain = load(tmp_path), load(tmp_path)
    dequantise_parameters(plain.module)
    for one, other in zip(logits(coded), logits(plain), strict=True):
        assert torch.equal(one, other)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def merged(means: Weights) -> Weights:
    """The parameters of a model of experts, whose matrices a checkpoint has one by one."""
    found = {name: each for name, each in means.items() if ".experts." not in name}
    for layer in range(SMALL["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"

        def stacked(name: str, experts: str = experts) -> torch.Tensor:
            numbers = range(MIXTURE["num_experts"])
            return torch.stack([means[f"{experts}.{each}.{name}.weight"] for each in numbers])

        both = [stacked(name) for name in ("gate_proj", "up_proj")]
        found[f"{experts}.gate_up_proj"] = torch.cat(both, dim=1)
        found[f"{experts}.down_proj"] = stacked("down_proj")
    return found


@pytest.mark.skipif(kernels() is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    "kind",
    [
        "fp8 blocks",
        "ct w4a16",
        "ct nvfp4",
        "gptq symmetric",
        "awq",
        "bitsandbytes nf4",
        "modelopt int8",
    ],
)
def test_experts_stay_coded_and_compute_to_the_bit_what_dequantised_ones_do(
    kind: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    means = merged(write_checkpoint(tmp_path, *KINDS[kind], kind=Qwen3MoeConfig, **MIXTURE))
    coded, plain = load(tmp_path), load(tmp_path)
    own = {
        name: each
        for name, each in coded.module.named_parameters()
        if isinstance(each, CodedParameter)
    }
    assert sum(".experts." in name for name in own) == 2 * 2
    assert len(own) == 2 * (4 + 2) + 2
    for name, each in coded.module.named_parameters():
        found = dequantised(each) if isinstance(each, CodedParameter) else each
        assert torch.equal(found, means[name]), name
    size = (tmp_path / "model.safetensors").stat().st_size
    assert coded.kept_bytes <= (1.35 if kind == "ct nvfp4" else 1.08) * size
    dequantise_parameters(plain.module)
    for one, other in zip(logits(coded), logits(plain), strict=True):
        assert torch.equal(one, other)


def test_experts_of_several_formats_are_dequantised_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A zero in the middle of all is one of the format, another is one of each group."""
    settings, write = KINDS["awq"]

    def some(name: str, weight: torch.Tensor) -> Any:
        found, mean = write(name, weight)
        if "layers.1.mlp.experts.2.up_proj" in name:
            zeros = f"{name.removesuffix('.weight')}.qzeros"
            found[zeros] = torch.full_like(found[zeros], 0x88888888 - (1 << 32))
            return found, None
        return found, mean

    write_checkpoint(tmp_path, settings, some, kind=Qwen3MoeConfig, **MIXTURE)
    model = load(tmp_path)
    assert "the experts of 1 parameters are dequantised, those of model.layers.1" in caplog.text
    parameters = dict(model.module.named_parameters())
    kinds = {
        name: isinstance(each, CodedParameter)
        for name, each in parameters.items()
        if "experts" in name
    }
    assert kinds.pop("model.layers.1.mlp.experts.gate_up_proj") is False
    assert len(kinds) == 3
    assert all(kinds.values())


@pytest.mark.parametrize("kind", PERMUTED)
def test_groups_of_inputs_that_are_no_neighbours_are_dequantised_and_said(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, *PERMUTED[kind])
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert "14 matrices, model.layers.0" in caplog.text
    assert "their groups are not of neighbouring inputs (g_idx)" in caplog.text
    assert len(list(coded_parameters(model.module))) == 2  # embedding and head, of 16 bits


def test_formats_that_no_kernel_computes_with_are_dequantised_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A zero under a scale of float32 would round twice."""
    settings, write = KINDS["ct w4a16 with zeros"]

    def wide(name: str, weight: torch.Tensor) -> Any:
        found, mean = write(name, weight)
        return {
            each: tensor.float() if each.endswith("_scale") else tensor
            for each, tensor in found.items()
        }, mean

    means = write_checkpoint(tmp_path, settings, wide)
    model = load(tmp_path)
    assert "14 matrices, model.layers.0" in caplog.text
    assert "no kernel computes with int4_float32" in caplog.text
    assert len(list(coded_parameters(model.module))) == 2
    for name, values in values_of(model).items():
        assert torch.equal(values, means[name]), name
    others = [each for each in model.module.parameters() if not isinstance(each, CodedParameter)]
    assert model.kept_bytes == sum(each.nbytes for each in others)


@pytest.mark.parametrize("kind", ["ct w4a16", "gptq", "awq", "bitsandbytes nf4", "fp8 blocks"])
def test_another_type_is_computed_in_with_dequantised_weights(kind: str, tmp_path: Path) -> None:
    means = write_checkpoint(tmp_path, *KINDS[kind])
    model = load_model(str(tmp_path), device="cpu", dtype="bfloat16")
    assert not list(coded_parameters(model.module))
    for name, each in model.module.named_parameters():
        assert torch.equal(each, means[name].bfloat16()), name
    assert model.kept_bytes == sum(each.nbytes for each in model.module.parameters())


@pytest.mark.parametrize(
    ("file", "told", "kind"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "fp8 tensors"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
            "ct fp8 channels",
        ),
    ],
)
def test_settings_of_another_file(
    file: str, told: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    means = write_checkpoint(tmp_path, told, KINDS[kind][1], file=file)
    found = values_of(load(tmp_path))
    for name, expected in means.items():
        assert torch.equal(found[name], expected), name


def test_codes_stay_where_a_processor_multiplies_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the type of a checkpoint that is not quantised, and dequantise this one."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    write_checkpoint(tmp_path, *KINDS["ct w4a16"], tie_word_embeddings=False)
    change_config(tmp_path, lambda told: told.update(dtype="bfloat16"))
    module = load_model(str(tmp_path), device="cpu").module
    assert len(list(coded_parameters(module))) == 2 * 7 + 2
    change_config(tmp_path, lambda told: told.pop("quantization_config"))
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    assert load_model(str(tmp_path), device="cpu").module.dtype == torch.bfloat16
    online = load_model(str(tmp_path), device="cpu", quantization="q8_0").module
    assert {each.matrix.format.name for each in coded_parameters(online)} == {"q8_0"}


def test_its_own_method_may_be_named_and_no_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KINDS["awq"])
    load(tmp_path, quantization="awq")
    assert {*ONLINE, *READERS, "modelopt_fp4"} <= set(get_args(Quantization))
    for other in ("gptq", "q4_0", "modelopt_fp4"):
        with pytest.raises(ModelLoadError, match=f"is '{other}', but .* by 'awq' already"):
            load(tmp_path, quantization=other)


LAYER = "model.layers.1.mlp.up_proj"


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _with(name: str, change: Any) -> Any:
    def changed(tensors: Weights) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return changed


def _infinite(tensor: torch.Tensor) -> torch.Tensor:
    tensor.reshape(-1)[0] = torch.inf
    return tensor


def _nan_code(tensor: torch.Tensor) -> torch.Tensor:
    codes = tensor.view(torch.uint8).clone()
    codes[-1, -1] = 0x7F
    return codes.view(tensor.dtype)


DAMAGES = [
    ("fp8 blocks", _without(f"{LAYER}.weight_scale_inv"), "weight_scale_inv is missing"),
    ("fp8 blocks", _with(f"{LAYER}.weight_scale_inv", lambda x: x[:-1]), "allowed: [3, 2]"),
    ("fp8 blocks", _with(f"{LAYER}.weight_scale_inv", _infinite), "scale_inv has a number that is"),
    ("fp8 blocks", _with(f"{LAYER}.weight", _nan_code), "a weight that is not a finite number"),
    ("fp8 blocks", _with(f"{LAYER}.weight_scale_inv", torch.Tensor.int), "is of type I32, allowed"),
    ("fp8 tensors", _without(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("fp8 tensors", _with(f"{LAYER}.weight_scale", lambda x: x.repeat(3)), "allowed: one number"),
    ("ct w4a16", _without(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("ct w4a16", _without(f"{LAYER}.weight_packed"), f"{LAYER}.weight_packed is missing"),
    ("ct w4a16", _without(f"{LAYER}.weight_shape"), f"{LAYER}.weight_shape is missing"),
    ("ct w4a16", _with(f"{LAYER}.weight_scale", _infinite), "weight_scale has a number that is"),
    ("ct w4a16", _with(f"{LAYER}.weight_scale", lambda x: x[:, :-1]), "allowed: [192, 4]"),
    ("ct w4a16", _with(f"{LAYER}.weight_packed", lambda x: x[:, :-1]), "192 x 15 words, allowed"),
    ("ct w4a16", _with(f"{LAYER}.weight_shape", lambda x: x * 2), "allowed: 384 x 32"),
    ("ct w4a16", _with(f"{LAYER}.weight_shape", lambda x: -x), "allowed: two positive sizes"),
    ("ct w4a16 with zeros", _without(f"{LAYER}.weight_zero_point"), "zero_point is missing"),
    (
        "ct w4a16 with zeros",
        _with(f"{LAYER}.weight_zero_point", lambda x: x[:-1]),
        "weight_zero_point has 4 x 23 words",
    ),
    (
        "ct act-order",
        _with(f"{LAYER}.weight_g_idx", lambda x: x * 0),
        "not of 32 inputs each",
    ),
    ("ct act-order", _with(f"{LAYER}.weight_g_idx", lambda x: x + 1), "from 1 to 4, allowed: 0 to"),
    ("ct fp8 channels", _with(f"{LAYER}.weight_scale", lambda x: x.T), "allowed: one number, or"),
    ("ct int8", _with(f"{LAYER}.weight_scale", lambda x: x.T), "allowed: one number, or"),
    ("ct int8", _without(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("ct int8", _with(f"{LAYER}.weight", torch.Tensor.bfloat16), "is of type BF16, allowed: I8"),
    ("ct int8 with zeros", _without(f"{LAYER}.weight_zero_point"), "zero_point is missing"),
    ("ct mxfp4", _with(f"{LAYER}.weight_scale", lambda x: x | 255), "that is not finite"),
    ("gptq", _without(f"{LAYER}.scales"), f"{LAYER}.scales is missing"),
    ("gptq", _without(f"{LAYER}.qzeros"), f"{LAYER}.qzeros is missing"),
    ("gptq", _without(f"{LAYER}.qweight"), "lacks 1 of the weights"),
    ("gptq", _with(f"{LAYER}.qzeros", lambda x: x[:, :-1]), "qzeros has the shape [4, 23]"),
    ("gptq", _with(f"{LAYER}.scales", lambda x: x[:-1]), "allowed: [4, 192]"),
    ("gptq", _with(f"{LAYER}.scales", _infinite), "scales has a number that is not finite"),
    ("gptq", _with(f"{LAYER}.g_idx", lambda x: x[:-1]), "has 127 numbers, allowed: 128"),
    ("awq", _with(f"{LAYER}.scales", lambda x: x.double()), "is of type F64, allowed: F32"),
    ("awq", _with(f"{LAYER}.qweight", lambda x: x[:64]), "scales has the shape [4, 192], allowed"),
    ("ct nvfp4", _without(f"{LAYER}.weight_global_scale"), "weight_global_scale is missing"),
    (
        "ct nvfp4",
        _with(f"{LAYER}.weight_global_scale", lambda x: x * 0),
        "is 0.0, allowed: a finite",
    ),
    ("ct nvfp4", _with(f"{LAYER}.weight_scale", _nan_code), "a number that is not finite"),
    ("ct nvfp4", _with(f"{LAYER}.weight_scale", lambda x: x[:, :-1]), "allowed: [192, 8]"),
    ("modelopt nvfp4", _without(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("modelopt nvfp4", _without(f"{LAYER}.weight_scale_2"), "weight_scale_2 is missing"),
    (
        "modelopt nvfp4",
        lambda tensors: tensors.update({f"{LAYER}.pre_quant_scale": torch.ones(128)}),
        "inputs of a layer that are multiplied are not served",
    ),
    ("bitsandbytes int8", _without(f"{LAYER}.SCB"), f"{LAYER}.SCB is missing"),
    ("bitsandbytes int8", _with(f"{LAYER}.SCB", lambda x: x[:-1]), "allowed: [192]"),
    ("bitsandbytes int8", _with(f"{LAYER}.weight_format", lambda x: x + 1), "allowed: rows, which"),
    ("mlx", _without(f"{LAYER}.biases"), f"{LAYER}.qbiases is missing"),
    ("mlx", _with(f"{LAYER}.biases", torch.Tensor.half), "is of another type than"),
    ("mlx", _with(f"{LAYER}.scales", torch.Tensor.float), "is of type F32, allowed: BF16, F16"),
    ("gemma of 2 bits", _with(f"{LAYER}.weight_scale", _infinite), "that is not finite"),
    ("bitnet", _with(f"{LAYER}.weight", lambda x: x | 3), "none of -1, 0 and 1"),
    ("bitnet", _without(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
    ("bitsandbytes nf4", _without(f"{LAYER}.weight.absmax"), "weight.absmax is missing"),
    ("bitsandbytes nf4", _without(f"{LAYER}.weight.quant_map"), "quant_map is missing"),
    (
        "bitsandbytes nf4",
        _without(f"{LAYER}.weight.quant_state.bitsandbytes__nf4"),
        "quant_state.bitsandbytes__nf4 is missing",
    ),
    (
        "bitsandbytes nf4",
        _with(f"{LAYER}.weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1]),
        "bitsandbytes__nf4 is damaged",
    ),
    ("bitsandbytes nf4", _with(f"{LAYER}.weight", lambda x: x[:-1]), "allowed: 12288 for"),
    ("bitsandbytes nf4", _with(f"{LAYER}.weight.absmax", _infinite), "that is not finite"),
]


@pytest.mark.parametrize(("kind", "damage", "said"), DAMAGES)
def test_damaged_tensors_are_refused_by_name(
    kind: str, damage: Any, said: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *ALL[kind])
    change_tensors(tmp_path, damage)
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path)
    message = str(refused.value)
    assert said in message
    assert "\n" not in message


def _set(*path: str, to: Any) -> Any:
    def changed(told: dict[str, Any]) -> None:
        inner = told["quantization_config"]
        for each in path[:-1]:
            inner = inner[each]
        inner[path[-1]] = to

    return changed


GROUP_0 = ("config_groups", "group_0")
CONTRADICTIONS = [
    ("fp8 blocks", _set("weight_block_size", to=[64]), "allowed: two positive integers"),
    ("fp8 blocks", _set("weight_block_size", to=[64, 32]), "in blocks of 64 x 32"),
    ("fp8 blocks", _set("weight_block_size", to=None), "allowed: one number, or"),
    ("ct w4a16", _set("format", to="marlin-24"), "the format 'marlin-24', allowed: float-q"),
    ("ct w4a16", _set("format", to="nvfp4-pack-quantized"), "is of type I32, allowed: U8"),
    ("ct w4a16", _set("config_groups", to={}), "config_groups is {}, allowed"),
    ("ct w4a16", _set(*GROUP_0, "targets", to=["Conv2d"]), "no group of config_groups targets"),
    ("ct w4a16", _set(*GROUP_0, "targets", to=["re:("]), "'re:(' is no pattern"),
    ("ct w4a16", _set(*GROUP_0, "weights", "num_bits", to=8), "128 x 48 for 128 x 192 integers"),
    ("ct w4a16", _set(*GROUP_0, "weights", "num_bits", to=9), "num_bits 9, allowed: 1 to 8"),
    ("ct w4a16", _set(*GROUP_0, "weights", "group_size", to=64), "allowed: [128, 3]"),
    ("ct w4a16", _set(*GROUP_0, "weights", "group_size", to=80), "no whole number"),
    ("ct w4a16", _set(*GROUP_0, "weights", "group_size", to="a"), "allowed: a positive integer"),
    ("ct w4a16", _set(*GROUP_0, "weights", "strategy", to="attn_head"), "by 'attn_head', allowed"),
    ("ct w4a16", _set(*GROUP_0, "weights", "symmetric", to=False), "zero_point is missing"),
    ("ct w4a16", _set(*GROUP_0, "weights", "symmetric", to="no"), "symmetric 'no', allowed: true"),
    ("ct w4a16 with zeros", _set(*GROUP_0, "weights", "symmetric", to=True), "are symmetric"),
    ("ct w4a16", _set("sparsity_config", to={"format": "sparse-24-bitmask"}), "sparsity_config"),
    ("ct int8", _set(*GROUP_0, "weights", "type", to="float"), "is of type I8, allowed: F8_E4M3"),
    ("gptq", _set("bits", to=1), "bits is 1, allowed: 2 to 8"),
    ("gptq", _set("bits", to=[4]), "bits is [4], allowed: 2 to 8"),
    ("gptq", _set("checkpoint_format", to=["gptq"]), "is ['gptq'], allowed: gptq, gptq_v2"),
    ("gptq", _set("bits", to=8), "scales has the shape [6, 128], allowed: [3, 128]"),
    ("gptq", _set("group_size", to=80), "no whole number"),
    ("gptq", _set("group_size", to=0), "group_size is 0, allowed"),
    ("gptq", _set("checkpoint_format", to="marlin"), "is 'marlin', allowed: gptq, gptq_v2"),
    (
        "gptq",
        lambda config: config["quantization_config"].pop("quant_method"),
        'proj.qweight is not MLX\'s: if it is GPTQ\'s, add "quant_method": "gptq"',
    ),
    ("awq", _set("bits", to=8), "bits is 8, allowed: 4"),
    ("awq", _set("version", to="gemv"), "version is 'gemv', allowed: gemm"),
    ("bitsandbytes nf4", _set("load_in_4bit", to=False), "neither load_in_4bit nor load_in_8bit"),
    (
        "auto-round",
        _set("packing_format", to="auto_round:fake"),
        "'auto_round:fake', allowed: a",
    ),
    ("auto-round", _set("data_type", to="int_sym"), "data_type 'int_sym', allowed: int"),
    ("auto-round", _set("extra_config", to={"down_proj": {"bits": 8}}), "allowed: [3, 128]"),
    ("modelopt nvfp4", _set("quant_algo", to="NVFP4_AWQ"), "(NVFP4_AWQ), of which FP8, FP8_PB"),
    (
        "modelopt nvfp4",
        _set("quantized_layers", to={"x": {"quant_algo": "W4A16_AWQ"}}),
        "x is quantised by 'W4A16_AWQ', allowed: FP8",
    ),
    ("quark mxfp4", _set("global_quant_config", to={"weight": [{}, {}]}), "are quantised twice"),
    ("mlx", _set("bits", to=7), "has bits 7, allowed: 2, 3, 4, 5, 6, 8"),
    ("mlx", _set("group_size", to=32), "weight has the shape [128, 24], allowed: [128, 12]"),
    ("mlx", _set("mode", to="nvfp4"), "is quantised by 'nvfp4', allowed: affine, mxfp4"),
    ("mlx", _set("model.layers.0.mlp.up_proj", to=False), "the settings of model.layers.0.mlp.up_"),
    (
        "gemma of 4 bits",
        _set("module_quant_configs", to={"up": {"num_bits": 3}}),
        "num_bits 3, allo",
    ),
    ("bitnet", _set("quantization_mode", to="online"), "is 'online', allowed: offline"),
    ("bitnet", _set("use_rms_norm", to=True), "allowed: layers without norms"),
    ("bitnet", _set("linear_class", to="linear"), "is 'linear', allowed: autobitlinear, bitlinear"),
]


@pytest.mark.parametrize(("kind", "change", "said"), CONTRADICTIONS)
def test_settings_that_contradict_the_tensors_are_refused(
    kind: str, change: Any, said: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *KINDS[kind])
    change_config(tmp_path, change)
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path)
    message = str(refused.value)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_a_layout_that_nothing_tells_is_refused(bits: int, tmp_path: Path) -> None:
    """Rows of few integers take the same number of words either way."""
    from slipstream_core.model.quantised.compressed_tensors import _layout
    from slipstream_core.model.quantised.tensors import unpacked, unpacked_by_word

    sizes = [7, 2]
    for version, way in (("0.18.0", unpacked), ("0.17.1", unpacked_by_word)):
        assert _layout("x", 7, 1, bits, sizes, {"version": version}) is way
    with pytest.raises(QuantisedWeightError, match="names no version"):
        _layout("x", 7, 1, bits, sizes, {})


@pytest.mark.parametrize("shape", [(8,), (8, 1), (1, 8)])
def test_a_scale_for_each_row_is_none_of_a_row_of_as_many_blocks(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    scales = 2.0 ** torch.arange(8)
    tensors = {"x.weight": torch.ones(8, 1024).to(torch.float8_e4m3fn)}
    save_file(tensors | {"x.weight_scale": scales.reshape(shape)}, tmp_path / "model.safetensors")
    found = READERS["modelopt"](Tensors(tmp_path), {})["x.weight"].dequantised()
    by_row = scales[:, None].expand(8, 1024)
    by_block = scales.repeat_interleave(128).expand(8, 1024)
    assert torch.equal(found.float(), by_block if shape == (1, 8) else by_row)


def test_a_zero_that_borrows_from_its_neighbour_is_given_back(tmp_path: Path) -> None:
    """0x01010100, of the zeros 0, 1, 1 and 1, less 0x01010101 has all its bits."""
    written = write_checkpoint(tmp_path, *KINDS["gptq of 8 bits"])[f"{LAYER}.weight"]
    before = values_of(load(tmp_path))[f"{LAYER}.weight"]
    assert torch.equal(before, written)
    change_tensors(tmp_path, _with(f"{LAYER}.scales", torch.ones_like))
    change_tensors(tmp_path, _with(f"{LAYER}.qweight", torch.zeros_like))
    change_tensors(tmp_path, _with(f"{LAYER}.qzeros", lambda x: x | -1))
    found = values_of(load(tmp_path))[f"{LAYER}.weight"]
    assert torch.equal(found, -(torch.arange(192) % 4 > 0).float()[:, None].expand(192, 128))


def test_the_first_of_groups_that_targets_a_layer_tells_its_settings(tmp_path: Path) -> None:
    settings, write = KINDS["ct w4a16"]
    _, write_8 = KINDS["ct w8a16"]
    eight = KINDS["ct w8a16"][0]["config_groups"]["group_0"]
    groups = {
        "all": settings["config_groups"]["group_0"],
        "down": {**eight, "targets": ["re:.*down_proj$"]},
        "one": {**eight, "targets": ["model.layers.0.self_attn.q_proj"]},
    }

    def by_name(name: str, weight: torch.Tensor) -> Any:
        is_eight = "down_proj" in name or "layers.0.self_attn.q_proj" in name
        return (write_8 if is_eight else write)(name, weight)

    means = write_checkpoint(tmp_path, {**settings, "config_groups": groups}, by_name)
    model = load(tmp_path)
    for name, values in values_of(model).items():
        assert torch.equal(values, means[name]), name
    bits = {
        name: each.matrix.format.bits
        for name, each in model.module.named_parameters()
        if isinstance(each, CodedParameter)
    }
    assert bits["model.layers.0.self_attn.q_proj.weight"] == 8
    assert bits["model.layers.1.self_attn.q_proj.weight"] == 4
    assert bits["model.layers.1.mlp.down_proj.weight"] == 8


_LAST = torch.tensor([191])


def test_biases_of_gptq_that_are_zero_and_have_no_place_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for each layer, whatever the model has."""
    settings, write = KINDS["gptq"]

    def with_bias(name: str, weight: torch.Tensor) -> Any:
        found, mean = write(name, weight)
        bias = name.replace(".weight", ".bias")
        return {**found, bias: torch.zeros(len(weight), dtype=torch.float16)}, mean

    means = write_checkpoint(tmp_path, settings, with_bias)
    for name, values in values_of(load(tmp_path)).items():
        assert torch.equal(values, means[name]), name
    change_tensors(tmp_path, _with(f"{LAYER}.bias", lambda bias: bias.index_fill(0, _LAST, 1)))
    with pytest.raises(ModelLoadError, match=f"has 1 tensors .* no place for, {LAYER}.bias among"):
        load(tmp_path)


def test_biases_that_have_a_place_are_those_of_the_file(tmp_path: Path) -> None:
    settings, write = KINDS["gptq"]
    means = write_checkpoint(tmp_path, settings, write, attention_bias=True)
    change_tensors(tmp_path, _with("model.layers.1.self_attn.q_proj.bias", lambda x: x * 0 + 3))
    change_tensors(tmp_path, _with("model.layers.1.self_attn.k_proj.bias", lambda x: x * 0))
    found = values_of(load(tmp_path))
    assert (found["model.layers.1.self_attn.q_proj.bias"] == 3).all()
    assert (found["model.layers.1.self_attn.k_proj.bias"] == 0).all()
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(found[name], means[name])


DYNAMIC = {
    "-:.*lm_head": {},
    "+:.*layers\\.0\\..*down_proj": {"group_size": 96},
    ".*down_proj": {"bits": 8, "group_size": 64, "desc_act": False},
    "+:.*": {},
    "+:.*o_proj": {"bits": 2},
}


def test_layers_of_gptq_with_settings_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the first pattern that a layer matches."""
    from tests.helpers.quantised_models import gptq

    settings = KINDS["gptq"][0]

    def by_name(name: str, weight: torch.Tensor) -> Any:
        if "down_proj" not in name:
            return KINDS["gptq"][1](name, weight)
        return (gptq(4, group=96) if "layers.0." in name else gptq(8, group=64))(name, weight)

    means = write_checkpoint(tmp_path, {**settings, "dynamic": DYNAMIC}, by_name)
    for name, values in values_of(load(tmp_path)).items():
        assert torch.equal(values, means[name]), name


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"-:.*down_proj": {}}, "dynamic says that it is not quantised"),
        ({"+:(": {}}, "is no pattern"),
        ({".*": {"bits": 9}}, "bits is 9, allowed: 2 to 8"),
        ({".*": {"group_size": 0}}, "group_size is 0, allowed"),
        ({".*": 4}, "dynamic has 4 for '.*', allowed: settings"),
        ([".*"], "dynamic is ['.*'], allowed: patterns and their settings"),
    ],
)
def test_wrong_settings_of_layers_of_gptq_are_refused(
    dynamic: Any, said: str, tmp_path: Path
) -> None:
    settings, write = KINDS["gptq"]
    write_checkpoint(tmp_path, {**settings, "dynamic": dynamic}, write)
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        ("fp8 blocks", "model.norm.weight", torch.float8_e4m3fn),
        ("fp8 blocks", "model.embed_tokens.weight", torch.int8),
        ("gptq", "lm_head.weight", torch.float8_e4m3fn),
        ("bitsandbytes nf4", "lm_head.weight", torch.int8),
        ("ct w4a16", "model.embed_tokens.weight", torch.int32),
    ],
)
def test_weights_of_a_narrow_type_that_the_method_does_not_read_are_refused(
    kind: str, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *KINDS[kind])
    change_tensors(tmp_path, _with(name, lambda weight: weight.to(dtype)))
    with pytest.raises(ModelLoadError, match=f"{name}(_scale_inv is missing| is of type [FI])"):
        load(tmp_path)


def test_scales_of_the_inputs_of_experts_are_refused(tmp_path: Path) -> None:
    """Scales laid out for matrices [inputs, outputs], which may be square."""
    from safetensors.torch import save_file

    codes = torch.ones(4, 64, 64).to(torch.float8_e4m3fn)
    for shape in ([4, 1, 64], [4, 64], [4, 64, 1]):
        scale = torch.rand(shape)
        save_file({"up_proj": codes, "up_proj_scale": scale}, tmp_path / "model.safetensors")
        if shape == [4, 1, 64]:
            with pytest.raises(QuantisedWeightError, match="up_proj_scale has the shape"):
                QuantisedTensors(tmp_path, "fp8", {})
            continue
        found = QuantisedTensors(tmp_path, "fp8", {}).weights["up_proj"].dequantised()
        assert torch.equal(found, scale.reshape(4, 64, 1).expand(4, 64, 64))


def test_placeholders_are_never_equal(tmp_path: Path) -> None:
    """Transformers ties parameters that a file has both, if they are equal."""
    write_checkpoint(tmp_path, *KINDS["gptq"])
    tensors = QuantisedTensors(tmp_path, "gptq", KINDS["gptq"][0])
    tensors.keep_codes(lambda _: True)
    for for_slices in (False, True):
        state, _ = tensors.state_dict(for_slices=for_slices)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert state[name][...][0, 0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_bytes_of_bitsandbytes_in_another_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """bnb_4bit_quant_storage."""
    settings, write = KINDS["bitsandbytes nf4"]

    def stored(name: str, weight: torch.Tensor) -> Any:
        found, mean = write(name, weight)
        return {**found, name: found[name].reshape(-1).view(dtype)[:, None]}, mean

    means = write_checkpoint(tmp_path, settings, stored)
    for name, values in values_of(load(tmp_path)).items():
        assert torch.equal(values, means[name]), name


EIGHT = KINDS["ct w8a16"]
HEAD, DOWN = "lm_head", "down_proj"


@pytest.mark.parametrize(
    ("targets_of_four", "targets_of_eight", "is_eight", "first"),
    [
        (["Linear"], ["lm_head"], HEAD, "four"),
        (["Linear"], ["lm_head"], HEAD, "eight"),
        (["re:.*mlp.*", "Linear"], ["re:.*down_proj"], DOWN, "four"),
        (["re:.*mlp.*", "Linear"], ["re:.*down_proj"], DOWN, "eight"),
        (["re:model.*down_proj", "Linear"], ["re:.*down"], DOWN, "four"),
        (["re:.*down_proj", "Linear"], ["re:.*down_proj"], DOWN, "four"),
    ],
)
def test_groups_take_layers_as_the_package_gives_them(
    targets_of_four: list[str],
    targets_of_eight: list[str],
    is_eight: str,
    first: str,
    tmp_path: Path,
) -> None:
    """Names, then patterns in the order of the alphabet, then classes; of a target in two groups
    the group that comes last.
    """
    settings, write = KINDS["ct w4a16"]
    groups = {
        "four": settings["config_groups"]["group_0"] | {"targets": targets_of_four},
        "eight": EIGHT[0]["config_groups"]["group_0"] | {"targets": targets_of_eight},
    }
    groups = {first: groups.pop(first), **groups}

    def by_name(name: str, weight: torch.Tensor) -> Any:
        return (EIGHT[1] if is_eight in name else write)(name, weight)

    means = write_checkpoint(tmp_path, {**settings, "config_groups": groups}, by_name)
    if is_eight == HEAD:
        found, means["lm_head.weight"] = by_name("lm_head.weight", torch.ones(331, 128))

        def with_head(tensors: Weights) -> None:
            del tensors["lm_head.weight"]
            tensors.update(found)

        change_tensors(tmp_path, with_head)
    for name, values in values_of(load(tmp_path)).items():
        assert torch.equal(values, means[name]), name


@pytest.mark.parametrize("sizes", [(96, 64), (80, 64), (128, 256)])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_of_bitsandbytes_run_over_rows_ends(
    sizes: tuple[int, int], nested: bool, tmp_path: Path
) -> None:
    """A row of 96 inputs has one and a half blocks of 64."""
    from tests.helpers.quantised_models import bitsandbytes

    inputs, block = sizes
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write = bitsandbytes("nf4", block=block, nested=nested)
    means = write_checkpoint(tmp_path, settings, write, hidden_size=inputs)
    for name, values in values_of(load(tmp_path)).items():
        assert torch.equal(values, means[name]), name


def test_a_checkpoint_of_pytorch_files_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KINDS["gptq"])
    (tmp_path / "model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="has no safetensors files"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["ct w4a16 with zeros", "gptq", "fp8 blocks"])
def test_slices_of_ranks_stay_coded_unless_they_cut_through_groups(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, write = KINDS[kind]
    means = write_checkpoint(tmp_path, settings, write)
    method = settings["quant_method"]
    tensors = QuantisedTensors(tmp_path, method, settings)
    tensors.keep_codes(lambda _: True)
    state, placeholders = tensors.state_dict(for_slices=True)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = means[name]
    module = torch.nn.Module()
    slices = {
        "rows": (slice(64, 128), slice(0, 192)),
        "columns": (slice(0, 128), slice(64, 192)),
        "through": (slice(0, 128), slice(40, 120)),
    }
    for each, index in slices.items():
        module.register_parameter(each, torch.nn.Parameter(state[name][index], requires_grad=False))
    placeholders.replace(module)
    for each, index in slices.items():
        part = module.get_parameter(each)
        assert isinstance(part, CodedParameter) == (each != "through")
        values = part.matrix.dequantised() if isinstance(part, CodedParameter) else part
        assert torch.equal(values, expected[index])
    assert "inputs 40 to 120 are no whole groups of" in caplog.text
