"""A parameter [N, K], or of the matrices of several experts, whose weights are a coded matrix, for
modules that multiply or look up.

To a module it is float32 of that shape. `linear` and `embedding` compute with the dequantised
matrix, a part of it at a time; its own numbers are NaN, so whatever else reads them is noticed. A
recording sees only its shape, and finds the matrix by the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.formats import decoded

_linear: Any = torch.nn.functional.linear
_embedding: Any = torch.nn.functional.embedding


class CodedParameter(nn.Parameter):
    """It takes the memory of its codes alone."""

    matrix: CodedMatrix
    is_turned: bool

    def __new__(
        cls, matrix: CodedMatrix, experts: int = 0, *, is_turned: bool = False
    ) -> CodedParameter:
        """A parameter of the matrix's shape, or of several experts, whose outputs it has one
        expert's behind the other's: [experts, N, K], or [experts, K, N] where it is turned.
        """
        shape: tuple[int, ...] = matrix.shape
        if experts:
            inner = (matrix.num_outputs // experts, matrix.num_inputs)
            shape = (experts, *(inner[::-1] if is_turned else inner))
        number = torch.full((1,) * len(shape), torch.nan)
        made = torch.Tensor._make_subclass(cls, number.expand(shape), False)
        assert isinstance(made, cls)
        made.matrix, made.is_turned = matrix, is_turned
        return made

    def __init__(self, matrix: CodedMatrix, experts: int = 0, *, is_turned: bool = False) -> None:
        """Made already."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedParameter:
        """Itself: codes do not change."""
        return self

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of its codes and of what groups of them share."""
        return self.matrix.nbytes if hasattr(self, "matrix") else 0

    def give_up(self) -> None:
        """Drop the codes, and mapped memory that they are in; nothing can be computed then."""
        self.matrix.release()
        del self.matrix

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `linear` and `embedding` with the matrix; everything else with NaN."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is _linear and type(args[1]) is cls and not kwargs:
                return product(args[0], args[1].matrix, args[2] if len(args) > 2 else None)
            if func is _embedding and type(args[1]) is cls:
                return args[1].matrix.rows(args[0])
            return func(*args, **(kwargs or {}))


def product(x: torch.Tensor, matrix: CodedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times the transposed matrix, plus bias [N]: [..., N], by torch."""
    y = x.new_empty(*x.shape[:-1], matrix.num_outputs)
    for first, part in matrix.parts():
        weights = torch.from_numpy(decoded(matrix.format, part))
        y[..., first : first + len(weights)] = _linear(x, weights)
    return y if bias is None else y + bias


def expert_matrix(parameter: torch.Tensor, expert: int, is_turned: bool) -> torch.Tensor:
    """The matrix [N, K] of one of a parameter's experts [experts, N, K], or [experts, K, N] where
    it is turned.
    """
    if isinstance(parameter, CodedParameter):
        num_outputs = parameter.matrix.num_outputs // len(parameter)
        first = expert * num_outputs
        return parameter.matrix.rows(torch.arange(first, first + num_outputs))
    matrix = parameter[expert]
    return matrix.t() if is_turned else matrix


def dequantised(parameter: CodedParameter) -> torch.Tensor:
    """Its weights in float32, of its shape."""
    weights = parameter.matrix.dequantised()
    if parameter.dim() == 2:
        return weights
    weights = weights.reshape(len(parameter), -1, parameter.matrix.num_inputs)
    return weights.transpose(1, 2).contiguous() if parameter.is_turned else weights


def coded_parameters(module: nn.Module) -> Iterator[CodedParameter]:
    """A module's coded parameters, each once."""
    return (each for each in module.parameters() if isinstance(each, CodedParameter))


def replace_parameters(module: nn.Module, by: dict[int, nn.Parameter]) -> None:
    """Replace parameters, by their identity, wherever the module has them."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if id(parameter) in by:
                part._parameters[name] = by[id(parameter)]


def dequantise_parameters(module: nn.Module) -> None:
    """Replace a module's coded parameters by float32 ones."""
    for each in list(coded_parameters(module)):
        plain = nn.Parameter(dequantised(each), requires_grad=False)
        replace_parameters(module, {id(each): plain})
