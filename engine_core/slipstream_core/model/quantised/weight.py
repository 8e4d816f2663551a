"""A quantised weight as a coded matrix, and the scales that checkpoints have beside codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import Number
from slipstream_core.model.quantised.tensors import (
    Array,
    QuantisedWeightError,
    Tensors,
    refuse_beyond,
)

_NUMBERS: dict[str, Number] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A parameter of some shape; its rows, all dimensions but the last, are those of `matrix`.

    used: names of the tensors that it is made of.
    order: the input that each column of the matrix belongs to, where that is not its own number.
    is_turned: it is [experts, K, N], while the matrix has the outputs of all experts as its rows.
    """

    shape: tuple[int, ...]
    matrix: CodedMatrix
    used: frozenset[str]
    order: NDArray[np.int64] | None = None
    is_turned: bool = False

    def dequantised(self, rows: slice | None = None) -> torch.Tensor:
        """The parameter in float32, or some rows of a matrix."""
        if rows is None:
            values = self.matrix.dequantised()
        else:
            values = self.matrix.rows(torch.arange(*rows.indices(self.matrix.num_outputs)))
        if self.order is not None:
            found = torch.empty_like(values)
            found[:, torch.from_numpy(self.order)] = values
            values = found
        if self.is_turned:
            experts, num_inputs, num_outputs = self.shape
            by_expert = values.reshape(experts, num_outputs, num_inputs)
            return by_expert.transpose(1, 2).contiguous()
        return values.reshape(self.shape) if rows is None else values


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of a weight [N, K]. group: inputs that share one, 0: all of a row.

    of_rows gives those of some rows, [n, groups].
    """

    number: Number
    group: int
    of_rows: Callable[[Rows], Array]


def scales_of(
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...],
    *,
    block: tuple[int, int] | None = None,
    group: int = 0,
    is_e8m0: bool = False,
) -> Scales:
    """The scales `name` of a weight [..., N, K]: one, one for each row, or one for each block of so
    many rows and columns, of which the last may be cut off.

    group: columns of a block that is one row high. Raises QuantisedWeightError.
    """
    types = ("U8", "F8_E8M0") if is_e8m0 else ("F32", "BF16", "F16", "F8_E8M0")
    numbers = tensors.array(name, *types)
    number = _NUMBERS[tensors.headers[name].dtype]
    _refuse_infinite(name, numbers, number)
    *outer, num_outputs, num_inputs = shape
    given = tuple(each for each in numbers.shape if each != 1)
    if group:
        block = (1, group)
    if block is None:
        if not given:
            return Scales(number, 0, _rows(np.broadcast_to(numbers.reshape(1, 1), (1, 1)), shape))
        allowed = (*outer, num_outputs)
        # not [..., 1, N]: with as many inputs as outputs it would be taken for one of inputs
        if numbers.shape not in (allowed, (*allowed, 1)):
            raise QuantisedWeightError(
                f"{name} has the shape {list(numbers.shape)}, allowed: one number, or "
                f"{list(allowed)}"
            )
        return Scales(number, 0, _rows(numbers.reshape(-1, 1), shape))
    height, width = block
    parts = (*outer, -(-num_outputs // height), -(-num_inputs // width))
    if given != tuple(each for each in parts if each != 1):
        why = ""
        if block != (1, 1):
            sizes = " x ".join(map(str, shape))
            why = f", as the weight is {sizes} in blocks of {height} x {width}"
        raise QuantisedWeightError(
            f"{name} has the shape {list(numbers.shape)}, allowed: {list(parts)}{why}"
        )
    return Scales(number, width, _rows(numbers.reshape(-1, parts[-1]), shape, height))


def _rows(numbers: Array, shape: tuple[int, ...], height: int = 1) -> Callable[[Rows], Array]:
    """The scales of rows, of which `height` share a row of `numbers`."""
    num_outputs = shape[-2]
    all_rows = num_outputs * int(np.prod(shape[:-2], dtype=np.int64))
    if len(numbers) == 1:
        return lambda rows: np.repeat(numbers, len(_numbers_of(rows, all_rows)), axis=0)
    if height == 1:
        return lambda rows: numbers[rows]
    each = -(-num_outputs // height)

    def of_rows(rows: Rows) -> Array:
        ids = _numbers_of(rows, all_rows)
        found: Array = numbers[ids // num_outputs * each + ids % num_outputs // height]
        return found

    return of_rows


def _numbers_of(rows: Rows, num_rows: int) -> NDArray[np.int64]:
    """Rows as their numbers."""
    return np.arange(*rows.indices(num_rows)) if isinstance(rows, slice) else rows


def _refuse_infinite(name: str, numbers: Array, number: Number) -> None:
    if number == "e8m0":
        finite = bool((numbers != 0xFF).all())
    elif number == "bfloat16":
        finite = bool((numbers & 0x7F80 != 0x7F80).all())
    else:
        finite = bool(np.isfinite(numbers).all())
    if not finite:
        raise QuantisedWeightError(f"{name} has a number that is not finite")


def order_of_groups(
    tensors: Tensors, name: str, num_inputs: int, group: int
) -> NDArray[np.int64] | None:
    """The inputs in the order of the groups that the tensor `name` [K] puts them into; None where
    neighbours share a group. Raises QuantisedWeightError.
    """
    if name not in tensors:
        return None
    groups = tensors.array(name, "I32", "I64", ndim=1)
    if len(groups) != num_inputs:
        raise QuantisedWeightError(f"{name} has {len(groups)} numbers, allowed: {num_inputs}")
    if (groups == -1).all():  # as it is made before groups are known
        return None
    refuse_beyond(name, 0, -(-num_inputs // group) - 1, groups)
    natural = np.arange(num_inputs) // group
    if (groups == natural).all():
        return None
    order = np.argsort(groups, kind="stable").astype(np.int64)
    if not (groups[order] == natural).all():
        raise QuantisedWeightError(f"{name} has groups that are not of {group} inputs each")
    return order


def whole_groups(num_inputs: int, group: int) -> int:
    """The size of groups of a row: `group`, or 0 where it is all of the row."""
    return 0 if group in (0, -1) or group >= num_inputs else group


def shared_group(num_inputs: int, block: int) -> int:
    """The most inputs of a row that always share a block, where blocks run over rows' ends."""
    return gcd(num_inputs, block)
