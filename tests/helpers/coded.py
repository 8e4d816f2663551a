"""Coded matrices of random codes, and what they mean, weight by weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slipstream_core.kernels.codes import formats
from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.formats import Codes, Format

FORMATS = {
    each.name: each
    for each in (
        formats.BFLOAT16,
        formats.FLOAT16,
        formats.INT8_PER_CHANNEL,
        formats.Q8_0,
        formats.Q4_0,
        formats.Q4_1,
        formats.Q5_0,
        formats.Q5_1,
        formats.Q2_K,
        formats.Q3_K,
        formats.Q4_K,
        formats.Q5_K,
        formats.Q6_K,
        formats.IQ4_NL,
        formats.IQ4_XS,
        formats.IQ2_XS,
        formats.IQ3_S,
        formats.MXFP4,
        Format("fp8_blocks", 8, "float8_e4m3", group=128, scale="float32"),
        Format("fp8_channel", 8, "float8_e5m2", scale="float32"),
        Format("awq", 4, group=128, scale="float16", has_zeros=True),
        Format("mlx", 8, "unsigned", group=64, scale="bfloat16", offset="bfloat16"),
        Format("gptq_8", 8, group=64, scale="float16", has_zeros=True),
        Format("int4_bfloat16", 4, group=32, scale="bfloat16", zero=8),
        Format("int4_float32", 4, group=128, scale="float32", zero=8),
        Format("nf4", 4, tuple(float(i * i) / 7 - 3 for i in range(16)), group=64, scale="float32"),
        Format("fp4_of_16", 4, formats.FP4_VALUES, group=16, scale="float32"),
    )
}


def random_codes(form: Format, num_outputs: int, num_inputs: int, seed: int = 0) -> Codes:
    """Codes of every value, and scales of both signs where the format has them."""
    rng = np.random.default_rng(seed)
    scales, groups = form.num_scales(num_inputs), form.num_groups(num_inputs)

    def numbers(number: Any) -> Any:
        if number is None:
            return None
        some = rng.normal(scale=0.01, size=(num_outputs, scales)).astype(np.float32)
        match number:
            case "bfloat16":
                return (some.view(np.uint32) >> 16).astype(np.uint16)
            case "e8m0":
                return rng.integers(110, 130, some.shape, dtype=np.uint8)
        return some.astype(formats.NUMBER_TYPES[number])

    def bytes_of_groups(is_there: bool) -> Any:
        some = rng.integers(-128, 128, (num_outputs, groups), dtype=np.int8)
        return some if is_there else None

    size = (num_outputs, num_inputs)
    if form.bits == 16:
        weights = torch.from_numpy(rng.normal(scale=0.02, size=size))
        narrow = weights.to(torch.bfloat16 if form.values == "bfloat16" else torch.float16)
        return Codes(narrow.view(torch.uint16).numpy())
    if form.is_signed:
        codes: Any = rng.integers(-128, 128, size, dtype=np.int8)
    else:
        codes = rng.integers(0, 1 << form.bits, size, dtype=np.uint8)
    if form.values == "float8_e4m3":
        codes[codes & 0x7F == 0x7F] = 0
    if form.values == "float8_e5m2":
        codes[codes & 0x7C == 0x7C] = 0
    return Codes(
        codes,
        scales=numbers(form.scale),
        scale_factors=bytes_of_groups(bool(form.supergroup)),
        offsets=numbers(form.offset),
        offset_factors=bytes_of_groups(bool(form.supergroup and form.offset)),
        zeros=bytes_of_groups(form.has_zeros),
    )


def take(part: Codes, rows: Any) -> Codes:
    """Some rows of codes."""
    named = {name: getattr(part, name) for name in Codes.__slots__}
    return Codes(**{name: None if each is None else each[rows] for name, each in named.items()})


def matrix_of(form: Format, part: Codes) -> CodedMatrix:
    """The matrix that reads these codes."""
    return CodedMatrix(form, *part.codes.shape, lambda rows: take(part, rows))


def random_matrix(form: Format, num_outputs: int, num_inputs: int, seed: int = 0) -> CodedMatrix:
    """A matrix of random codes."""
    return matrix_of(form, random_codes(form, num_outputs, num_inputs, seed))


def padded_inputs(form: Format, num_inputs: int) -> int:
    """The least number of inputs from `num_inputs` on that blocks of this format divide."""
    is_cut = form.bits == 16 or form.values != "integer" or not form.group
    least = form.supergroup or (1 if is_cut and form.name in TAILED else form.group) or 1
    return -(-num_inputs // least) * least


TAILED = {"bfloat16", "float16", "int8_per_channel", "fp8_blocks", "fp8_channel"}
