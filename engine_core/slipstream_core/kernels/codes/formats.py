"""Formats of coded matrices: how many bits a code has, what it stands for, and what groups share.

A weight is `scale * (value(code) - zero) + offset`, computed in float32 in this order. Everything
but the code belongs to a group: `group` consecutive inputs of one output. A format that says more
than this is none of ours.

Where a format has an offset, the product with the scale is exact: its bits, those of a factor and
those of a code fit into float32's 24. So the sum rounds once, and a fused multiplication and
addition gives the same number as two operations. `Format` refuses others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream_ipc.arrays import Float32s

Number = Literal["float32", "float16", "bfloat16", "e8m0"]  # of scales and offsets
Values = Literal["integer", "unsigned", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"]

# numpy's type for each, where bfloat16 and e8m0 (a power of two: 2 ** (byte - 127)) are their bits
NUMBER_TYPES: dict[Number, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "e8m0": np.uint8,
}
_SIGNIFICANT_BITS: dict[Number, int] = {"float32": 24, "float16": 11, "bfloat16": 8, "e8m0": 1}
_FACTOR_BITS = 7  # of an int8, beside its sign
_WIDTHS: dict[str, tuple[int, ...]] = {
    "integer": (4, 5, 6, 8),
    "unsigned": (8,),
    "bfloat16": (16,),
    "float16": (16,),
    "float8_e4m3": (8,),
    "float8_e5m2": (8,),
}
_INTEGERS = ("integer", "unsigned")
_TABLE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write a matrix [N, K] as codes. Raises ValueError where it is none that we compute.

    name: for messages and fingerprints.
    bits: of a code.
    values: what codes are; a tuple has the float32 of each of 16 codes. Integers of 8 bits are
      signed unless they are "unsigned", narrower ones are not.
    group: inputs that share a scale, an offset and a zero; 0: all of a row. The last group of a row
      may be shorter.
    scale: the type of scales; None: codes are numbers themselves, of 16 bits.
    zero: an integer that is subtracted from each code.
    has_zeros: every group has such an integer of its own, an int8, instead.
    offset: the type of offsets, if there are any.
    supergroup: inputs that share `scale` and `offset`, whole groups; a group then has factors,
      int8, with which these are multiplied. 0: every group has its own.
    """

    name: str
    bits: int
    values: Values | tuple[float, ...] = "integer"
    group: int = 0
    scale: Number | None = None
    zero: int = 0
    has_zeros: bool = False
    offset: Number | None = None
    supergroup: int = 0

    def __post_init__(self) -> None:
        is_table = isinstance(self.values, tuple)
        widths = (4,) if is_table else _WIDTHS[str(self.values)]
        if self.bits not in widths:
            raise ValueError(f"{self.name}: codes of {self.bits} bits, allowed: {widths}")
        if is_table and len(self.values) != _TABLE_SIZE:
            raise ValueError(f"{self.name}: a table of {len(self.values)} values, allowed: 16")
        if (self.scale is None) != (self.bits == 16):
            raise ValueError(f"{self.name}: codes of 16 bits have no scale, and all others have")
        if self.group < 0 or (self.supergroup and (not self.group or self.supergroup % self.group)):
            raise ValueError(f"{self.name}: groups of {self.group} in {self.supergroup} inputs")
        if self.values not in _INTEGERS and (self.zero or self.has_zeros or self.offset):
            raise ValueError(f"{self.name}: only integers have a zero or an offset")
        if (self.zero != 0) + self.has_zeros + (self.offset is not None) > 1:
            raise ValueError(f"{self.name}: a zero, zeros of groups, or offsets, one of them")
        if self.supergroup and self.has_zeros:
            raise ValueError(f"{self.name}: groups with a zero of their own have no factor")
        if self.offset is not None and self._product_bits() > 24:
            raise ValueError(f"{self.name}: a scale times a code does not fit into float32")

    def _product_bits(self) -> int:
        """The most significant bits that a scale times a code has."""
        factor = _FACTOR_BITS if self.supergroup else 0
        return _SIGNIFICANT_BITS[self.scale or "float32"] + factor + self.bits

    @property
    def is_signed(self) -> bool:
        """True if codes are int8."""
        return self.values == "integer" and self.bits == 8

    def num_groups(self, num_inputs: int) -> int:
        """The groups of a row of so many inputs."""
        return 1 if not self.group else -(-num_inputs // self.group)

    def num_scales(self, num_inputs: int) -> int:
        """The scales of such a row."""
        return -(-num_inputs // self.supergroup) if self.supergroup else self.num_groups(num_inputs)

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row, without what a file adds to it."""
        num_bits = self.bits * num_inputs
        for each in (self.scale, self.offset):
            if each is not None:
                size = 8 * np.dtype(NUMBER_TYPES[each]).itemsize
                num_bits += size * self.num_scales(num_inputs)
                num_bits += 8 * self.num_groups(num_inputs) if self.supergroup else 0
        if self.has_zeros:
            num_bits += 8 * self.num_groups(num_inputs)
        return -(-num_bits // 8)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Some rows of a coded matrix, n of them, one code to an element; arrays may be views.

    codes: [n, K], int8 where `Format.is_signed`, uint16 of 16 bits, otherwise uint8.
    scales, offsets: [n, num_scales] of NUMBER_TYPES.
    scale_factors, offset_factors: [n, num_groups] int8, with a supergroup.
    zeros: [n, num_groups] int8, where the format has them.
    """

    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    scale_factors: NDArray[np.int8] | None = None
    offsets: NDArray[Any] | None = None
    offset_factors: NDArray[np.int8] | None = None
    zeros: NDArray[np.int8] | None = None


def check_codes(form: Format, part: Codes, num_rows: int, num_inputs: int) -> None:
    """Raise ValueError unless `part` is so many rows of this format, with finite numbers."""
    code_type = np.uint16 if form.bits == 16 else np.int8 if form.is_signed else np.uint8
    scales, groups = form.num_scales(num_inputs), form.num_groups(num_inputs)
    scale = None if form.scale is None else NUMBER_TYPES[form.scale]
    offset = None if form.offset is None else NUMBER_TYPES[form.offset]
    factors, zeros = bool(form.supergroup), form.has_zeros
    for name, array, dtype, width in (
        ("codes", part.codes, code_type, num_inputs),
        ("scales", part.scales, scale, scales),
        ("scale_factors", part.scale_factors, np.int8 if factors else None, groups),
        ("offsets", part.offsets, offset, scales),
        ("offset_factors", part.offset_factors, np.int8 if factors and offset else None, groups),
        ("zeros", part.zeros, np.int8 if zeros else None, groups),
    ):
        if (array is None) != (dtype is None):
            said = "none" if array is None else "some"
            raise ValueError(f"{form.name}: {said} {name}, where the format says otherwise")
        if array is None or dtype is None:
            continue
        if array.dtype != dtype or array.shape != (num_rows, width):
            raise ValueError(
                f"{form.name}: {name} are {array.dtype} {list(array.shape)}, "
                f"allowed: {np.dtype(dtype)} {[num_rows, width]}"
            )
    for name, array, number in (
        ("scale", part.scales, form.scale),
        ("offset", part.offsets, form.offset),
    ):
        if array is not None and number is not None and not np.isfinite(_wide(array, number)).all():
            raise ValueError(f"{form.name}: a {name} is not a finite number")
    if form.values == "float8_e4m3" and (part.codes & 0x7F == 0x7F).any():
        raise ValueError(f"{form.name}: a code is not a number")
    if form.values == "float8_e5m2" and (part.codes & 0x7C == 0x7C).any():
        raise ValueError(f"{form.name}: a code is not a finite number")


def decoded(form: Format, part: Codes) -> Float32s:
    """The weights [n, K]."""
    num_inputs = part.codes.shape[1]
    values = _values(form, part.codes)
    if part.scales is None or form.scale is None:
        return values

    def each(groups: NDArray[Any]) -> NDArray[Any]:
        """The numbers of groups, at each of their inputs."""
        size = form.group or num_inputs
        return np.repeat(groups, size, axis=1)[:, :num_inputs]

    if form.zero:
        values -= np.float32(form.zero)
    if part.zeros is not None:
        values -= each(part.zeros).astype(np.float32)
    values *= each(_of_groups(form, part.scales, form.scale, part.scale_factors, num_inputs))
    if part.offsets is not None and form.offset is not None:
        values += each(_of_groups(form, part.offsets, form.offset, part.offset_factors, num_inputs))
    return values


def _of_groups(
    form: Format,
    numbers: NDArray[Any],
    number: Number,
    factors: NDArray[np.int8] | None,
    num_inputs: int,
) -> Float32s:
    """The scale or offset of each group, [n, num_groups]; with a factor it is exact."""
    wide = _wide(numbers, number)
    if factors is None:
        return wide
    groups = form.num_groups(num_inputs)
    many = np.repeat(wide, form.supergroup // form.group, axis=1)[:, :groups]
    product: Float32s = many * factors.astype(np.float32)
    return product


def _values(form: Format, codes: NDArray[Any]) -> Float32s:
    """The values of codes, in memory of their own."""
    if isinstance(form.values, tuple):
        found: Float32s = np.array(form.values, np.float32)[codes]
        return found
    match form.values:
        case "integer" | "unsigned":
            return codes.astype(np.float32)
        case "bfloat16":
            return _widened(codes, torch.bfloat16)
        case "float16":
            return _widened(codes, torch.float16)
        case "float8_e5m2":
            return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
        case "float8_e4m3":
            wide = codes.astype(np.uint32)
            bits = (wide & 0x80) << 24 | (wide & 0x7F) << 20
            values: Float32s = bits.view(np.float32) * np.float32(2.0**120)
            return values


def _widened(bits: NDArray[Any], dtype: torch.dtype) -> Float32s:
    """Numbers of 16 bits in float32, by torch: in numpy float16 takes ten times as long."""
    own = bits if bits.flags.writeable else bits.copy()  # torch warns of what is not
    wide: Float32s = torch.from_numpy(own).view(dtype).float().numpy()
    return wide


def _wide(numbers: NDArray[Any], number: Number) -> Float32s:
    """Scales or offsets in float32."""
    if number == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    if number == "e8m0":
        bits = numbers.astype(np.uint32) << 23
        bits[numbers == 0] = 1 << 22
        bits[numbers == 0xFF] = 0x7FC00000  # its NaN
        return bits.view(np.float32)
    return numbers.astype(np.float32)


BFLOAT16 = Format("bfloat16", 16, "bfloat16")
FLOAT16 = Format("float16", 16, "float16")
INT8_PER_CHANNEL = Format("int8_per_channel", 8, scale="float32")
FP8_PER_CHANNEL = Format("fp8_per_channel", 8, "float8_e4m3", scale="float32")
FP8_PER_BLOCK = Format("fp8_per_block", 8, "float8_e4m3", group=128, scale="float32")

# GGUF's, by its names: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
_FOUR_BIT_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*_FP4, *(-each for each in _FP4))
Q2_K = Format("q2_k", 4, group=16, scale="float16", offset="float16", supergroup=256)
Q3_K = Format("q3_k", 4, group=16, scale="float16", zero=4, supergroup=256)
Q8_0 = Format("q8_0", 8, group=32, scale="float16")
Q4_0 = Format("q4_0", 4, group=32, scale="float16", zero=8)
Q4_1 = Format("q4_1", 4, group=32, scale="float16", offset="float16")
Q5_0 = Format("q5_0", 5, group=32, scale="float16", zero=16)
Q5_1 = Format("q5_1", 5, group=32, scale="float16", offset="float16")
Q4_K = Format("q4_k", 4, group=32, scale="float16", offset="float16", supergroup=256)
Q5_K = Format("q5_k", 5, group=32, scale="float16", offset="float16", supergroup=256)
Q6_K = Format("q6_k", 6, group=16, scale="float16", zero=32, supergroup=256)
_LEVELS = tuple(map(float, _FOUR_BIT_LEVELS))
IQ4_NL = Format("iq4_nl", 4, _LEVELS, group=32, scale="float16")
IQ4_XS = Format("iq4_xs", 4, _LEVELS, group=32, scale="float16", supergroup=256)


def _signed(*magnitudes: float) -> tuple[float, ...]:
    """A table of up to 8 magnitudes, and then of these with a sign."""
    padded = (*magnitudes, *(0.0 for _ in range(8 - len(magnitudes))))
    return (*padded, *(-each for each in padded))


_OF_TWO_BITS = _signed(8 / 8, 25 / 8, 43 / 8)  # eighths, as factors are odd numbers here
IQ2_XXS = Format("iq2_xxs", 4, _OF_TWO_BITS, group=32, scale="float16", supergroup=256)
IQ2_XS = Format("iq2_xs", 4, _OF_TWO_BITS, group=16, scale="float16", supergroup=256)
IQ2_S = Format("iq2_s", 4, _OF_TWO_BITS, group=16, scale="float16", supergroup=256)
IQ3_XXS = Format(
    "iq3_xxs",
    4,
    _signed(*(each / 4 for each in (4, 12, 20, 28, 36, 44, 52, 62))),
    group=32,
    scale="float16",
    supergroup=256,
)
IQ3_S = Format(
    "iq3_s", 4, _signed(*map(float, range(1, 16, 2))), group=32, scale="float16", supergroup=256
)
MXFP4 = Format("mxfp4", 4, FP4_VALUES, group=32, scale="e8m0")
