"""Reads the blocks of quantised tensors as the codes of `kernels/codes`, without loss.

A block is some half-precision scales and the codes of 32 or 256 neighbouring values, packed as
ggml's `ggml-common.h` says. Nothing is computed here but the order of bits; what codes stand for
is in `kernels/codes/formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_core.kernels.codes import formats
from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import Codes, Format
from slipstream_core.model.gguf.grids import grid
from slipstream_core.model.gguf.reader import Tensor

Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]

_AT_ONCE_BYTES = 1 << 24
_EXPONENT, _E8M0_NAN = np.uint8(0x7C), np.uint8(0xFF)  # of a half's high byte; of MXFP4's scales
_SCALES = {  # where halves begin in a block
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
_SIX, _FOUR, _TOP = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)  # masks of K-quants' factors
_BYTES = np.arange(256, dtype=np.uint8)
# of 8 signs, the 7 that are stored and one that makes their number even
_SIGNS = _BYTES[:128] | np.unpackbits(_BYTES[:128, None], axis=1).sum(axis=1, dtype=np.uint8) << 7
_MIDDLE = np.uint8(32)  # of factors of 6 bits with a sign


def is_coded(tensor: Tensor) -> bool:
    """True unless its values are float32."""
    return tensor.type.name in _WAYS


def coded_matrix(tensor: Tensor) -> CodedMatrix:
    """The matrix [N, K] of a tensor that is coded; of more dimensions, all but the last are N.

    The file stays mapped.
    """
    form, way = _WAYS[tensor.type.name]
    mapped = tensor.read()

    def read(rows: Rows) -> Codes:
        some = mapped[rows]
        return way(np.ascontiguousarray(some).reshape(len(some), -1, tensor.type.block_bytes))

    return CodedMatrix(form, prod(tensor.shape[:-1]), tensor.shape[-1], read)


def has_finite_scales(tensor: Tensor) -> bool:
    """True unless a block has a scale or an offset that is infinite or no number.

    One byte of each is looked at, so it costs little more than reading the file.
    """
    mapped, size = tensor.read(), tensor.type.block_bytes
    step = max(1, _AT_ONCE_BYTES // max(1, mapped.shape[1]))
    for first in range(0, len(mapped), step):
        blocks = mapped[first : first + step].reshape(-1, size)
        if tensor.type.name == "MXFP4":
            if (blocks[:, 0] == _E8M0_NAN).any():
                return False
            continue
        for at in _SCALES.get(tensor.type.name, ()):
            if (blocks[:, at + 1] & _EXPONENT == _EXPONENT).any():
                return False
    return True


# Each takes [n, blocks, bytes of a block].


def _sixteen(blocks: Bytes) -> Codes:
    return Codes(_flat(blocks).view("<u2"))


def _q4_0(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[..., 4:]), _half(blocks, 0), offsets=_half(blocks, 2))


def _q5_0(blocks: Bytes) -> Codes:
    return Codes(_fives(blocks[..., 2:6], blocks[..., 6:]), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Codes:
    codes = _fives(blocks[..., 4:8], blocks[..., 8:])
    return Codes(codes, _half(blocks, 0), offsets=_half(blocks, 2))


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(_flat(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _q2_k(blocks: Bytes) -> Codes:
    factors = blocks[..., :16]
    return Codes(
        _flat(_bits(blocks[..., 16:80], 32, 2)),
        _half(blocks, 80),
        _flat(factors & _FOUR).view(np.int8),
        -_half(blocks, 82),
        _flat(factors >> np.uint8(4)).view(np.int8),
    )


def _q3_k(blocks: Bytes) -> Codes:
    low = _flat(_bits(blocks[..., 32:96], 32, 2))
    high = _flat(_bits(blocks[..., :32], 32, 1))
    factors = _bits(blocks[..., 96:104], 8, 4).reshape(*blocks.shape[:2], -1)
    factors |= _bits(blocks[..., 104:108], 4, 2).reshape(factors.shape) << np.uint8(4)
    return Codes(low | high << np.uint8(2), _half(blocks, 108), _centred(factors))


def _q4_k(blocks: Bytes) -> Codes:
    return _with_factors(blocks, _flat(_bits(blocks[..., 16:], 32, 4)))


def _q5_k(blocks: Bytes) -> Codes:
    low = _flat(_bits(blocks[..., 48:], 32, 4))
    high = _flat(_bits(blocks[..., 16:48], 32, 1))
    return _with_factors(blocks, low | high << np.uint8(4))


def _q6_k(blocks: Bytes) -> Codes:
    low = _flat(_bits(blocks[..., :128], 64, 4))
    high = _flat(_bits(blocks[..., 128:192], 32, 2))
    factors = _flat(blocks[..., 192:208]).view(np.int8)
    return Codes(low | high << np.uint8(4), _half(blocks, 208), factors)


def _iq4_xs(blocks: Bytes) -> Codes:
    low = _bits(blocks[..., 4:8], 1, 4).reshape(*blocks.shape[:2], -1)
    high = _bits(blocks[..., 2:4], 1, 2).reshape(low.shape)
    return Codes(
        _flat(_bits(blocks[..., 8:], 16, 4)), _half(blocks, 0), _centred(low | high << np.uint8(4))
    )


def _iq2_xxs(blocks: Bytes) -> Codes:
    words = _flat(blocks[..., 2:]).view("<u4").reshape(*blocks.shape[:2], 8, 2)
    numbers = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    return _of_grid("IQ2_XXS", blocks, numbers, *_signs_and_factors(words[..., 1]))


def _iq2_xs(blocks: Bytes) -> Codes:
    numbers = _flat(blocks[..., 2:66]).view("<u2").reshape(*blocks.shape[:2], -1)
    factors = _bits(blocks[..., 66:], 1, 4)
    return _of_grid("IQ2_XS", blocks, numbers & 511, _SIGNS[numbers >> 9], factors)


def _iq2_s(blocks: Bytes) -> Codes:
    high = _bits(blocks[..., 66:74], 1, 2).reshape(*blocks.shape[:2], -1).astype(np.uint16)
    factors = _bits(blocks[..., 74:], 1, 4)
    return _of_grid("IQ2_S", blocks, blocks[..., 2:34] | high << 8, blocks[..., 34:66], factors)


def _iq3_xxs(blocks: Bytes) -> Codes:
    words = _flat(blocks[..., 66:]).view("<u4").reshape(*blocks.shape[:2], 8)
    return _of_grid("IQ3_XXS", blocks, blocks[..., 2:66], *_signs_and_factors(words))


def _iq3_s(blocks: Bytes) -> Codes:
    high = _bits(blocks[..., 66:74], 1, 1).reshape(*blocks.shape[:2], -1).astype(np.uint16)
    factors = _bits(blocks[..., 106:], 1, 4)
    return _of_grid("IQ3_S", blocks, blocks[..., 2:66] | high << 8, blocks[..., 74:106], factors)


def _signs_and_factors(words: npt.NDArray[np.uint32]) -> tuple[Bytes, npt.NDArray[Any]]:
    """Four times the signs of 8 values, and a factor in the highest bits: [n, blocks, 8]."""
    shifts = np.arange(0, 28, 7, dtype=np.uint32)
    return _SIGNS[words[..., None] >> shifts & 127], words >> 28


def _of_grid(
    name: str, blocks: Bytes, numbers: npt.NDArray[Any], signs: Bytes, factors: npt.NDArray[Any]
) -> Codes:
    """Codes of magnitudes in a grid, by their numbers, of which the highest bit is the sign; the
    factors stand for odd numbers.
    """
    magnitudes = _flat(grid(name)[numbers])
    negative = np.unpackbits(_flat(signs), axis=-1, bitorder="little")
    odd = (factors * 2 + 1).astype(np.int8).reshape(len(blocks), -1)
    return Codes(magnitudes | negative << 3, _half(blocks, 0), odd)


def _mxfp4(blocks: Bytes) -> Codes:
    return Codes(_nibbles(blocks[..., 1:]), np.ascontiguousarray(blocks[..., 0]))


def _with_factors(blocks: Bytes, codes: Bytes) -> Codes:
    """Q4_K and Q5_K: two halves, and of each 32 values 6 bits for the scale and 6 for the offset,
    which is subtracted.
    """
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & _SIX, (high & _FOUR) | (low >> 2 & _TOP)], axis=-1)
    offsets = np.concatenate([middle & _SIX, high >> 4 | (middle >> 2 & _TOP)], axis=-1)
    return Codes(
        codes,
        _half(blocks, 0),
        _flat(scales).view(np.int8),
        -_half(blocks, 2),
        _flat(offsets).view(np.int8),
    )


def _centred(factors: Bytes) -> npt.NDArray[np.int8]:
    """Factors of 6 bits, which stand for -32 to 31."""
    return _flat(factors - _MIDDLE).view(np.int8)


def _half(blocks: Bytes, at: int) -> npt.NDArray[Any]:
    """The half-precision number of each block, [n, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _flat(some: Bytes) -> Bytes:
    return np.ascontiguousarray(some).reshape(len(some), -1)


def _bits(some: Bytes, size: int, width: int) -> Bytes:
    """Codes of `width` bits, [n, blocks, runs, codes in a byte, size]: each run of `size` bytes has
    those of the low bits first.
    """
    runs = some.reshape(*some.shape[:2], -1, 1, size)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return runs >> shifts & np.uint8((1 << width) - 1)


def _nibbles(some: Bytes) -> Bytes:
    """The low halves of all bytes of each block, then the high ones: [n, K]."""
    return _flat(np.concatenate([some & _FOUR, some >> np.uint8(4)], axis=-1))


def _fives(high: Bytes, low: Bytes) -> Bytes:
    """Codes of 5 bits, of which the fifth ones are those of a word: [n, K]."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return _nibbles(low) | _flat(fifth) << np.uint8(4)


_WAYS: dict[str, tuple[Format, Callable[[Bytes], Codes]]] = {
    "F16": (formats.FLOAT16, _sixteen),
    "BF16": (formats.BFLOAT16, _sixteen),
    "Q4_0": (formats.Q4_0, _q4_0),
    "Q4_1": (formats.Q4_1, _q4_1),
    "Q5_0": (formats.Q5_0, _q5_0),
    "Q5_1": (formats.Q5_1, _q5_1),
    "Q8_0": (formats.Q8_0, _q8_0),
    "Q2_K": (formats.Q2_K, _q2_k),
    "Q3_K": (formats.Q3_K, _q3_k),
    "Q4_K": (formats.Q4_K, _q4_k),
    "Q5_K": (formats.Q5_K, _q5_k),
    "Q6_K": (formats.Q6_K, _q6_k),
    "IQ4_NL": (formats.IQ4_NL, _q4_0),
    "IQ4_XS": (formats.IQ4_XS, _iq4_xs),
    "IQ2_XXS": (formats.IQ2_XXS, _iq2_xxs),
    "IQ2_XS": (formats.IQ2_XS, _iq2_xs),
    "IQ2_S": (formats.IQ2_S, _iq2_s),
    "IQ3_XXS": (formats.IQ3_XXS, _iq3_xxs),
    "IQ3_S": (formats.IQ3_S, _iq3_s),
    "MXFP4": (formats.MXFP4, _mxfp4),
}
