"""Weights of 4-bit floating point numbers (E2M1), two to a byte, the first in its lower half.

MXFP4 has a power of two for 32 inputs. NVFP4 has a number of 8 bits (E4M3) for 16, which one number
of the whole matrix multiplies or divides, by who wrote it; the result is a scale of float32, so a
weight takes 6 bits where a file has 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import FP4_VALUES, MXFP4, Codes, Format
from slipstream_core.model.quantised.tensors import (
    Array,
    QuantisedWeightError,
    Tensors,
    refuse_shape,
)
from slipstream_core.model.quantised.weight import QuantisedWeight, scales_of

_MX_GROUP, _NV_GROUP = 32, 16
_NVFP4 = Format("nvfp4", 4, FP4_VALUES, group=_NV_GROUP, scale="float32")


def mxfp4_weight(tensors: Tensors, name: str, scale: str) -> QuantisedWeight:
    """The weight [N, K] whose codes are `name`, bytes [N, K / 2] or as many in words of 32 bits,
    and whose exponents are `scale` [N, K / 32]. Raises QuantisedWeightError.
    """
    pairs = tensors.array(name, "U8", "U32", ndim=2).view(np.uint8)
    shape = (len(pairs), 2 * pairs.shape[1])
    scales = scales_of(tensors, scale, shape, group=_MX_GROUP, is_e8m0=True)
    matrix = CodedMatrix(
        MXFP4,
        *shape,
        lambda rows: Codes(_halves(pairs[rows]), scales=scales.of_rows(rows)),
        [pairs],
    )
    return QuantisedWeight(shape, matrix, frozenset({name, scale}))


def read_mxfp4(tensors: Tensors, _: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The experts of a checkpoint of `quant_method` mxfp4, GPT-OSS's: [experts, K, N] of `_blocks`
    [experts, N, K / 32, 16] and `_scales` [experts, N, K / 32]. Raises QuantisedWeightError.
    """
    found = {}
    for name in tensors:
        weight = name.removesuffix("_blocks")
        if weight != name:
            found[weight] = _turned_experts(tensors, weight)
    return found


def _turned_experts(tensors: Tensors, weight: str) -> QuantisedWeight:
    name, scale = f"{weight}_blocks", f"{weight}_scales"
    blocks = tensors.array(name, "U8", ndim=4)
    experts, num_outputs, num_blocks, num_bytes = blocks.shape
    refuse_shape(name, blocks.shape, (experts, num_outputs, num_blocks, _MX_GROUP // 2))
    num_inputs = num_blocks * num_bytes * 2
    pairs = blocks.reshape(experts * num_outputs, -1)
    scales = scales_of(
        tensors, scale, (experts, num_outputs, num_inputs), group=_MX_GROUP, is_e8m0=True
    )
    matrix = CodedMatrix(
        MXFP4,
        len(pairs),
        num_inputs,
        lambda rows: Codes(_halves(pairs[rows]), scales=scales.of_rows(rows)),
        [pairs],
    )
    shape = (experts, num_inputs, num_outputs)
    return QuantisedWeight(shape, matrix, frozenset({name, scale}), is_turned=True)


def nvfp4_weight(
    tensors: Tensors, name: str, scale: str, whole: str, *, is_divided: bool
) -> QuantisedWeight:
    """The weight [N, K] whose codes are `name` [N, K / 2] and whose scales are `scale` [N, K / 16]
    times the number `whole`, or divided by it. Raises QuantisedWeightError.
    """
    pairs = tensors.array(name, "U8", ndim=2)
    num_outputs, num_inputs = len(pairs), 2 * pairs.shape[1]
    narrow = tensors.array(scale, "F8_E4M3")
    refuse_shape(scale, narrow.shape, (num_outputs, -(-num_inputs // _NV_GROUP)))
    if (narrow & 0x7F == 0x7F).any():
        raise QuantisedWeightError(f"{scale} has a number that is not finite")
    factor = tensors.array(whole, "F32").reshape(-1)
    refuse_shape(whole, factor.shape, (1,))
    if not np.isfinite(factor[0]) or (is_divided and factor[0] == 0):
        raise QuantisedWeightError(f"{whole} is {factor[0]}, allowed: a finite number")

    def read(rows: Rows) -> Codes:
        own = torch.from_numpy(narrow[rows]).view(torch.float8_e4m3fn).float().numpy()
        scales = own / factor if is_divided else own * factor
        return Codes(_halves(pairs[rows]), scales=scales)

    matrix = CodedMatrix(_NVFP4, num_outputs, num_inputs, read, [pairs])
    return QuantisedWeight((num_outputs, num_inputs), matrix, frozenset({name, scale, whole}))


def _halves(pairs: Array) -> Array:
    """The codes [n, 2 W] of bytes [n, W]."""
    return np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(len(pairs), -1)
