"""Weights of few bits in bytes, as the checkpoints of Gemma and BitNet have them.

Gemma's are integers of 2, 4 or 8 bits with a scale for each output; a byte has neighbouring inputs,
the first in its lowest bits, and 0 stands for the least integer. Tables of embeddings may have
several scales in a row. BitNet's are -1, 0 and 1 with one scale: byte n of a column has the outputs
n, n + N / 4, n + N / 2 and n + 3 N / 4, as 0, 1 and 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import Codes, Format
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors
from slipstream_core.model.quantised.weight import QuantisedWeight, scales_of

_BITS = (2, 4, 8)
_BYTE, _NIBBLE = 8, 4
_CLASSES = ("autobitlinear", "bitlinear")
_EACH = 4  # outputs in a byte


def read_gemma(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint of `quant_method` gemma. Raises QuantisedWeightError."""
    found = {}
    for name in tensors:
        for scale, codes in (
            (".weight_scale", ".weight"),
            (".embedding_scale", ".embedding_quantized"),
        ):
            layer = name.removesuffix(scale)
            if layer != name and f"{layer}{codes}" in tensors:
                bits = _bits_of(layer, settings)
                found[f"{layer}.weight"] = _integers(tensors, f"{layer}{codes}", name, bits)
    return found


def _bits_of(layer: str, settings: Mapping[str, Any]) -> int:
    """The bits of a layer: those of the first pattern that is in its name."""
    bits = settings.get("num_bits", _NIBBLE)
    for pattern, own in (settings.get("module_quant_configs") or {}).items():
        try:
            is_it = re.search(pattern, layer) is not None
        except re.error as error:
            raise QuantisedWeightError(f"{pattern!r} is no pattern: {error}") from None
        if is_it:
            bits = own.get("num_bits", bits)
            break
    if bits not in _BITS:
        raise QuantisedWeightError(f"{layer} has num_bits {bits!r}, allowed: 2, 4, 8")
    return int(bits)


def _integers(tensors: Tensors, name: str, scale: str, bits: int) -> QuantisedWeight:
    packed = tensors.array(name, "I8" if bits == _BYTE else "U8", ndim=2)
    each = _BYTE // bits
    num_outputs, num_inputs = len(packed), each * packed.shape[1]
    shape = (num_outputs, num_inputs)
    blocks = tensors.array(scale, "F32", ndim=2).shape[1]
    if num_inputs % blocks:
        raise QuantisedWeightError(
            f"{scale} has {blocks} numbers for {num_inputs} inputs, allowed: whole blocks"
        )
    scales = scales_of(tensors, scale, shape, group=num_inputs // blocks)
    form = Format(
        f"gemma{bits}",
        max(bits, _NIBBLE),
        group=0 if blocks == 1 else scales.group,
        scale="float32",
        zero=0 if bits == _BYTE else 1 << (bits - 1),
    )

    def read(rows: Rows) -> Codes:
        codes = packed[rows]
        if bits != _BYTE:
            shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
            spread = codes[:, :, None] >> shifts & np.uint8((1 << bits) - 1)
            codes = spread.reshape(len(codes), num_inputs)
        return Codes(codes, scales=scales.of_rows(rows))

    matrix = CodedMatrix(form, num_outputs, num_inputs, read, [packed])
    return QuantisedWeight(shape, matrix, frozenset({name, scale}))


def read_bitnet(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint of `quant_method` bitnet. Raises QuantisedWeightError."""
    kind = settings.get("linear_class", "bitlinear")
    if kind not in _CLASSES:
        raise QuantisedWeightError(f"linear_class is {kind!r}, allowed: {', '.join(_CLASSES)}")
    if settings.get("use_rms_norm"):
        raise QuantisedWeightError("use_rms_norm is set, allowed: layers without norms")
    if kind == _CLASSES[0] and settings.get("quantization_mode", "offline") != "offline":
        raise QuantisedWeightError(
            f"quantization_mode is {settings['quantization_mode']!r}, allowed: offline"
        )
    found = {}
    for name, header in tensors.headers.items():
        layer = name.removesuffix(".weight")
        if layer != name and header.dtype == "U8":
            found[name] = _ternary(tensors, layer, is_inverse=kind == _CLASSES[1])
    return found


def _ternary(tensors: Tensors, layer: str, *, is_inverse: bool) -> QuantisedWeight:
    """is_inverse: results are divided by the scale."""
    name, scale = f"{layer}.weight", f"{layer}.weight_scale"
    packed = tensors.array(name, "U8", ndim=2)
    rows_each, num_inputs = packed.shape
    shape = (_EACH * rows_each, num_inputs)
    scales_of(tensors, scale, shape)  # which refuses numbers that are not finite
    numbers = tensors.tensor(scale).float().numpy().reshape(-1)
    if numbers.size != 1 or numbers[0] == 0:
        raise QuantisedWeightError(
            f"{scale} has {numbers.size} numbers, allowed: one that is not 0"
        )
    if (packed & packed >> 1 & 0x55).any():
        raise QuantisedWeightError(f"{name} has a weight that is none of -1, 0 and 1")
    factor = np.float32(1) / numbers if is_inverse else numbers
    form = Format("ternary", _NIBBLE, scale="float32", zero=1)

    def read(rows: Rows) -> Codes:
        ids = np.arange(*rows.indices(shape[0])) if isinstance(rows, slice) else rows
        shifts = (2 * (ids // rows_each)).astype(np.uint8)
        codes = packed[ids % rows_each] >> shifts[:, None] & np.uint8(3)
        return Codes(codes, scales=np.repeat(factor[None], len(ids), axis=0))

    return QuantisedWeight(
        shape, CodedMatrix(form, *shape, read, [packed]), frozenset({name, scale})
    )
