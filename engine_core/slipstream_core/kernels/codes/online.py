"""Matrices that are coded as a model is loaded, by the rules of those who defined the formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import (
    FP8_PER_BLOCK,
    FP8_PER_CHANNEL,
    INT8_PER_CHANNEL,
    Q4_0,
    Q8_0,
    Codes,
    Format,
)
from slipstream_ipc.arrays import Float32s

ONLINE: dict[str, Format] = {
    "fp8_per_block": FP8_PER_BLOCK,
    "fp8_per_channel": FP8_PER_CHANNEL,
    "int8_per_channel_weight_only": INT8_PER_CHANNEL,
    "q4_0": Q4_0,
    "q8_0": Q8_0,
}
"""Formats by the names that users give."""

WITHOUT_ENDS = frozenset((FP8_PER_BLOCK, FP8_PER_CHANNEL, INT8_PER_CHANNEL))
"""The methods that leave embeddings and heads as they are, as vLLM does."""

_PART_ELEMENTS = 1 << 20
_LARGEST_E4M3 = 448
_BLOCK_ROWS = 128  # of FP8's blocks


def quantised(weight: torch.Tensor, form: Format) -> CodedMatrix:
    """The codes of a matrix [N, K] of floating point numbers, in memory of their own.

    Raises ValueError for a number that is not finite, or does not fit into the format's scales, and
    where K is no multiple of groups of integers; FP8's last blocks may be cut off.
    """
    num_outputs, num_inputs = weight.shape
    if form.values == "float8_e4m3":
        return _float8(weight, form)
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


def _float8(weight: torch.Tensor, form: Format) -> CodedMatrix:
    """Numbers of 8 bits, to the nearest even; the largest of each row or block becomes 448."""
    num_outputs, num_inputs = weight.shape
    height = _BLOCK_ROWS if form.group else 1
    starts = np.arange(0, num_inputs, form.group or num_inputs)
    widths = np.diff(starts, append=num_inputs)
    codes = np.empty((num_outputs, num_inputs), np.uint8)
    scales = np.empty((-(-num_outputs // height), len(starts)), np.float32)
    for index in range(len(scales)):
        rows = slice(index * height, (index + 1) * height)
        part = weight[rows].detach().float().numpy()
        if not np.isfinite(part).all():
            raise ValueError(f"{form.name}: a weight is not a finite number")
        largest = np.maximum.reduceat(np.abs(part).max(axis=0), starts)
        scales[index] = largest / np.float32(_LARGEST_E4M3)
        spread = np.repeat(scales[index], widths)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scaled = np.where(spread == 0, np.float32(0), part / spread)
        bounded = torch.from_numpy(np.clip(scaled, -_LARGEST_E4M3, _LARGEST_E4M3))
        codes[rows] = bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def read(rows: Rows) -> Codes:
        ids = np.arange(*rows.indices(num_outputs)) if isinstance(rows, slice) else rows
        return Codes(codes[rows], scales=scales[ids // height])

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
