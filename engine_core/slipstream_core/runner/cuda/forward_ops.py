"""Launches the Triton kernels of `forward_kernels`, as functions of tensors.

Importing this module does not import Triton; making ForwardOps does. Under Triton's interpreter
(TRITON_INTERPRET=1) the same code runs on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 1024  # elements that one program of silu_mul computes


class ForwardOps:
    """The operators that a fused forward has in place of torch's."""

    def __init__(self) -> None:
        from slipstream_core.runner.cuda import forward_kernels

        self._rms_norm: Any = forward_kernels.rms_norm
        self._silu_mul: Any = forward_kernels.silu_mul
        self._rotate: Any = forward_kernels.rotate

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounds: bool, offset: bool
    ) -> torch.Tensor:
        """The norm of x [1, T, N] or [1, T, heads, N] over its last dimension, contiguous.

        rounds: to x's type before the weight is applied. offset: the factor is 1 + weight.
        """
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x = _dense(x)
        arguments = norm_arguments(output, None, x, None, weight, epsilon, rounds, offset)
        self._rms_norm[(x.shape[1] * arguments["HEADS"],)](**arguments)
        return output

    def add_rms_norm(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        rounds: bool,
        offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + more, rounded to their type, and its norm; shapes as in `rms_norm`."""
        total, output = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        x, more = _dense(x), _dense(more)
        arguments = norm_arguments(output, total, x, more, weight, epsilon, rounds, offset)
        self._rms_norm[(x.shape[1] * arguments["HEADS"],)](**arguments)
        return total, output

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [1, T, N], contiguous."""
        output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        gate, up = _dense(gate), _dense(up)
        grid = (gate.shape[1], -(-gate.shape[2] // _BLOCK))
        self._silu_mul[grid](**gate_arguments(output, gate, up))
        return output

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """x * cos + (-x's second half, x's first half) * sin, of [1, heads, T, D] and [1, T, D].

        The result lies in memory with its tokens first.
        """
        _, heads, tokens, dim = x.shape
        output = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
        arguments = rotation_arguments(output, _dense(x), _dense(cosines), _dense(sines))
        self._rotate[(tokens * heads,)](**arguments)
        return output.transpose(0, 1)[None]


def norm_arguments(
    output: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    more: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    rounds: bool,
    offset: bool,
) -> dict[str, Any]:
    """The kernel's arguments; with `more`, the sum goes to `total`."""
    heads, n = x.shape[2] if x.dim() == 4 else 1, x.shape[-1]
    padded = 1 << (n - 1).bit_length()
    return {
        "output": output,
        "total": total,
        "x": x,
        "more": more,
        "weight": weight,
        "x_token": x.stride(1),
        "x_head": x.stride(2) if x.dim() == 4 else 0,
        "more_token": 0 if more is None else more.stride(1),
        "more_head": 0 if more is None or more.dim() == 3 else more.stride(2),
        "epsilon": epsilon,
        "HEADS": heads,
        "N": n,
        "PAD": padded,
        "ADD": more is not None,
        "ROUNDS": rounds,
        "OFFSET": offset,
        "num_warps": min(max(padded // 512, 1), 16),
    }


def gate_arguments(output: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> dict[str, Any]:
    """The kernel's arguments."""
    return {
        "output": output,
        "gate": gate,
        "up": up,
        "gate_token": gate.stride(1),
        "up_token": up.stride(1),
        "N": gate.shape[2],
        "BLOCK": _BLOCK,
    }


def rotation_arguments(
    output: torch.Tensor, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `ForwardOps.rotate`."""
    half = x.shape[3] // 2
    return {
        "output": output,
        "x": x,
        "cosines": cosines,
        "sines": sines,
        "x_token": x.stride(2),
        "x_head": x.stride(1),
        "cosine_token": cosines.stride(1),
        "sine_token": sines.stride(1),
        "HEADS": x.shape[1],
        "HALF": half,
        "PAD": 1 << (half - 1).bit_length(),
        "num_warps": 1,
    }


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
