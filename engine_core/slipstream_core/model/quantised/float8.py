"""Weights of 8-bit floating point numbers, as checkpoints of FP8 have them.

A weight is its number times the scale of its matrix, of its row, or of its block: DeepSeek-V3's
README_WEIGHTS.md names them. Blocks at the ends of rows and
columns may be cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.formats import Codes, Format, Values
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors
from slipstream_core.model.quantised.weight import QuantisedWeight, Scales, scales_of

TYPES: dict[str, Values] = {"F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2"}
_SCALES = ("_scale_inv", "_scale")
_NUM_SIZES = 2  # of a block
_USUAL_BLOCK = (128, 128)  # where settings name none, as transformers has it


def read_fp8(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint of `quant_method` fp8, fbgemm_fp8 or mxfp8.

    Raises QuantisedWeightError.
    """
    block = settings.get("weight_block_size")
    if block is None:
        return _weights(tensors, None, has_settings="weight_block_size" in settings)
    is_pair = isinstance(block, list | tuple) and len(block) == _NUM_SIZES
    if not is_pair or not all(isinstance(each, int) and each > 0 for each in block):
        raise QuantisedWeightError(
            f"weight_block_size is {block!r}, allowed: two positive integers"
        )
    return _weights(tensors, (block[0], block[1]))


def _weights(
    tensors: Tensors, block: tuple[int, int] | None, *, has_settings: bool = True
) -> dict[str, QuantisedWeight]:
    found = {}
    for name, header in tensors.headers.items():
        if header.dtype not in TYPES or len(header.shape) < 2:
            continue
        scale = next((name + each for each in _SCALES if name + each in tensors), None)
        if scale is None:
            raise QuantisedWeightError(f"{name}{_SCALES[block is None]} is missing")
        # which transformers, too, reads as powers of two, whatever `scale_fmt` says
        is_e8m0 = tensors.headers[scale].dtype == "U8"
        own = block
        if not has_settings and _is_of_usual_blocks(tensors.headers[scale].shape, header.shape):
            own = _USUAL_BLOCK
        scales = scales_of(tensors, scale, header.shape, block=own, is_e8m0=is_e8m0)
        found[name] = float8_weight(tensors, name, scales, {name, scale})
    return found


def _is_of_usual_blocks(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    parts = [-(-size // each) for size, each in zip(weight[-2:], _USUAL_BLOCK, strict=True)]
    return prod(scale) > 1 and list(scale) == [*weight[:-2], *parts]


def float8_weight(tensors: Tensors, name: str, scales: Scales, used: set[str]) -> QuantisedWeight:
    """The weight `name` [..., N, K] with these scales."""
    header = tensors.headers[name]
    num_inputs = header.shape[-1]
    codes = tensors.array(name, *TYPES).reshape(-1, num_inputs)
    values = TYPES[header.dtype]
    kind = f"{values}_{scales.number}"
    form = Format(kind, 8, values, group=scales.group, scale=scales.number)
    _refuse_nan(name, codes, values)
    matrix = CodedMatrix(
        form,
        prod(header.shape[:-1]),
        num_inputs,
        lambda rows: Codes(codes[rows], scales=scales.of_rows(rows)),
        [codes],
    )
    return QuantisedWeight(header.shape, matrix, frozenset(used))


def _refuse_nan(name: str, codes: Any, values: Values) -> None:
    """Raise QuantisedWeightError for a code that is no finite number."""
    mask = 0x7F if values == "float8_e4m3" else 0x7C
    step = max(1, (1 << 22) // codes.shape[1])
    for first in range(0, len(codes), step):
        part = codes[first : first + step]
        if ((part & mask) == mask).any():
            raise QuantisedWeightError(f"{name} has a weight that is not a finite number")
