"""Checkpoints packed by compressed-tensors itself are read as its own dequantisation reads them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream_core.model.quantised.compressed_tensors import (
    _group_of,
    _groups,
    read_compressed_tensors,
)
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors

SETTINGS = [
    *(
        ("pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": 32, **more})
        for bits in (2, 3, 4, 5, 6, 7, 8)
        for more in ({}, {"symmetric": False})
    ),
    *(
        (form, {"num_bits": bits, "symmetric": False, **more})
        for form in ("pack-quantized", "int-quantized", "naive-quantized")
        for bits in (4, 8)
        for more in (
            {"strategy": "channel"},
            {"strategy": "tensor"},
            {"strategy": "block", "block_structure": [32, 48]},
        )
    ),
    ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48]},
    ),
]


def _scales(weight: torch.Tensor, weights: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of random numbers, of the shape that a strategy has."""
    rows, columns = weight.shape
    match weights["strategy"]:
        case "group":
            shape: tuple[int, ...] = (rows, columns // 32)
        case "channel":
            shape = (rows, 1)
        case "block":
            shape = (-(-rows // 32), -(-columns // 48))
        case _:
            shape = (1,)
    most = 448.0 if weights.get("type") == "float" else float(1 << (weights["num_bits"] - 1))
    scale = (1 + torch.rand(shape)) / most
    half = 1 << (weights["num_bits"] - 1)
    zeros = torch.zeros(shape, dtype=torch.int8)
    if not weights.get("symmetric", True):
        zeros = torch.randint(-half, half, shape).to(torch.int8)
    return scale, zeros


@pytest.mark.parametrize("num_outputs", [64, 75])
@pytest.mark.parametrize(("form", "weights"), SETTINGS, ids=str)
def test_weights_are_those_of_the_package(
    form: str, weights: dict[str, Any], num_outputs: int, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    weight = torch.randn(num_outputs, 96)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    scale, zeros = _scales(weight, weights)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zeros}
    packed = compressor.compress(dict(given), scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"]
    named = {f"x.{name}": each.contiguous() for name, each in packed.items()}
    save_file(named, tmp_path / "model.safetensors")
    settings = {
        "format": form,
        "version": "0.20.0",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    found = read_compressed_tensors(Tensors(tmp_path), settings)["x.weight"].dequantised()
    assert torch.equal(found, expected.float())
    assert len(found.unique()) > 10 ** (weights["num_bits"] > 2)


def test_nvfp4_is_that_of_the_package_in_float32(tmp_path: Path) -> None:
    """Its own decompression rounds to bfloat16."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    torch.manual_seed(0)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor: Any = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    given = {
        "weight": torch.randn(75, 96),
        "weight_scale": 40 + 80 * torch.rand(75, 6),
        "weight_global_scale": torch.tensor([173.3]),
    }
    packed = compressor.compress(dict(given), scheme)
    expected = dequantize(
        unpack_fp4_from_uint8(packed["weight_packed"], 75, 96).float(),
        packed["weight_scale"].float(),
        args=args,
        dtype=torch.float32,
        global_scale=packed["weight_global_scale"],
    )
    named = {f"x.{name}": each.contiguous() for name, each in packed.items()}
    save_file(named, tmp_path / "model.safetensors")
    settings = {
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    found = read_compressed_tensors(Tensors(tmp_path), settings)["x.weight"].dequantised()
    assert torch.equal(found, expected)
    assert len(found.unique()) > 100


TARGETS = (
    "Linear",
    "down_proj",
    "lm_head",
    "mlp.down_proj",
    "re:.*down.*",
    "re:.*proj",
    "re:lm_head",
    "re:mlp",
)


@pytest.mark.parametrize("layer", ["lm_head", "mlp.down_proj", "mlp.up_proj"])
def test_targets_count_in_the_order_of_the_package(layer: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.utils.match import match_targets

    module = torch.nn.Linear(1, 1)
    for targets in permutations(TARGETS, 3):
        groups = {f"group_{each}": {"targets": [each], "weights": {}} for each in targets}
        found = match_targets(layer, module, dict.fromkeys(targets))
        if found:
            assert _group_of(layer, _groups({"config_groups": groups}))["targets"] == found[:1]
        else:
            with pytest.raises(QuantisedWeightError, match="no group of config_groups targets"):
                _group_of(layer, _groups({"config_groups": groups}))
