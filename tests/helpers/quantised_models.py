"""Quantised checkpoints of a tiny model, written from the formats' published definitions.

A writer takes the name and the numbers of one matrix and returns the tensors of its file and the
numbers that these mean, in float32. Codes, zeros and scales are drawn: whatever they are, they mean
something.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

Weights = dict[str, torch.Tensor]
Written = tuple[Weights, torch.Tensor]

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
GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def _scales(name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """About what makes random integers of 4 bits weights of a model; of both signs, as the mean
    of few integers is not zero.
    """
    some = 0.01 + 0.02 * torch.rand(shape, generator=_generator(name))
    return (some * (torch.rand(shape, generator=_generator(name)) - 0.5).sign()).to(dtype)


def _integers(name: str, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=_generator(name), dtype=torch.int64)


def _spread(numbers: torch.Tensor, rows: int, columns: int, height: int, width: int) -> Any:
    """A number of each block, at each place."""
    return numbers.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]


def pack_words(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of integers in words of 32 bits, the lowest bits first, over the borders of words."""
    rows = []
    for row in integers.tolist():
        whole = sum(value << bits * place for place, value in enumerate(row))
        num_words = -(-bits * len(row) // 32)
        rows.append(np.frombuffer(whole.to_bytes(4 * num_words, "little"), "<i4").copy())
    return torch.from_numpy(np.stack(rows))


def pack_whole(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """The same, where each word has whole integers."""
    each = 32 // bits
    rows = []
    for row in integers.tolist():
        parts = [row[first : first + each] for first in range(0, len(row), each)]
        words = [sum(value << bits * place for place, value in enumerate(part)) for part in parts]
        rows.append(np.array(words, np.uint32).view(np.int32))
    return torch.from_numpy(np.stack(rows))


def float8(
    block: tuple[int, int] | None = None,
    *,
    end: str = "weight_scale",
    by_row: bool = False,
    narrow: torch.dtype = torch.float8_e4m3fn,
    of_scales: torch.dtype = torch.float32,
) -> Callable[[str, torch.Tensor], Written]:
    """Numbers of 8 bits with one scale, with one for each row, or for each block."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        codes = (weight.float() * 100).to(narrow)
        if block is not None:
            height, width = block
            shape = (-(-rows // height), -(-columns // width))
            scale = _scales(name, *shape, dtype=of_scales)
            whole = _spread(scale.float(), rows, columns, height, width)
        else:
            scale = _scales(name, *((rows, 1) if by_row else ()), dtype=of_scales)
            whole = scale.float()
        layer = name.removesuffix(".weight")
        return {name: codes, f"{layer}.{end}": scale}, codes.float() * whole

    return write


def packed_integers(
    bits: int, *, group: int | None, symmetric: bool, whole: bool = False, ordered: bool = False
) -> Callable[[str, torch.Tensor], Written]:
    """compressed-tensors' pack-quantized. whole: as before its release 0.18. ordered: with a
    group for each input that is not its neighbour's.
    """

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        layer, size = name.removesuffix(".weight"), group or columns
        high, pack = (1 << bits) - 1, pack_whole if whole else pack_words
        codes = _integers(name, 0, high, rows, columns)
        scale = _scales(name, rows, columns // size, dtype=torch.bfloat16) * 16 / (high + 1)
        found = {
            f"{layer}.weight_packed": pack(codes, bits),
            f"{layer}.weight_scale": scale,
            f"{layer}.weight_shape": torch.tensor([rows, columns]),
        }
        zeros = torch.full((rows, columns // size), 1 << (bits - 1))
        if not symmetric:
            zeros = _integers(name[::-1] + "z", 0, high, rows, columns // size)
            packed = pack(zeros.T.contiguous(), bits).T.contiguous()
            found[f"{layer}.weight_zero_point"] = packed
        group_of = torch.arange(columns) // size
        if ordered:
            group_of = group_of[torch.randperm(columns, generator=_generator(name))]
            found[f"{layer}.weight_g_idx"] = group_of.int()
        mean = (codes - zeros[:, group_of]).float() * scale.float()[:, group_of]
        return found, mean

    return write


def integers_of_bytes(
    *, symmetric: bool = True, group: int | None = None
) -> Callable[[str, torch.Tensor], Written]:
    """compressed-tensors' int-quantized."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        size = group or columns
        codes = _integers(name, -128, 127, rows, columns).to(torch.int8)
        scale = _scales(name, rows, columns // size, dtype=torch.bfloat16) / 16
        found = {name: codes, f"{name}_scale": scale}
        mean = codes.float()
        if not symmetric:
            zeros = _integers(name + "z", -128, 127, rows, columns // size).to(torch.int8)
            found[f"{name}_zero_point"] = zeros
            mean = mean - _spread(zeros.float(), rows, columns, 1, size)
        return found, mean * _spread(scale.float(), rows, columns, 1, size)

    return write


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(name: str, weight: torch.Tensor) -> Written:
    rows, columns = weight.shape
    layer = name.removesuffix(".weight")
    codes = _integers(name, 0, 15, rows, columns)
    exponents = _integers(name + "s", 119, 122, rows, columns // 32)
    found = {
        f"{layer}.weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).byte(),
        f"{layer}.weight_scale": exponents.byte(),
    }
    scale = torch.exp2(exponents.float() - 127)
    return found, _FP4[codes] * _spread(scale, rows, columns, 1, 32)


def nvfp4(*, is_divided: bool) -> Callable[[str, torch.Tensor], Written]:
    """NVFP4 as compressed-tensors has it, whose number for the whole divides, or as ModelOpt has
    it.
    """

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        layer = name.removesuffix(".weight")
        codes = _integers(name, 0, 15, rows, columns)
        narrow = (200 * _scales(name, rows, columns // 16, dtype=torch.float32)).to(
            torch.float8_e4m3fn
        )
        whole = torch.tensor([173.3 if is_divided else 1 / 191.7])
        scale = narrow.float() / whole if is_divided else narrow.float() * whole
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).byte()
        ends = ("_packed", "_scale", "_global_scale") if is_divided else ("", "_scale", "_scale_2")
        parts = (pairs, narrow, whole if is_divided else whole[0])
        found = {f"{layer}.weight{end}": part for end, part in zip(ends, parts, strict=True)}
        found[f"{layer}.input_{'global_' * is_divided}scale"] = torch.ones(1)
        return found, _FP4[codes] * _spread(scale, rows, columns, 1, 16)

    return write


def modelopt_fp8_blocks(name: str, weight: torch.Tensor) -> Written:
    """FP8_PB_WO: scales [N / 128, 1, K / 128, 1]."""
    found, mean = float8((128, 128))(name, weight)
    scale = found[f"{name}_scale"]
    return {**found, f"{name}_scale": scale[:, None, :, None].contiguous()}, mean


def modelopt_mxfp4(name: str, weight: torch.Tensor) -> Written:
    """MXFP4 as ModelOpt and Quark have it."""
    found, mean = mxfp4(name, weight)
    return {each.replace("_packed", ""): part for each, part in found.items()}, mean


def mlx_mxfp4(name: str, weight: torch.Tensor) -> Written:
    """MXFP4 in MLX's words."""
    found, mean = mxfp4(name, weight)
    layer = name.removesuffix(".weight")
    words = found[f"{layer}.weight_packed"].view(torch.uint32)
    return {name: words, f"{layer}.scales": found[f"{layer}.weight_scale"]}, mean


def mlx(bits: int, group: int, dtype: torch.dtype, end: str = "biases") -> Any:
    """MLX's layout: words of integers, and an offset for each group."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        layer = name.removesuffix(".weight")
        codes = _integers(name, 0, (1 << bits) - 1, rows, columns)
        scale = _scales(name, rows, columns // group, dtype=dtype) * 16 / (1 << bits)
        bias = (-scale.float() * ((1 << bits) // 2) * 1.07).to(dtype)
        found = {
            name: pack_words(codes, bits).view(torch.uint32),
            f"{layer}.scales": scale,
            f"{layer}.{end}": bias,
        }
        wide = (_spread(each.float(), rows, columns, 1, group) for each in (scale, bias))
        factor, offset = wide
        return found, codes.float() * factor + offset

    return write


def bytes_of_rows(name: str, weight: torch.Tensor) -> Written:
    """bitsandbytes' 8 bits."""
    rows, columns = weight.shape
    codes = _integers(name, -128, 127, rows, columns).to(torch.int8)
    largest = 0.2 + 0.2 * torch.rand(rows, generator=_generator(name))
    layer = name.removesuffix(".weight")
    found = {name: codes, f"{layer}.SCB": largest}
    found[f"{layer}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return found, codes.float() * (largest * torch.tensor(7.874015718698502e-3))[:, None]


def gemma(bits: int) -> Callable[[str, torch.Tensor], Written]:
    """Google's layout: integers in bytes, neighbours side by side."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        half, each = 1 << (bits - 1), 8 // bits
        codes = _integers(name, -half, half - 1, rows, columns)
        scale = _scales(name, rows, 1, dtype=torch.float32) * 16 / (1 << bits)
        places = (codes + half).reshape(rows, -1, each) << bits * torch.arange(each)
        packed = codes.to(torch.int8) if bits == 8 else places.sum(-1).byte()
        layer = name.removesuffix(".weight")
        found = {name: packed, f"{layer}.weight_scale": scale}
        found |= {f"{layer}.{end}put_activation_scale": torch.tensor(0.0) for end in ("in", "out")}
        return found, codes.float() * scale

    return write


def bitnet(*, is_inverse: bool) -> Callable[[str, torch.Tensor], Written]:
    """transformers' layout of weights that are -1, 0 and 1."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        codes = _integers(name, -1, 1, rows, columns)
        quarters = (codes + 1).reshape(4, rows // 4, columns)
        packed = (quarters << torch.arange(0, 8, 2)[:, None, None]).sum(0).byte()
        scale = torch.tensor([7.03 if is_inverse else 0.142]).bfloat16()
        mean = codes.float() * (1 / scale.float() if is_inverse else scale.float())
        return {name: packed, f"{name}_scale": scale}, mean

    return write


def mxfp8(name: str, weight: torch.Tensor, end: str = "_scale") -> Written:
    rows, columns = weight.shape
    codes = (weight.float() * 100).to(torch.float8_e4m3fn)
    exponents = _integers(name, 119, 122, rows, columns // 32)
    scale = torch.exp2(exponents.float() - 127)
    found = {name: codes, f"{name}{end}": exponents.byte()}
    return found, codes.float() * _spread(scale, rows, columns, 1, 32)


def gptq(
    bits: int,
    *,
    group: int | None,
    is_first: bool = True,
    ordered: bool = False,
    symmetric: bool = False,
) -> Callable[[str, torch.Tensor], Written]:
    """GPTQ's layout. In its first version words of zeros are less by a one in each place, which a
    zero of 0 borrows from its neighbour (GPTQModel's convert_gptq_v2_to_v1_format_module).
    """

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        layer, size = name.removesuffix(".weight"), group or columns
        codes = _integers(name, 0, (1 << bits) - 1, columns, rows)  # inputs first
        zeros = _integers(name + "z", 0, (1 << bits) - 1, columns // size, rows)
        if symmetric:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        packed = pack_words(zeros, bits)
        if is_first and not 32 % bits:
            packed = packed - sum(1 << bits * place for place in range(32 // bits))
        elif is_first:
            packed = pack_words(zeros - 1 & (1 << bits) - 1, bits)
        scale = _scales(name, columns // size, rows, dtype=torch.float16) * 16 / (1 << bits)
        group_of = torch.arange(columns) // size
        if ordered:
            group_of = group_of[torch.randperm(columns, generator=_generator(name))]
        found = {
            f"{layer}.qweight": pack_words(codes.T.contiguous(), bits).T.contiguous(),
            f"{layer}.qzeros": packed,
            f"{layer}.scales": scale,
            f"{layer}.g_idx": group_of.int(),
        }
        mean = (codes - zeros[group_of]).float() * scale.float()[group_of]
        return found, mean.T.contiguous()

    return write


def awq(group: int) -> Callable[[str, torch.Tensor], Written]:
    """AWQ's layout: eight outputs in a word, the even ones first."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        layer = name.removesuffix(".weight")
        codes = _integers(name, 0, 15, columns, rows)
        zeros = _integers(name + "z", 0, 15, columns // group, rows)
        scale = _scales(name, columns // group, rows, dtype=torch.float16)

        def packed(integers: torch.Tensor) -> torch.Tensor:
            eight = integers.reshape(len(integers), -1, 8)[:, :, _AWQ_ORDER]
            return pack_words(eight.reshape(len(integers), -1), 4)

        found = {
            f"{layer}.qweight": packed(codes),
            f"{layer}.qzeros": packed(zeros),
            f"{layer}.scales": scale,
        }
        group_of = torch.arange(columns) // group
        mean = (codes - zeros[group_of]).float() * scale.float()[group_of]
        return found, mean.T.contiguous()

    return write


def bitsandbytes(
    kind: str, *, block: int = 64, nested: bool = False
) -> Callable[[str, torch.Tensor], Written]:
    """bitsandbytes' 4 bits, with a table of its own."""

    def write(name: str, weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        table = torch.linspace(-1, 1, 16) ** 3 + 0.01 * torch.rand(16, generator=_generator(kind))
        codes = _integers(name, 0, 15, rows * columns)
        num_blocks = -(-rows * columns // block)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": [rows, columns],
        }
        found = {
            name: (codes[::2] << 4 | codes[1::2]).byte()[:, None],
            f"{name}.quant_map": table,
        }
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.31}
            inner = torch.rand(256, generator=_generator(kind + "n")).sort().values * 2 - 1
            outer = 0.1 * torch.rand(-(-num_blocks // 256), generator=_generator(name + "n"))
            picked = _integers(name + "a", 0, 255, num_blocks)
            found |= {
                f"{name}.absmax": picked.byte(),
                f"{name}.nested_absmax": outer,
                f"{name}.nested_quant_map": inner,
            }
            largest = inner[picked] * outer[torch.arange(num_blocks) // 256] + 0.31
        else:
            largest = 0.3 * torch.rand(num_blocks, generator=_generator(name + "a"))
            found[f"{name}.absmax"] = largest
        told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        found[f"{name}.quant_state.bitsandbytes__{kind}"] = told
        mean = table[codes] * largest[torch.arange(rows * columns) // block]
        return found, mean.reshape(rows, columns)

    return write


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "version": "0.20.0",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _groups(bits: int, **more: Any) -> dict[str, Any]:
    return compressed("pack-quantized", num_bits=bits, strategy="group", group_size=GROUP, **more)


_CHANNEL = {"strategy": "channel"}
_FLOAT = {"num_bits": 8, "type": "float"}
KINDS: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], Written]]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        float8((64, 64), end="weight_scale_inv"),
    ),
    "fp8 ragged blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 80]},
        float8((48, 80), end="weight_scale_inv", of_scales=torch.bfloat16),
    ),
    "fp8 with powers of two": (
        {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        partial(mxfp8, end="_scale_inv"),
    ),
    "fp8 tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, float8()),
    "ct fp8 channels": (
        compressed("float-quantized", **_FLOAT, **_CHANNEL),
        float8(by_row=True, of_scales=torch.bfloat16),
    ),
    "ct fp8 tensors": (compressed("float-quantized", **_FLOAT, strategy="tensor"), float8()),
    "ct fp8 blocks": (
        compressed("float-quantized", **_FLOAT, strategy="block", block_structure=[48, 48]),
        float8((48, 48), of_scales=torch.bfloat16),
    ),
    "ct fp8 of 5 exponent bits": (
        compressed("naive-quantized", **_FLOAT, **_CHANNEL),
        float8(by_row=True, narrow=torch.float8_e5m2),
    ),
    "ct int8": (compressed("int-quantized", num_bits=8, **_CHANNEL), integers_of_bytes()),
    "ct int8 with zeros": (
        compressed("int-quantized", num_bits=8, symmetric=False, **_CHANNEL),
        integers_of_bytes(symmetric=False),
    ),
    "ct int8 groups": (
        compressed("int-quantized", num_bits=8, strategy="group", group_size=GROUP),
        integers_of_bytes(group=GROUP),
    ),
    "ct w4a16": (_groups(4), packed_integers(4, group=GROUP, symmetric=True)),
    "ct w4a16 with zeros": (
        _groups(4, symmetric=False),
        packed_integers(4, group=GROUP, symmetric=False),
    ),
    "ct w4a16 channels": (
        compressed("pack-quantized", num_bits=4, **_CHANNEL),
        packed_integers(4, group=None, symmetric=True),
    ),
    "ct w8a16": (_groups(8), packed_integers(8, group=GROUP, symmetric=True)),
    "ct w8a16 with zeros": (
        _groups(8, symmetric=False),
        packed_integers(8, group=GROUP, symmetric=False),
    ),
    "ct w2a16": (_groups(2), packed_integers(2, group=GROUP, symmetric=True)),
    **{
        f"ct w{bits}a16": (_groups(bits), packed_integers(bits, group=GROUP, symmetric=True))
        for bits in (3, 5, 6, 7)
    },
    **{
        f"ct w{bits}a16 before 0.18": (
            _groups(bits) | {"version": "0.17.1"},
            packed_integers(bits, group=GROUP, symmetric=True, whole=True),
        )
        for bits in (3, 5, 6, 7)
    },
    "ct w3a16 with zeros": (
        _groups(3, symmetric=False),
        packed_integers(3, group=GROUP, symmetric=False),
    ),
    "ct mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        mxfp4,
    ),
    "ct mxfp8": (compressed("mxfp8-quantized", **_FLOAT, group_size=32), mxfp8),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4, group=GROUP)),
    "gptq symmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
        gptq(4, group=GROUP, symmetric=True),
    ),
    "gptq rows": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, gptq(4, group=None)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        gptq(4, group=GROUP, is_first=False),
    ),
    "gptq of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
        gptq(8, group=GROUP),
    ),
    "gptq of 2 bits": (
        {"quant_method": "gptq", "bits": 2, "group_size": GROUP},
        gptq(2, group=GROUP),
    ),
    **{
        f"gptq of {bits} bits": (
            {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": kind},
            gptq(bits, group=GROUP, is_first=kind == "gptq"),
        )
        for bits, kind in ((3, "gptq"), (5, "gptq_v2"), (6, "gptq"), (7, "gptq"))
    },
    "auto-round": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}},
        },
        gptq(4, group=GROUP),
    ),
    "auto-round with zeros as they are": (
        {
            "quant_method": "intel/auto-round",
            "bits": 4,
            "group_size": GROUP,
            "backend": "auto_round:exllamav2",
        },
        gptq(4, group=GROUP, is_first=False),
    ),
    "auto-round as awq": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "packing_format": "auto_round:auto_awq",
        },
        awq(GROUP),
    ),
    "auto-round nvfp4": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "data_type": "nv_fp4_with_static_gs",
            "packing_format": "auto_round:llm_compressor",
        },
        nvfp4(is_divided=True),
    ),
    "ct nvfp4": (
        compressed(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
        ),
        nvfp4(is_divided=True),
    ),
    "modelopt nvfp4": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            "config_groups": {},
        },
        nvfp4(is_divided=False),
    ),
    "modelopt fp8 blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        modelopt_fp8_blocks,
    ),
    "modelopt fp8 blocks inv": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        float8((128, 128), end="weight_scale_inv"),
    ),
    "modelopt mxfp8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        mxfp8,
    ),
    "modelopt int8": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W8A16"}},
        integers_of_bytes(),
    ),
    "quark fp8": ({"quant_method": "quark", "global_quant_config": {"weight": {}}}, float8()),
    "quark mxfp4": ({"quant_method": "quark"}, modelopt_mxfp4),
    "fbgemm fp8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        float8(by_row=True),
    ),
    "mlx": ({"bits": 4, "group_size": 64}, mlx(4, 64, torch.bfloat16)),
    "mlx of 8 bits": ({"bits": 8, "group_size": 32}, mlx(8, 32, torch.float16)),
    "mlx of 6 bits": ({"bits": 6, "group_size": 64}, mlx(6, 64, torch.bfloat16)),
    "mlx of 3 bits": ({"bits": 3, "group_size": 64}, mlx(3, 64, torch.float16)),
    "mlx mxfp4": ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, mlx_mxfp4),
    "metal": (
        {"quant_method": "metal", "bits": 8, "group_size": 64},
        mlx(8, 64, torch.bfloat16, "qbiases"),
    ),
    **{
        f"gemma of {bits} bits": (
            {
                "quant_method": "gemma",
                "num_bits": 4,
                "module_quant_configs": {"proj": {"num_bits": bits}},
            },
            gemma(bits),
        )
        for bits in (2, 4, 8)
    },
    "bitnet": (
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        bitnet(is_inverse=False),
    ),
    "bitnet that divides": ({"quant_method": "bitnet"}, bitnet(is_inverse=True)),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        bytes_of_rows,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        awq(GROUP),
    ),
    "bitsandbytes nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        bitsandbytes("nf4"),
    ),
    "bitsandbytes nested fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        bitsandbytes("fp4", block=128, nested=True),
    ),
}
"""Kinds of checkpoints whose matrices stay coded: settings and the writer of a matrix."""

