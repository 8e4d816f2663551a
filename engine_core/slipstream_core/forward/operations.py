"""A list of operations for program.c, and the buffers that it works in.

- A buffer is [rows, width]. An operation reads or writes a part of a buffer, from a column on.
  Inputs and the output are the caller's tensors; all other buffers lie in one arena, which grows
  with the number of rows and is kept.
- One thread at a time may run a list.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.kernels.cpu.kernels import Kernels, dense
from slipstream_core.kernels.cpu.step_adapters import AdapterArguments
from slipstream_core.sharding.exchange import SharedExchange, check_exchange
from slipstream_core.states.flat_step import MixingArguments

(
    NORM,
    PRODUCT,
    ROTATE,
    ATTEND,
    ADD,
    SILU_MUL,
    SUM,
    MUL,
    SIGMOID,
    SOFTPLUS,
    COPY,
    CONVOLVE,
    RECUR,
    SCALE,
    ADAPT,
    ROUTE,
    EXPERTS,
    RELU,
) = range(18)
ACTIVATES, IS_DELTA, DECAYS_BY_KEY = 1, 2, 4  # flags

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_LINE = 16  # floats
_ROWS = 64  # initial capacity of the arena


class Part(NamedTuple):
    """A part of a buffer's rows, from column `at` on."""

    buffer: int
    at: int = 0


NOTHING = Part(-1)


@dataclass(slots=True)
class Operation:
    """An operation of program.c, which documents the fields."""

    kind: int
    out: Part
    a: Part
    b: Part = NOTHING
    c: Part = NOTHING
    d: Part = NOTHING
    e: Part = NOTHING
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    n: int = 0
    k: int = 0
    heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    layer: int = 0
    window: int = 0
    step: int = 0
    flags: int = 0
    format: int = 0
    number: float = 0.0
    softcap: float = 0.0
    least: float = 0.0
    most: float = 0.0

    @property
    def read(self) -> set[int]:
        """The buffers that it reads."""
        parts = (self.a, self.b, self.c, self.d, self.e)
        return {part.buffer for part in parts} - {NOTHING.buffer}

    @property
    def written(self) -> tuple[Part, ...]:
        """The parts that it writes, of buffers that it begins."""
        return (self.out, self.d) if self.kind == EXPERTS else (self.out,)

    @property
    def by_row(self) -> bool:
        """True if each row is computed from the same row of its inputs only."""
        return self.kind not in (PRODUCT, ATTEND, SUM, CONVOLVE, RECUR, EXPERTS)


class _Operand(ctypes.Structure):
    _fields_ = (("buffer", _Int), ("at", _Int))


