"""Weights as bitsandbytes stores them: integers of 8 bits by rows, nf4 and fp4 by blocks of the
flattened matrix.

Of 8 bits, `SCB` has the largest number of each row: a weight is SCB / 127 times its integer, where
the quotient is a float32. (The package multiplies the integer first, which may round otherwise.)
Of 4 bits, a byte has two numbers of a table of 16, the first in the upper half. A block's largest
number is float32, or one of a table of 256 times the largest of 256 such, plus an offset (double
quantisation, `functional.QuantState`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import Codes, Format
from slipstream_core.model.quantised.tensors import (
    Array,
    QuantisedWeightError,
    Tensors,
    refuse_shape,
)
from slipstream_core.model.quantised.weight import QuantisedWeight, shared_group

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STORAGE = ("U8", "I8", "F16", "BF16", "F32")  # types of tensors that bytes are stored in
_TABLE, _NESTED_TABLE = 16, 256
_BY_BYTE = 7.874015718698502e-3  # 1 / 127, as the package has it


def read_bitsandbytes(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint. Raises QuantisedWeightError."""
    if settings.get("load_in_8bit"):
        return _of_bytes(tensors)
    if not settings.get("load_in_4bit"):
        raise QuantisedWeightError("neither load_in_4bit nor load_in_8bit is set")
    found = {}
    for name in tensors:
        weight, is_state, kind = name.partition(_STATE)
        if not is_state:
            continue
        if kind not in _KINDS:
            raise QuantisedWeightError(f"{name} is of type {kind!r}, allowed: nf4, fp4")
        found[weight] = _weight(tensors, weight, name, kind)
    for name in tensors:
        if name.endswith(".absmax") and name.removesuffix(".absmax") not in found:
            raise QuantisedWeightError(f"{name.removesuffix('.absmax')}{_STATE}nf4 is missing")
    return found


def _of_bytes(tensors: Tensors) -> dict[str, QuantisedWeight]:
    found = {}
    for name, header in tensors.headers.items():
        layer = name.removesuffix(".weight")
        if layer == name or header.dtype != "I8":
            continue
        largest, layout = f"{layer}.SCB", f"{layer}.weight_format"
        codes = tensors.array(name, "I8", ndim=2)
        numbers = _finite(largest, tensors.array(largest, "F32"))
        refuse_shape(largest, numbers.shape, (len(codes),))
        if layout in tensors and tensors.array(layout, "U8").any():
            raise QuantisedWeightError(f"{layout} is not 0, allowed: rows, which is 0")
        found[name] = _rows(codes, numbers, {name, largest, layout})
    return found


def _rows(codes: Array, largest: Array, used: set[str]) -> QuantisedWeight:
    scales = (largest * np.float32(_BY_BYTE))[:, None]
    form = Format("int8_float32", 8, scale="float32")
    num_outputs, num_inputs = codes.shape
    matrix = CodedMatrix(
        form,
        num_outputs,
        num_inputs,
        lambda rows: Codes(codes[rows], scales=scales[rows]),
        [codes],
    )
    return QuantisedWeight((num_outputs, num_inputs), matrix, frozenset(used))


def _weight(tensors: Tensors, name: str, state_name: str, kind: str) -> QuantisedWeight:
    state = _state(state_name, tensors.array(state_name, "U8"))
    block, shape = state["blocksize"], tuple(state["shape"])
    num_outputs, num_inputs = shape
    pairs = tensors.array(name, *_STORAGE).reshape(-1).view(np.uint8)
    if pairs.size != -(-prod(shape) // 2) or prod(shape) % 2:
        raise QuantisedWeightError(
            f"{name} has {pairs.size} bytes, allowed: {prod(shape) / 2:g} for {list(shape)}"
        )
    largest = _largest(tensors, name, state, -(-prod(shape) // block))
    table = _finite(f"{name}.quant_map", tensors.array(f"{name}.quant_map", "F32"))
    refuse_shape(f"{name}.quant_map", table.shape, (_TABLE,))
    group = shared_group(num_inputs, block)
    groups = np.arange(num_outputs * (num_inputs // group)) * group // block
    scales = largest[groups].reshape(num_outputs, -1)
    form = Format(kind, 4, tuple(map(float, table)), group=group, scale="float32")
    if group == num_inputs:
        form = Format(kind, 4, tuple(map(float, table)), scale="float32")

    def read(rows: Rows) -> Codes:
        if num_inputs % 2 == 0:
            some = pairs.reshape(num_outputs, -1)[rows]
            both = np.stack((some >> 4, some & 15), axis=-1).reshape(len(some), num_inputs)
        else:
            ids = np.arange(num_outputs)[rows] if isinstance(rows, slice) else rows
            places = ids[:, None] * num_inputs + np.arange(num_inputs)
            both = pairs[places // 2] >> (4 * (1 - places % 2)).astype(np.uint8) & 15
        return Codes(both, scales=scales[rows])

    matrix = CodedMatrix(form, num_outputs, num_inputs, read, [pairs])
    parts = (f"{name}.{each}" for each in _PARTS)
    return QuantisedWeight(shape, matrix, frozenset({name, state_name, *parts}))


def _state(name: str, given: Array) -> dict[str, Any]:
    try:
        state: Any = json.loads(given.tobytes())
        sizes = [state["blocksize"], *state["shape"]]
        if "nested_blocksize" in state:
            sizes.append(state["nested_blocksize"])
            float(state["nested_offset"])
        is_right = all(isinstance(each, int) and each > 0 for each in sizes)
        is_right = is_right and len(state["shape"]) == 2
    except (ValueError, KeyError, TypeError) as error:
        raise QuantisedWeightError(f"{name} is damaged ({error})") from None
    if not is_right:
        raise QuantisedWeightError(f"{name} has sizes {sizes}, allowed: of a matrix")
    found: dict[str, Any] = state
    return found


def _largest(tensors: Tensors, name: str, state: Mapping[str, Any], num_blocks: int) -> Array:
    """The largest number of each block, float32."""
    absmax = f"{name}.absmax"
    if "nested_blocksize" not in state:
        found = tensors.array(absmax, "F32").reshape(-1)
        refuse_shape(absmax, found.shape, (num_blocks,))
        return _finite(absmax, found)
    codes = tensors.array(absmax, "U8").reshape(-1)
    refuse_shape(absmax, codes.shape, (num_blocks,))
    table = tensors.array(f"{name}.nested_quant_map", "F32")
    refuse_shape(f"{name}.nested_quant_map", table.shape, (_NESTED_TABLE,))
    outer = tensors.array(f"{name}.nested_absmax", "F32").reshape(-1)
    size = state["nested_blocksize"]
    refuse_shape(f"{name}.nested_absmax", outer.shape, (-(-num_blocks // size),))
    of_blocks = table[codes] * np.repeat(outer, size)[:num_blocks]
    return _finite(absmax, of_blocks + np.float32(state["nested_offset"]))


def _finite(name: str, numbers: Array) -> Array:
    if not np.isfinite(numbers).all():
        raise QuantisedWeightError(f"{name} has a number that is not finite")
    return numbers
