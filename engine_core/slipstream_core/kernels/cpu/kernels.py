"""The compiled kernels as functions of tensors.

- Tensors are float32 on the CPU; a last dimension with a stride other than 1 is made dense first.
- Small kernels keep the GIL, as releasing it costs more than they take. Attention, and any call
  large enough for a team, releases it.
- The kernels run in their own team of threads (team.c), of the size that the calling thread has set
  with `set_threads`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.cpu.c_library import library
from slipstream_core.kernels.cpu.coded_panels import pack_into, panel_format, table_of

logger = logging.getLogger(__name__)

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

RouteNumbers = tuple[int, str, str, float, float, int, int, int]  # RouteForm's fields
SCORES = ("logits", "softmax", "sigmoid")
WEIGHS = ("scores", "sum", "softmax")
ACTIVATIONS = ("silu", "gelu", "tanh gelu", "clamped swiglu")  # of gates

_LINE = 16  # floats
_LARGE = 1 << 18  # multiplications, about 20 µs
_ROWS_AT_ONCE = 512  # of experts, whose scratch is several times that of their inputs
_CHUNK = 1 << 14  # elements of a row-wise operation; ROW_CHUNK in kernels.h


class Decode(ctypes.Structure):
    """Decode of kernels.c, which documents the fields."""

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
        ("table_rows", _Pointer),
        ("lens", _Pointer),
        ("tiles", _Pointer),
        ("num_tiles", _Int),
        ("output", _Pointer),
        ("sinks", _Pointer),
        ("rows", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("key_dim", _Int),
        ("value_dim", _Int),
        ("block_size", _Int),
        ("window", _Int),
        ("chunk", _Int),
        ("scale", _Float),
        ("softcap", _Float),
        ("cache", _Int),
    )


class Mixing(ctypes.Structure):
    """Mixing of kernels.h, which documents the fields."""

    _fields_ = (
        ("rows", _Int),
        ("segments", _Pointer),
        ("tokens", _Pointer),
        ("saved", _Pointer),
        ("slots", _Pointer),
        ("reads", _Pointer),
        ("begins", _Pointer),
        ("prompts", _Pointer),
    )


class Convolve(ctypes.Structure):
    """Convolve of kernels.h, which documents the fields."""

    _fields_ = (
        ("mixing", _Pointer),
        ("x", _Pointer),
        ("x_token", _Int),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("output", _Pointer),
        ("states", _Pointer),
        ("state_size", _Int),
        ("channels", _Int),
        ("taps", _Int),
        ("activates", _Int),
    )


class Recur(ctypes.Structure):
    """Recur of kernels.h, which documents the fields."""

    _fields_ = (
        ("mixing", _Pointer),
        ("query", _Pointer),
        ("key", _Pointer),
        ("value", _Pointer),
        ("decay", _Pointer),
        ("strength", _Pointer),
        ("skip", _Pointer),
        ("rates", _Pointer),
        ("output", _Pointer),
        ("states", _Pointer),
        ("query_token", _Int),
        ("key_token", _Int),
        ("value_token", _Int),
        ("decay_token", _Int),
        ("strength_token", _Int),
        ("state_size", _Int),
        ("key_heads", _Int),
        ("heads", _Int),
        ("key_dim", _Int),
        ("value_dim", _Int),
        ("is_delta", _Int),
        ("decays_by_key", _Int),
        ("scale", _Float),
        ("epsilon", _Float),
        ("least", _Float),
        ("most", _Float),
    )


class PackedProduct(ctypes.Structure):
    """Product of products.c."""

    _fields_ = (
        ("x", _Pointer),
        ("x_row", _Int),
        ("packed", _Pointer),
        ("bias", _Pointer),
        ("more", _Pointer),
        ("more_row", _Int),
        ("y", _Pointer),
        ("y_row", _Int),
        ("rows", _Int),
        ("n", _Int),
        ("k", _Int),
        ("format", _Int),
    )


class PackedProducts(ctypes.Structure):
    """Products of kernels.h, which documents the fields."""

    _fields_ = (
        ("first", PackedProduct),
        ("count", _Int),
        ("x_apart", _Int),
        ("y_apart", _Int),
        ("packed_bytes", _Int),
    )


class Adapted(ctypes.Structure):
    """Adapted of kernels.h, which documents the fields."""

    _fields_ = (
        ("a", _Pointer),
        ("b", _Pointer),
        ("rank", _Int),
        ("a_kind", _Int),
        ("b_kind", _Int),
    )


class Adapt(ctypes.Structure):
    """Adapt of adapters.c, which documents the fields."""

    _fields_ = (
        ("x", _Pointer),
        ("x_row", _Int),
        ("y", _Pointer),
        ("y_row", _Int),
        ("rows", _Int),
        ("k", _Int),
        ("n", _Int),
        ("adapters", _Pointer),
        ("adapted", _Pointer),
        ("apart", _Int),
    )


class Route(ctypes.Structure):
    """Route of kernels.h, which documents the fields."""

    _fields_ = (
        ("logits", _Pointer),
        ("logits_row", _Int),
        ("bias", _Pointer),
        ("chosen_weights", _Pointer),
        ("ids", _Pointer),
        ("rows", _Int),
        ("experts", _Int),
        ("chosen", _Int),
        ("scores", _Int),
        ("weighs", _Int),
        ("groups", _Int),
        ("chosen_groups", _Int),
        ("best_of_group", _Int),
        ("scale", _Float),
        ("epsilon", _Float),
    )


class Experts(ctypes.Structure):
    """Experts of kernels.h, which documents the fields."""

    _fields_ = (
        ("x", _Pointer),
        ("x_row", _Int),
        ("weights", _Pointer),
        ("ids", _Pointer),
        ("weights_row", _Int),
        ("ids_row", _Int),
        ("up", _Pointer),
        ("down", _Pointer),
        ("up_bytes", _Int),
        ("down_bytes", _Int),
        ("up_bias", _Pointer),
        ("down_bias", _Pointer),
        ("y", _Pointer),
        ("y_row", _Int),
        ("scratch", _Pointer),
        ("rows", _Int),
        ("experts", _Int),
        ("chosen", _Int),
        ("k", _Int),
        ("inner", _Int),
        ("n", _Int),
        ("up_format", _Int),
        ("down_format", _Int),
        ("is_gated", _Int),
        ("activation", _Int),
        ("alpha", _Float),
        ("limit", _Float),
    )


class Kernels:
    """The library's functions. `attend`, `convolve`, `recur` and `adapt` take the address of the
    structure of that name (Decode), `run` an _OperationRun's.
    """

    def __init__(self, path: str) -> None:
        holding, releasing = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.attend = releasing.slipstream_attend
        self.attend.argtypes, self.attend.restype = (_Pointer,), None
        self.convolve = releasing.slipstream_convolve
        self.convolve.argtypes, self.convolve.restype = (_Pointer,), None
        self.recur = releasing.slipstream_recur
        self.recur.argtypes, self.recur.restype = (_Pointer,), None
        self.adapt = releasing.slipstream_adapt
        self.adapt.argtypes, self.adapt.restype = (_Pointer,), None
        self.run = releasing.slipstream_run
        self.run.argtypes, self.run.restype = (_Pointer,), ctypes.c_int
        self._set_threads = holding.slipstream_set_threads
        self._set_threads.argtypes, self._set_threads.restype = (_Int,), None
        self._present = holding.slipstream_present
        self._present.argtypes, self._present.restype = (), _Int
        self._rms_norm = _both(
            holding.slipstream_rms_norm,
            releasing.slipstream_rms_norm,
            (_Pointer, _Int, _Pointer, _Pointer, _Int, _Int, _Float),
        )
        self._silu_mul = _both(
            holding.slipstream_silu_mul,
            releasing.slipstream_silu_mul,
            (_Pointer, _Int, _Pointer, _Int, _Pointer, _Int, _Int),
        )
        of_each = (_Pointer, _Pointer, _Int, _Int)
        self._sigmoid = _both(
            holding.slipstream_sigmoid_of, releasing.slipstream_sigmoid_of, of_each
        )
        self._softplus = _both(
            holding.slipstream_softplus_of, releasing.slipstream_softplus_of, of_each
        )
        self._rotate = _both(
            holding.slipstream_rotate,
            releasing.slipstream_rotate,
            (_Pointer, _Int, _Int, _Pointer, _Pointer, _Pointer, _Int, _Int, _Int, _Int),
        )
        self._product = _both(
            holding.slipstream_product_alone, releasing.slipstream_product, (_Pointer,)
        )
        self._products = releasing.slipstream_products
        self._products.argtypes, self._products.restype = (_Pointer,), None
        self._pack = releasing.slipstream_pack
        self._pack.argtypes = (_Pointer, _Int, _Int, _Int, _Int, _Pointer)
        self._pack.restype = None
        self._pack_codes = releasing.slipstream_pack_codes
        self._pack_codes.argtypes, self._pack_codes.restype = (_Pointer,), None
        self._coded_bytes = holding.slipstream_coded_bytes
        self._coded_bytes.argtypes, self._coded_bytes.restype = (_Int, _Int, _Int), _Int
        self._coded_rows = holding.slipstream_coded_rows
        self._coded_rows.argtypes = (_Int, _Pointer, _Int, _Pointer, _Int, _Pointer)
        self._coded_rows.restype = None
        self._route = releasing.slipstream_route
        self._route.argtypes, self._route.restype = (_Pointer,), None
        self._experts = releasing.slipstream_experts
        self._experts.argtypes, self._experts.restype = (_Pointer,), None
        self._experts_scratch = holding.slipstream_experts_scratch
        self._experts_scratch.argtypes, self._experts_scratch.restype = (_Pointer,), _Int
        holding.slipstream_panel.argtypes, holding.slipstream_panel.restype = (), _Int
        self._panel: int = holding.slipstream_panel()

    def set_threads(self, count: int) -> None:
        """Set the number of threads for calls from this thread, itself included; 1 by default."""
        self._set_threads(count)

    def present(self) -> int:
        """The number of those threads that have not withdrawn to leave cores to other processes."""
        count: int = self._present()
        return count

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """weight * x / sqrt(mean(x²) + epsilon) over the last dimension; weight is dense."""
        x = dense(x)
        output = torch.empty_like(x)
        dim = x.shape[-1]
        self._rms_norm[x.numel() > _CHUNK](
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
        """silu(gate) * up, both [rows, dim], [1, rows, dim] or [1, rows, heads, dim] with any row
        stride.
        """
        output = gate.new_empty(gate.shape)
        if gate.dim() == 2:
            gate, up = gate[None], up[None]
        gate, up = dense_rows(gate.flatten(2)), dense_rows(up.flatten(2))
        _, rows, dim = gate.shape
        self._silu_mul[gate.numel() > _CHUNK](
            gate.data_ptr(),
            gate.stride(1),
            up.data_ptr(),
            up.stride(1),
            output.data_ptr(),
            rows,
            dim,
        )
        return output

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """Sigmoid(x) of each number, with the bits that a list of operations has."""
        return _of_each(self._sigmoid, x)

    def softplus(self, x: torch.Tensor) -> torch.Tensor:
        """Softplus(x) of each number, with the bits that a list of operations has."""
        return _of_each(self._softplus, x)

    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """x * cos + rotate_half(x) * sin; x [T, heads, dim], cos and sin [..., T, width], where
        dimensions of x behind `width` stay.
        """
        x, cosines, sines = dense_rows(x), dense(cosines), dense(sines)
        tokens, heads, dim = x.shape
        output = x.new_empty(tokens, heads, dim)
        self._rotate[x.numel() > _CHUNK](
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            cosines.data_ptr(),
            sines.data_ptr(),
            output.data_ptr(),
            tokens,
            heads,
            dim,
            cosines.shape[-1],
        )
        return output

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of weight [n, k] in the opaque layout that `product` takes."""
        num_outputs, num_inputs = weight.shape
        size = -(-num_outputs // self._panel) * self._panel * num_inputs
        room = weight.new_empty(size + _LINE)  # aligned to cache lines
        packed = room[-room.data_ptr() % (4 * _LINE) // 4 :][:size]
        self._pack(weight.data_ptr(), *weight.stride(), num_outputs, num_inputs, packed.data_ptr())
        return packed

    def pack_each(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copies of matrices [n, k], all of a size, as `pack` lays them: [matrices, numbers]."""
        num_outputs, num_inputs = matrices[0].shape
        size = -(-num_outputs // self._panel) * self._panel * num_inputs
        room = _aligned(len(matrices) * _whole_lines(4 * size)).view(torch.float32)
        packed = room.view(len(matrices), -1)
        for weight, to in zip(matrices, packed, strict=True):
            self._pack(weight.data_ptr(), *weight.stride(), num_outputs, num_inputs, to.data_ptr())
        return packed

    def pack_codes_each(self, matrices: Sequence[CodedMatrix]) -> tuple[torch.Tensor, int] | None:
        """The same of matrices of codes, [matrices, bytes] uint8, as `pack_codes` lays them."""
        form = matrices[0].format
        number = panel_format(form)
        if number is None:
            return None
        size = self._coded_bytes(number, *matrices[0].shape)
        packed = _aligned(len(matrices) * _whole_lines(size)).view(len(matrices), -1)
        table = table_of(form)
        for matrix, to in zip(matrices, packed, strict=True):
            if table is not None:
                to[: 4 * _LINE].view(torch.float32).copy_(torch.tensor(table))
            pack_into(to.data_ptr(), number, matrix, self._pack_codes)
        return packed, number

    def pack_codes(self, matrix: CodedMatrix) -> tuple[torch.Tensor, int] | None:
        """A matrix in the layout that `product` takes, uint8, and its format's number there; None
        if there is none for it.

        Raises ValueError for numbers that are not finite.
        """
        number = panel_format(matrix.format)
        if number is None:
            return None
        size = self._coded_bytes(number, *matrix.shape)
        room = torch.zeros(size + 4 * _LINE, dtype=torch.uint8)
        packed = room[-room.data_ptr() % (4 * _LINE) :][:size]
        if (table := table_of(matrix.format)) is not None:
            packed[: 4 * _LINE].view(torch.float32).copy_(torch.tensor(table))
        pack_into(packed.data_ptr(), number, matrix, self._pack_codes)
        return packed, number

    def coded_rows(
        self, packed: torch.Tensor, number: int, num_inputs: int, ids: torch.Tensor
    ) -> torch.Tensor:
        """Rows `ids` [...] of what `pack_codes` has packed: float32 [..., k]; ids are its rows'."""
        ids = dense(ids)
        rows = torch.empty(*ids.shape, num_inputs)
        self._coded_rows(
            number, packed.data_ptr(), num_inputs, ids.data_ptr(), ids.numel(), rows.data_ptr()
        )
        return rows

    def product(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        num_outputs: int,
        number: int = 0,
    ) -> torch.Tensor:
        """x [1, rows, k] times the transposed packed weight, plus bias [n]: [1, rows, n].

        number: of its format. A row's result does not depend on the other rows, and is that of the
        dequantised matrix to the bit.
        """
        x = dense_rows(x)
        _, rows, num_inputs = x.shape
        y = x.new_empty(1, rows, num_outputs)
        call = PackedProduct(
            x=x.data_ptr(),
            x_row=x.stride(1),
            packed=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            y=y.data_ptr(),
            y_row=num_outputs,
            rows=rows,
            n=num_outputs,
            k=num_inputs,
            format=number,
        )
        is_large = rows * num_outputs * num_inputs > _LARGE
        self._product[is_large](ctypes.addressof(call))
        return y

    def products(self, x: torch.Tensor, packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """x [matrices, rows, k] times what `pack_each` has packed: [matrices, rows, n]. Rows are
        independent, as in `product`.
        """
        x = dense_rows(x)
        count, rows, num_inputs = x.shape
        y = x.new_empty(count, rows, num_outputs)
        first = PackedProduct(
            x=x.data_ptr(),
            x_row=x.stride(1),
            packed=packed.data_ptr(),
            y=y.data_ptr(),
            y_row=num_outputs,
            rows=rows,
            n=num_outputs,
            k=num_inputs,
        )
        call = PackedProducts(first, count, x.stride(0), y.stride(0), 4 * packed.stride(0))
        self._products(ctypes.addressof(call))
        return y

    def route(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        form: RouteNumbers,
        _dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [T, chosen], ids as float32, of each token's experts, best first.

        logits: [T, experts]. bias [experts] is added to the scores that they are chosen by.
        """
        chosen, scores, weighs, scale, epsilon, groups, chosen_groups, best_of_group = form
        logits = dense_rows(logits)
        num_tokens, num_experts = logits.shape
        weights, ids = (logits.new_empty(num_tokens, chosen) for _ in range(2))
        bias = None if bias is None else dense(bias)
        call = Route(
            logits=logits.data_ptr(),
            logits_row=logits.stride(0),
            bias=None if bias is None else bias.data_ptr(),
            chosen_weights=weights.data_ptr(),
            ids=ids.data_ptr(),
            rows=num_tokens,
            experts=num_experts,
            chosen=chosen,
            scores=SCORES.index(scores),
            weighs=WEIGHS.index(weighs),
            groups=groups,
            chosen_groups=chosen_groups,
            best_of_group=best_of_group,
            scale=scale,
            epsilon=epsilon,
        )
        self._route(ctypes.addressof(call))
        return weights, ids

    def experts_scratch(self, call: Experts) -> int:
        """Floats of scratch that experts need for a row."""
        width: int = self._experts_scratch(ctypes.addressof(call))
        return width

    def experts(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, call: Experts
    ) -> torch.Tensor:
        """The weighted sums [T, n] of what each token's experts make of x [T, k].

        weights, ids: [T, chosen], ids of any type. call: with everything but rows and their memory.
        """
        x, weights, ids = dense_rows(x), dense_rows(weights), dense_rows(ids.to(torch.float32))
        y = x.new_empty(len(x), call.n)
        own = Experts.from_buffer_copy(call)
        own.chosen = ids.shape[1]
        width = self.experts_scratch(own)
        scratch = x.new_empty(min(len(x), _ROWS_AT_ONCE) * width)
        own.scratch = scratch.data_ptr()
        own.x_row, own.y_row = x.stride(0), y.stride(0)
        own.weights_row, own.ids_row = weights.stride(0), ids.stride(0)
        for first in range(0, len(x), _ROWS_AT_ONCE):
            own.rows = min(len(x) - first, _ROWS_AT_ONCE)
            own.x, own.y = x[first:].data_ptr(), y[first:].data_ptr()
            own.weights, own.ids = weights[first:].data_ptr(), ids[first:].data_ptr()
            self._experts(ctypes.addressof(own))
        return y


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // (4 * _LINE)) * 4 * _LINE


def _aligned(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8, aligned to cache lines."""
    room = torch.zeros(num_bytes + 4 * _LINE, dtype=torch.uint8)
    return room[-room.data_ptr() % (4 * _LINE) :][:num_bytes]


def _of_each(function: Any, x: torch.Tensor) -> torch.Tensor:
    """A function of each number of a tensor, in rows of its last dimension."""
    x = dense(x)
    output = torch.empty_like(x)
    dim = x.shape[-1]
    if x.numel():
        function[x.numel() > _CHUNK](x.data_ptr(), output.data_ptr(), x.numel() // dim, dim)
    return output


def _both(holding: Any, releasing: Any, argtypes: tuple[Any, ...]) -> tuple[Any, Any]:
    """Declare a function that keeps the GIL and its twin that releases it."""
    for function in (holding, releasing):
        function.argtypes, function.restype = argtypes, None
    return holding, releasing


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is not contiguous."""
    return x if x.is_contiguous() else x.contiguous()


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if the stride of its last dimension is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def kernels() -> Kernels | None:
    """The kernels of this machine, or None if they cannot be compiled or loaded."""
    path = library()
    try:
        return None if path is None else Kernels(str(path))
    except (OSError, AttributeError) as error:
        logger.warning("the C kernels are not available, using torch instead: %s", error)
        return None
