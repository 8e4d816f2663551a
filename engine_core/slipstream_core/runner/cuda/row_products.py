"""Products with one row, by the Triton kernel of `row_product_kernels`.

Importing this module does not import Triton; the first launch does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

# As an H100 chose for the matrices of Llama-3.1-8B and Qwen3-0.6B
# (benchmarks/gpu/by-hand-2026-11-27.md).
_MOST_COLUMNS = 2048  # of a matrix, that a program reads at once
_LEAST_COLUMNS = 256  # fewer are left to torch
_NUMBERS = 4096  # that a program reads at once; half as many of long rows
_MANY_COLUMNS = 8192  # of a long row
_LEAST_PROGRAMS = 768  # fewer do not keep the memory busy
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GATES = ("silu", "gelu", "tanh gelu")  # as the kernels number them


class RowNorm(NamedTuple):
    """A norm of the row before it is multiplied; see `ForwardOps.rms_norm`."""

    weight: torch.Tensor  # [K]
    epsilon: float
    rounds: bool
    offset: bool


class _Blocks(NamedTuple):
    """What one program has of a matrix."""

    rows: int
    columns: int
    num_warps: int


def has_row_kernel(weight: torch.Tensor, gate: str | None = None) -> bool:
    """Whether a matrix [N, K] can be multiplied with a row by the kernel."""
    if weight.dim() != 2 or not weight.is_contiguous() or weight.dtype not in _DTYPES:
        return False
    n, k = weight.shape
    return _blocks(n if gate is None else n // 2, k) is not None


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    more: torch.Tensor | None = None,
    norm: RowNorm | None = None,
    gate: str | None = None,
) -> torch.Tensor:
    """weight [N, K] times x, K numbers of any shape, plus bias [N]; `more`, N numbers, added.

    norm: of x. gate: an activation of the first half of what is multiplied, times the second.
    Returns [1, 1, N], with a gate [1, 1, N / 2], rounded where torch's operators would. For
    matrices that `has_row_kernel`.
    """
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    output = torch.empty((1, 1, n), dtype=x.dtype, device=x.device)
    if output.is_meta:
        return output
    kernel, early = _triton()
    arguments = row_product_arguments(output, x, weight, bias, more, norm, gate)
    kernel[(n // arguments["BLOCK_N"],)](**arguments, **early(x.device, 1))
    return output


def row_product_arguments(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    more: torch.Tensor | None,
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
        "epsilon": 0.0 if norm is None else norm.epsilon,
        **_form(
            output.shape[-1],
            weight.shape[1],
            None if norm is None else (norm.rounds, norm.offset),
            bias is not None,
            more is not None,
            gate,
        ),
    }


@cache
def _form(
    n: int,
    k: int,
    norm: tuple[bool, bool] | None,
    has_bias: bool,
    adds: bool,
    gate: str | None,
) -> dict[str, Any]:
    blocks = _blocks(n, k)
    assert blocks is not None
    return {
        "N": n,
        "K": k,
        "PAD": 1 << (k - 1).bit_length(),
        "NORM": norm is not None,
        "ROUNDS": norm is not None and norm[0],
        "OFFSET": norm is not None and norm[1],
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
    rows = min(n & -n, numbers // columns)
    while rows > 1 and n // rows < _LEAST_PROGRAMS:
        rows //= 2
    return _Blocks(rows, columns, 4)


@cache
def _triton() -> tuple[Any, Callable[[torch.device, int], dict[str, Any]]]:
    from slipstream_core.runner.cuda.row_product_kernels import row_product as kernel
    from slipstream_core.runner.dependent_launch import early

    return kernel, early
