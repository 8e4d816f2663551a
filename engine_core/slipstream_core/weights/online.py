"""Matrices that are coded as a model is loaded, by the rules of those who defined the formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream_core.weights.coded_matrix import CodedMatrix, Rows
from slipstream_core.weights.formats import INT8_PER_CHANNEL, Q4_0, Q8_0, Codes, Float32s, Format

ONLINE: dict[str, Format] = {
    "int8_per_channel_weight_only": INT8_PER_CHANNEL,
    "q4_0": Q4_0,
    "q8_0": Q8_0,
}
"""Formats by the names that users give."""

_PART_ELEMENTS = 1 << 20


def quantised(weight: torch.Tensor, form: Format) -> CodedMatrix:
    """The codes of a matrix [N, K] of floating point numbers, in memory of their own.

    Raises ValueError for a number that is not finite, or does not fit into the format's scales, and
    where K is no multiple of the format's groups.
    """
    num_outputs, num_inputs = weight.shape
    if form.group and num_inputs % form.group:
        raise ValueError(f"{form.name}: {num_inputs} inputs are no whole groups of {form.group}")
    is_nibble = form.bits == 4
    codes = np.empty((num_outputs, num_inputs // 2 if is_nibble else num_inputs), np.uint8)
    scales = np.empty((num_outputs, form.num_groups(num_inputs)), np.float32)
    step = max(_PART_ELEMENTS // num_inputs, 1)
    for first in range(0, num_outputs, step):
        part = weight[first : first + step].detach().float().numpy()
        if not np.isfinite(part).all():
            raise ValueError(f"{form.name}: a weight is not a finite number")
        groups = part.reshape(len(part), scales.shape[1], -1)
        found, scales[first : first + step] = _ROUNDED[form.name](groups)
        flat = found.reshape(len(part), num_inputs)
        codes[first : first + step] = flat[:, ::2] | flat[:, 1::2] << 4 if is_nibble else flat
    with np.errstate(over="ignore"):
        given: NDArray[Any] = scales.astype(np.float16) if form.scale == "float16" else scales
    if not np.isfinite(given).all():
        raise ValueError(f"{form.name}: a weight is too large for its scale")

    def read(rows: Rows) -> Codes:
        part = codes[rows]
        if is_nibble:
            part = np.stack((part & 15, part >> 4), axis=-1).reshape(len(part), num_inputs)
        else:
            part = part.view(np.int8)
        return Codes(part, scales=given[rows])

    return CodedMatrix(form, num_outputs, num_inputs, read)


def _inverse(scales: Float32s) -> Float32s:
    with np.errstate(divide="ignore"):
        inverse: Float32s = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    return inverse


def _q8_0(groups: Float32s) -> tuple[NDArray[np.uint8], Float32s]:
    """Codes and scales of quantize_row_q8_0_ref: halves are rounded away from zero."""
    scales: Float32s = np.abs(groups).max(axis=-1) / np.float32(127)
    scaled = groups * _inverse(scales)[..., None]
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return rounded.view(np.uint8), scales


def _q4_0(groups: Float32s) -> tuple[NDArray[np.uint8], Float32s]:
    """Codes and scales of quantize_row_q4_0_ref: the number farthest from zero becomes -8."""
    farthest = np.abs(groups).argmax(axis=-1)[..., None]
    scales: Float32s = np.take_along_axis(groups, farthest, axis=-1)[..., 0] / np.float32(-8)
    scaled = groups * _inverse(scales)[..., None]
    return np.clip(np.trunc(scaled + np.float32(8.5)), 0, 15).astype(np.uint8), scales


def _int8(groups: Float32s) -> tuple[NDArray[np.uint8], Float32s]:
    """Symmetric, to the nearest even."""
    scales: Float32s = np.abs(groups).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scales[..., None] == 0, np.float32(0), groups / scales[..., None])
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8), scales


_ROUNDED = {"q8_0": _q8_0, "q4_0": _q4_0, "int8_per_channel": _int8}
