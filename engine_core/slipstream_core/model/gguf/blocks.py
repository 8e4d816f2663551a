"""Turns the blocks of quantised tensors into float32, as ggml's `ggml-quants.c` defines them.

A block is some half-precision scales and the codes of 32 or 256 neighbouring values. The order of
the operations on floats is that of the format's reference, so results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from slipstream_core.model.gguf.tensor_types import TensorType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # doubled
_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_AT_ONCE_BYTES = 1 << 20  # of blocks, which bounds the memory of what is computed between


def dequantise(kind: TensorType, rows: Bytes) -> Floats:
    """The values of rows of blocks, [rows, bytes of a row] → float32 [rows, values of a row]."""
    num_rows, row_bytes = rows.shape
    values = np.empty((num_rows, row_bytes // kind.block_bytes * kind.block_len), np.float32)
    at_once = max(1, _AT_ONCE_BYTES // max(1, row_bytes))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the values
        for first in range(0, num_rows, at_once):
            some = rows[first : first + at_once]
            blocks = np.ascontiguousarray(some).reshape(-1, kind.block_bytes)
            values[first : first + at_once] = _FUNCTIONS[kind.name](blocks).reshape(len(some), -1)
    return values


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return _half(blocks)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)
    return _half(blocks[:, :2]) * codes.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 4:]).astype(np.float32)
    return _half(blocks[:, :2]) * codes + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    codes = _fives(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - np.int8(16)
    return _half(blocks[:, :2]) * codes.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _fives(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    return _half(blocks[:, :2]) * codes + _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _int8(blocks[:, 2:])


def _q4_k(blocks: Bytes) -> Floats:
    scale, offset = _scales_and_offsets(blocks[:, :4], blocks[:, 4:16])
    codes = _bits(blocks[:, 16:].reshape(-1, 4, 1, 32), 4).reshape(-1, 8, 32)
    return scale * codes.astype(np.float32) - offset


def _q5_k(blocks: Bytes) -> Floats:
    scale, offset = _scales_and_offsets(blocks[:, :4], blocks[:, 4:16])
    low = _bits(blocks[:, 48:].reshape(-1, 4, 1, 32), 4).reshape(-1, 8, 32)
    high = _bits(blocks[:, 16:48].reshape(-1, 1, 1, 32), 1).reshape(-1, 8, 32)
    return scale * (low | high << np.uint8(4)).astype(np.float32) - offset


def _q6_k(blocks: Bytes) -> Floats:
    low = _bits(blocks[:, :128].reshape(-1, 2, 1, 64), 4).reshape(-1, 8, 32)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 1, 32), 2).reshape(-1, 8, 32)
    codes = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    scale = _half(blocks[:, 208:]) * _int8(blocks[:, 192:208])
    return scale[:, :, None] * codes.reshape(-1, 16, 16).astype(np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _IQ4_NL[_nibbles(blocks[:, 2:])].astype(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    # half of 2 ^ (exponent - 127), as the values of the table are doubled
    exponents = blocks[:, :1].astype(np.uint32)
    normal = (np.maximum(exponents, 1) - np.uint32(1)) << np.uint32(23)
    bits = np.where(exponents < 2, np.uint32(0x00200000) << exponents, normal)
    return bits.view(np.float32) * _E2M1[_nibbles(blocks[:, 1:])].astype(np.float32)


def _half(some: Bytes) -> Floats:
    return np.ascontiguousarray(some).view("<f2").astype(np.float32)


def _int8(some: Bytes) -> Floats:
    return some.view(np.int8).astype(np.float32)


def _bits(some: Bytes, width: int) -> Bytes:
    """Codes of `width` bits: [n, groups, 1, size] → [n, groups, codes in a byte, size], those of
    the low bits first.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (some >> shifts) & np.uint8((1 << width) - 1)


def _nibbles(some: Bytes) -> Bytes:
    """[n, 16] → [n, 32]: the low halves of all bytes, then the high ones."""
    return np.concatenate([some & np.uint8(15), some >> np.uint8(4)], axis=1)


def _fives(high: Bytes, low: Bytes) -> Bytes:
    """Codes of 5 bits, [n, 32]: their fifth bits are those of a word of 32."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _nibbles(low) | fifth << np.uint8(4)


def _scales_and_offsets(halves: Bytes, packed: Bytes) -> tuple[Floats, Floats]:
    """Scale and offset of each 32 values of a K-quant's block, [n, 8, 1]: 6 bits of each in 12
    bytes, times two halves.
    """
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, four = np.uint8(0x3F), np.uint8(0x0F)
    top = np.uint8(0x30)
    scales = np.concatenate([low & six, (high & four) | ((low >> 2) & top)], axis=1)
    offsets = np.concatenate([middle & six, (high >> 4) | ((middle >> 2) & top)], axis=1)
    both = _half(halves)
    scale = both[:, :1] * scales.astype(np.float32)
    offset = both[:, 1:] * offsets.astype(np.float32)
    return scale[:, :, None], offset[:, :, None]


_FUNCTIONS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
