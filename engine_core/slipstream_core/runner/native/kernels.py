"""The compiled kernels as functions of tensors.

Owns the translation from tensors to pointers and strides. Knows no model and no step.

Rules:
- Tensors are float32 on the CPU; a last dimension with a stride other than 1 is made dense first.
- Small kernels keep the GIL: giving it up costs more than they take. Attention gives it up.
- They run in torch's team: as many threads as torch.set_num_threads has said in this thread.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from slipstream_core.runner.native.build import library

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Decode(ctypes.Structure):
    """kernels.c's Decode; its comments say what the fields mean."""

    _fields_ = (
        ("key", _Pointer),
        ("value", _Pointer),
        ("key_token", _Int),
        ("key_head", _Int),
        ("value_token", _Int),
        ("value_head", _Int),
        ("slots", _Pointer),
        ("tokens", _Int),
        ("query", _Pointer),
        ("query_row", _Int),
        ("query_head", _Int),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("tables", _Pointer),
        ("widest", _Int),
        ("lens", _Pointer),
        ("output", _Pointer),
        ("sinks", _Pointer),
        ("rows", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("key_dim", _Int),
        ("value_dim", _Int),
        ("block_size", _Int),
        ("window", _Int),
        ("scale", _Float),
        ("softcap", _Float),
    )


class Kernels:
    """The library's functions. `attend` takes a Decode by reference."""

    def __init__(self, path: str) -> None:
        holding, releasing = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.attend = releasing.slipstream_attend
        self.attend.argtypes, self.attend.restype = (_Pointer,), None
        self._rms_norm = holding.slipstream_rms_norm
        self._rms_norm.argtypes = (_Pointer, _Int, _Pointer, _Pointer, _Int, _Int, _Float)
        self._silu_mul = holding.slipstream_silu_mul
        self._silu_mul.argtypes = (_Pointer, _Int, _Pointer, _Int, _Pointer, _Int, _Int)
        self._rotate = holding.slipstream_rotate
        self._rotate.argtypes = (
            _Pointer,
            _Int,
            _Int,
            _Pointer,
            _Pointer,
            _Pointer,
            _Int,
            _Int,
            _Int,
        )
        for function in (self._rms_norm, self._silu_mul, self._rotate):
            function.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """weight * x / sqrt(mean(x²) + epsilon) over the last dimension; weight is dense."""
        x = dense(x)
        output = torch.empty_like(x)
        dim = x.shape[-1]
        self._rms_norm(
            x.data_ptr(),
            dim,
            weight.data_ptr(),
            output.data_ptr(),
            x.numel() // dim,
            dim,
            epsilon,
        )
        return output

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, both [1, rows, dim] with any row stride."""
        gate, up = dense_rows(gate), dense_rows(up)
        _, rows, dim = gate.shape
        output = gate.new_empty(1, rows, dim)
        self._silu_mul(
            gate.data_ptr(),
            gate.stride(1),
            up.data_ptr(),
            up.stride(1),
            output.data_ptr(),
            rows,
            dim,
        )
        return output

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """x * cos + rotate_half(x) * sin; x [T, heads, dim], cos and sin [..., T, dim]."""
        x, cosines, sines = dense_rows(x), dense(cosines), dense(sines)
        tokens, heads, dim = x.shape
        output = x.new_empty(tokens, heads, dim)
        self._rotate(
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            cosines.data_ptr(),
            sines.data_ptr(),
            output.data_ptr(),
            tokens,
            heads,
            dim,
        )
        return output


def dense(x: torch.Tensor) -> torch.Tensor:
    """The same values without gaps."""
    return x if x.is_contiguous() else x.contiguous()


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The same values, with stride 1 in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine, or None where they could not be compiled."""
    path = library()
    return None if path is None else Kernels(str(path))
