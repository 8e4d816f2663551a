"""Products with one row, and experts of a few, by the Triton kernels of `row_product_kernels`.

Importing this module does not import Triton; the first launch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

# As an H100 chose for the matrices of Llama-3.1-8B and Qwen3-0.6B
# (benchmarks/gpu/by-hand-2026-11-27.md).
_MOST_COLUMNS = 2048  # of a matrix, that a program reads at once
_LEAST_COLUMNS = 256  # fewer are left to torch
_NUMBERS = 4096  # that a program reads at once; half as many of long rows
_MANY_COLUMNS = 8192  # of a long row
_LEAST_EXPERT_COLUMNS = 128  # several experts' are read at once
_ALIKE = 4  # several tokens choose at most one of so many experts: few are read twice
_LEAST_PROGRAMS = 768  # fewer do not keep the memory busy
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GATES = ("silu", "gelu", "tanh gelu")  # as the kernels number them


class RowNorm(NamedTuple):
    """A norm of the row before it is multiplied; see `ForwardOps.rms_norm`."""

    weight: torch.Tensor  # [K]
    epsilon: float
    rounds: bool
    offset: bool
    kept: torch.Tensor | None = None  # K numbers: the norm is written to it


class RowSum(NamedTuple):
    """A vector that is added to the row before anything else."""

    more: torch.Tensor  # K numbers
    total: torch.Tensor  # K numbers: the sum is written to it


class _Blocks(NamedTuple):
    """The part of a matrix that one program computes."""

    rows: int
    columns: int
    num_warps: int


def has_row_kernel(weight: torch.Tensor, gate: str | None = None) -> bool:
    """True if the kernel can multiply a row with this matrix [N, K]."""
    if weight.dim() != 2 or not weight.is_contiguous() or weight.dtype not in _DTYPES:
        return False
    n, k = weight.shape
    return n > 0 and _blocks(n if gate is None else n // 2, k) is not None


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    more: torch.Tensor | None = None,
    before: RowSum | None = None,
    norm: RowNorm | None = None,
    gate: str | None = None,
) -> torch.Tensor:
    """weight [N, K] times x, K numbers of any shape, plus bias [N]; `more`, N numbers, added.

    before: is added to x first. norm: of the sum. gate: an activation of the first half of what is
    multiplied, times the second. Returns [1, 1, N], with a gate [1, 1, N / 2], rounded where
    torch's operators would. For matrices that `has_row_kernel`.
    """
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    output = torch.empty((1, 1, n), dtype=x.dtype, device=x.device)
    if output.is_meta:
        return output
    kernels, early = _triton()
    arguments = row_product_arguments(output, x, weight, bias, more, before, norm, gate)
    kernels.row_product[(n // arguments["BLOCK_N"],)](**arguments, **early(x.device, 1))
    return output


def row_product_arguments(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    more: torch.Tensor | None,
    before: RowSum | None,
    norm: RowNorm | None,
    gate: str | None,
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `row_product`."""
    return {
        "output": output,
        "x": x,
        "weight": weight,
        "bias": bias,
        "more": more,
        "norm_weight": None if norm is None else norm.weight,
        "normed": None if norm is None else norm.kept,
        "before": None if before is None else before.more,
        "total": None if before is None else before.total,
        "epsilon": 0.0 if norm is None else norm.epsilon,
        **_form(
            output.shape[-1],
            weight.shape[1],
            before is not None,
            None if norm is None else (norm.rounds, norm.offset, norm.kept is not None),
            bias is not None,
            more is not None,
            gate,
        ),
    }


@cache
def _form(
    n: int,
    k: int,
    is_sum: bool,
    norm: tuple[bool, bool, bool] | None,
    has_bias: bool,
    adds: bool,
    gate: str | None,
) -> dict[str, Any]:
    blocks = _blocks(n, k)
    assert blocks is not None
    return {
        "N": n,
        "K": k,
        "PAD": power_of_two(k),
        "SUM": is_sum,
        "NORM": norm is not None,
        "ROUNDS": norm is not None and norm[0],
        "OFFSET": norm is not None and norm[1],
        "KEEP": norm is not None and norm[2],
        "BIAS": has_bias,
        "ADD": adds,
        "GATE": -1 if gate is None else _GATES.index(gate),
        "BLOCK_N": blocks.rows,
        "BLOCK_K": blocks.columns,
        "num_warps": blocks.num_warps,
    }