class _CStructOperation(ctypes.Structure):
    _fields_ = (
        ("kind", _Int),
        ("together", _Int),
        ("a", _Operand),
        ("b", _Operand),
        ("c", _Operand),
        ("out", _Operand),
        ("d", _Operand),
        ("e", _Operand),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("n", _Int),
        ("k", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("key_dim", _Int),
        ("value_dim", _Int),
        ("layer", _Int),
        ("window", _Int),
        ("step", _Int),
        ("flags", _Int),
        ("format", _Int),
        ("number", _Float),
        ("softcap", _Float),
        ("least", _Float),
        ("most", _Float),
    )


class _OperationRun(ctypes.Structure):
    _fields_ = (
        ("operations", _Pointer),
        ("count", _Int),
        ("rows", _Int),
        ("buffers", _Pointer),
        ("widths", _Pointer),
        ("caches", _Pointer),
        ("decode", _Pointer),
        ("sum", _Pointer),
        ("exchange", _Pointer),
        ("failed", _Pointer),
        ("mixing", _Pointer),
        ("states", _Pointer),
        ("state_sizes", _Pointer),
        ("begun", _Pointer),
        ("adapters", _Pointer),
        ("adapted", _Pointer),
        ("sites", _Int),
    )


@dataclass
class OperationList:
    """Operations over buffers of `widths`: inputs come first, `output` is the result's index.

    exchange: makes the sums over ranks, if there are any.
    """

    kernels: Kernels
    operations: Sequence[Operation]
    widths: Sequence[int]
    num_inputs: int
    output: int
    exchange: SharedExchange | None = None

    def __post_init__(self) -> None:
        together = _together(self.operations)
        self._listed = (_CStructOperation * len(self.operations))(
            *(_of(each, alone) for each, alone in zip(self.operations, together, strict=True))
        )
        self._widths = (_Int * len(self.widths))(*self.widths)
        self._buffers = (_Pointer * len(self.widths))()
        self._capacity = 0
        self._reserve(_ROWS)
        self._run = _OperationRun(
            operations=ctypes.addressof(self._listed),
            count=len(self._listed),
            buffers=ctypes.addressof(self._buffers),
            widths=ctypes.addressof(self._widths),
        )
        if self.exchange is not None:
            self._run.sum, self._run.exchange = self.exchange.sum_call
        self._begun: npt.NDArray[np.int64] | None = None
        self._at = ctypes.addressof(self._run)

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        layers: Sequence[LayerCache],
        decode: int,
        mixing: MixingArguments | None = None,
        adapters: AdapterArguments | None = None,
    ) -> torch.Tensor:
        """Map inputs [1, rows, width] to [1, rows, width]; `decode` is a Decode's address.

        mixing: of the step's rows, where operations continue states. adapters: of its rows, if any
        has one.

        Raises ExchangeTimeoutError.
        """
        rows = inputs[0].shape[1]
        if rows > self._capacity:
            self._reserve(rows)
        held = [dense(each) for each in inputs]  # kept alive during the run
        for index, each in enumerate(held):
            self._buffers[index] = each.data_ptr()
        output = inputs[0].new_empty(1, rows, self.widths[self.output])
        self._buffers[self.output] = output.data_ptr()
        pointers = [t.data_ptr() for each in layers for t in (each.keys, each.values)]
        caches = (_Pointer * len(pointers))(*pointers)
        self._run.caches = ctypes.addressof(caches)
        self._run.rows, self._run.decode = rows, decode
        if mixing is not None:
            self._run.mixing, self._run.states, self._run.state_sizes = mixing
        of_rows = (None, None, 0) if adapters is None else adapters
        self._run.adapters, self._run.adapted, self._run.sites = of_rows
        check_exchange(self.kernels.run(self._at))
        return output

    def watch(self) -> npt.NDArray[np.int64]:
        """Note from now on when operations begin; returns the times of the last run.

        int64 [operations + 1], in ns of a monotonic clock: when each began, and the end. Operations
        that are fused with the one before have none: theirs stay 0.
        """
        if self._begun is None:
            self._begun = np.zeros(len(self.operations) + 1, np.int64)
            self._run.begun = self._begun.ctypes.data
        return self._begun

    def _reserve(self, rows: int) -> None:
        own = [i for i in range(self.num_inputs, len(self.widths)) if i != self.output]
        sizes = [-(-self.widths[i] * rows // _LINE) * _LINE for i in own]
        self._arena = torch.empty(sum(sizes) + _LINE, dtype=torch.float32)
        at = -(-self._arena.data_ptr() // (4 * _LINE)) * 4 * _LINE
        for index, size in zip(own, sizes, strict=True):
            self._buffers[index] = at
            at += 4 * size
        self._capacity = rows


def _of(operation: Operation, together: bool) -> _CStructOperation:
    given: dict[str, Any] = {"together": together}
    for name, *_ in _CStructOperation._fields_:
        value = given.get(name, getattr(operation, name, None))
        if isinstance(value, Part):
            value = _Operand(*value)
        elif isinstance(value, torch.Tensor):
            value = value.data_ptr()
        given[name] = value
    return _CStructOperation(**given)


def _together(operations: Sequence[Operation]) -> list[bool]:
    """Per operation, whether it and the next are by row, so each row can go through both."""
    behind = [*operations[1:], None]
    return [
        each.by_row and after is not None and after.by_row
        for each, after in zip(operations, behind, strict=True)
    ]
