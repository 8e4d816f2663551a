"""Formats of coded matrices as coded.h numbers them, and their packing into its panels."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.formats import Format

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64

_SUB = 32  # inputs whose codes stand together
_MAX_BLOCK = 256
_KINDS = {
    ("bfloat16", 16): 1,
    ("float16", 16): 2,
    ("integer", 8): 3,
    ("float8_e4m3", 8): 4,
    ("float8_e5m2", 8): 5,
    ("unsigned", 8): 6,
    ("integer", 4): 7,
    ("integer", 5): 8,
    ("integer", 6): 9,
}
_TABLE = 10
_NUMBERS = {None: 0, "float16": 1, "bfloat16": 2, "float32": 3, "e8m0": 4}
_ZERO, _ZEROS, _OFFSETS = 1, 2, 3
_MAX_ZERO = 255


class PackCodes(ctypes.Structure):
    """PackCodes of coded.c, which documents the fields."""

    _fields_ = (
        ("codes", _Pointer),
        ("scales", _Pointer),
        ("offsets", _Pointer),
        ("factors", _Pointer),
        ("offset_factors", _Pointer),
        ("zeros", _Pointer),
        ("n", _Int),
        ("k", _Int),
        ("first", _Int),
        ("num_scales", _Int),
        ("num_groups", _Int),
        ("of_scale", _Int),
        ("of_group", _Int),
        ("format", _Int),
        ("packed", _Pointer),
    )


def panel_format(form: Format) -> int | None:
    """The number of the panels that hold rows of this format; None if none can.

    Groups whose size does not fit are cut into equal ones that do. A kernel computes a zero as an
    offset, which rounds once more under a float32 scale: 4 bits become a table then, and others
    have no panels.
    """
    is_table = table_of(form) is not None
    kind = _TABLE if is_table else _KINDS[str(form.values), form.bits]
    if form.bits == 16:
        return _number(kind, _SUB, _SUB)
    offset = 0
    if form.zero and not is_table:
        offset = _ZERO
        if not 0 < form.zero <= _MAX_ZERO or form.scale == "float32":
            return None
    elif form.has_zeros:
        offset = _ZEROS
        if form.scale == "float32":
            return None
    elif form.offset is not None:
        offset = _OFFSETS
        if form.offset != form.scale:
            return None
    group = math.gcd(form.group, _MAX_BLOCK)  # of 0, a row: the largest, of which the last is cut
    if form.supergroup:
        if form.supergroup != _MAX_BLOCK or form.group not in (16, _SUB):
            return None
        block = _MAX_BLOCK
    else:
        if group < 16:
            return None
        block = max(group, _SUB)
    number = _number(kind, block, group, form.zero if offset == _ZERO else 0)
    return number | (form.supergroup > 0) << 12 | offset << 8 | _NUMBERS[form.scale] << 4


def table_of(form: Format) -> tuple[float, ...] | None:
    """The values of codes, where panels of this format begin with them."""
    if isinstance(form.values, tuple):
        return form.values
    if form.bits == 4 and form.zero and form.scale == "float32":
        return tuple(float(code - form.zero) for code in range(16))
    return None


def _number(kind: int, block: int, group: int, zero: int = 0) -> int:
    return group << 36 | block << 24 | zero << 16 | kind


def pack_into(packed: int, number: int, matrix: CodedMatrix, pack: Any) -> None:
    """Fill zeros at the address `packed` with the panels of a matrix; pack: slipstream_pack_codes.

    Raises ValueError for numbers that are not finite.
    """
    form, num_inputs = matrix.format, matrix.num_inputs
    for first, part in matrix.parts():
        held = [
            None if each is None else np.ascontiguousarray(each)
            for each in (
                part.codes,
                part.scales,
                part.offsets,
                part.scale_factors,
                part.offset_factors,
                part.zeros,
            )
        ]
        at = [None if each is None else each.ctypes.data for each in held]
        group = form.group or num_inputs
        call = PackCodes(
            *at,
            n=len(part.codes),
            k=num_inputs,
            first=first,
            num_scales=form.num_scales(num_inputs),
            num_groups=form.num_groups(num_inputs),
            of_scale=form.supergroup or group,
            of_group=group,
            format=number,
            packed=packed,
        )
        pack(ctypes.addressof(call))