def _blocks(n: int, k: int) -> _Blocks | None:
    columns = min(k & -k, _MOST_COLUMNS)
    if columns < _LEAST_COLUMNS:
        return None
    numbers = _NUMBERS if k <= _MANY_COLUMNS else _NUMBERS // 2
    return _Blocks(_rows(n, numbers // columns), columns, 4)


def _rows(n: int, most: int, times: int = 1) -> int:
    """The rows of one program, out of n; every program is launched `times` times."""
    rows = min(n & -n, most)
    while rows > 1 and n // rows * times < _LEAST_PROGRAMS:
        rows //= 2
    return rows


def has_expert_kernels(
    num_tokens: int, ids: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> bool:
    """True if `expert_rows` supports this number of tokens and these matrices."""
    if num_tokens != 1 and not 0 < _ALIKE * num_tokens * ids.shape[1] <= len(down):
        return False
    if up.dtype not in _DTYPES or not (up.is_contiguous() and down.is_contiguous()):
        return False
    return min(_columns_at_once(up.shape[2]), _columns_at_once(down.shape[2])) > 0


def expert_rows(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate: str,
    more: torch.Tensor | None,
) -> torch.Tensor:
    """Each token's experts, weighed and summed, [T, N]; shapes as in `ForwardOps.experts`.

    For what `has_expert_kernels`.
    """
    num_tokens = len(ids)
    middle = torch.empty((ids.numel(), down.shape[2]), dtype=x.dtype, device=x.device)
    output = torch.empty((num_tokens, down.shape[1]), dtype=x.dtype, device=x.device)
    if output.is_meta:
        return output
    kernels, early_of = _triton()
    early = early_of(x.device, num_tokens)
    gates = expert_gates_arguments(middle, x, ids, up, gate)
    grid = middle.shape[1] // gates["BLOCK_N"], len(middle)
    kernels.expert_gates[grid](**gates, **early)
    sums = expert_sums_arguments(output, middle, weights, ids, down, more)
    kernels.expert_sums[output.shape[1], num_tokens](**sums, **early)
    return output


def expert_gates_arguments(
    output: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, up: torch.Tensor, gate: str
) -> dict[str, Any]:
    """The kernel's arguments. output: [T * chosen, I], of x [T, K] and up [experts, 2 * I, K]."""
    num, n = output.shape
    columns = _columns_at_once(up.shape[2])
    return {
        "output": output,
        "x": x,
        "ids": ids,
        "weight": up,
        "N": n,
        "K": up.shape[2],
        "CHOSEN": ids.shape[1],
        "GATE": _GATES.index(gate),
        "BLOCK_N": _rows(n, _NUMBERS // columns, num),
        "BLOCK_K": columns,
        "num_warps": 4,
    }


def expert_sums_arguments(
    output: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    more: torch.Tensor | None,
) -> dict[str, Any]:
    """The kernel's arguments. output: [T, N], of x [T * chosen, I] and down [experts, N, I]."""
    chosen = ids.shape[1]
    padded = power_of_two(chosen)
    columns = min(_columns_at_once(down.shape[2]), max(_NUMBERS // padded, _LEAST_EXPERT_COLUMNS))
    return {
        "output": output,
        "x": x,
        "weights": weights,
        "ids": ids,
        "weight": down,
        "more": more,
        "N": down.shape[1],
        "K": down.shape[2],
        "CHOSEN": chosen,
        "PAD": padded,
        "ADD": more is not None,
        "WIDE": weights.dtype != x.dtype,
        "BLOCK_K": columns,
        "num_warps": 4,
    }


def power_of_two(num: int) -> int:
    """The next one, at least 1."""
    return 1 << (num - 1).bit_length()


def _columns_at_once(k: int) -> int:
    """The columns of an expert's matrix that are read at once, out of k; 0 if torch computes it."""
    columns = min(k & -k, _MOST_COLUMNS)
    return columns if columns >= _LEAST_EXPERT_COLUMNS else 0


@cache
def _triton() -> tuple[ModuleType, Callable[[torch.device, int], dict[str, Any]]]:
    from slipstream_core.kernels.card import row_product_kernels
    from slipstream_core.kernels.card.dependent_launch import early

    return row_product_kernels, early