PERMUTED: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], Written]]] = {
    "gptq act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        gptq(4, group=GROUP, ordered=True),
    ),
    "ct act-order": (
        _groups(4, actorder="group"),
        packed_integers(4, group=GROUP, symmetric=True, ordered=True),
    ),
}
"""Kinds whose groups are not of neighbours."""


def write_checkpoint(
    folder: Path,
    settings: dict[str, Any],
    write: Callable[[str, torch.Tensor], Written],
    *,
    file: str = "",
    kind: type[Any] = LlamaConfig,
    **config: Any,
) -> Weights:
    """Write a model whose layers are quantised; returns its parameters as they mean, in float32.

    file: where the settings stand, in place of config.json. kind: of the model's configuration.
    """
    torch.manual_seed(0)
    made = kind(**SMALL | config)
    AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors: Weights = {}
    means: Weights = {}
    for name, weight in load_file(path).items():
        found, mean = {name: weight}, weight.float()
        if name.endswith("_proj.weight"):
            found, mean = write(name, weight)
        tensors.update(found)
        means[name] = mean
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, {"format": "pt"})
    if file:
        (folder / file).write_text(json.dumps(settings))
    else:
        change_config(folder, lambda told: told.update(quantization_config=settings))
    return means


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a checkpoint's config.json."""
    told = json.loads((folder / "config.json").read_text())
    change(told)
    (folder / "config.json").write_text(json.dumps(told))


def change_tensors(folder: Path, change: Callable[[Weights], Any]) -> None:
    """Change a checkpoint's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def plain_model(folder: Path, means: Weights) -> Any:
    """The model of transformers with these parameters."""
    told = json.loads((folder / "config.json").read_text())
    told.pop("quantization_config", None)
    model: Any = AutoModelForCausalLM.from_config(
        LlamaConfig(**told), dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(means, strict=False)
    return model.eval()
