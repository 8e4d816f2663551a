"""Reads a quantised checkpoint for transformers, parameter by parameter.

Transformers gives tensors their places and merges those of experts; what it is given are objects
that dequantise a parameter, or a slice of it, when they are indexed. A matrix that is to stay coded
gives a placeholder of its shape instead, which takes no memory and is replaced behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, of_tensor
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, replace_parameters
from slipstream_core.kernels.codes.formats import BFLOAT16, FLOAT16, Format
from slipstream_core.kernels.cpu.coded_panels import panel_format
from slipstream_core.model.quantised.bitsandbytes import read_bitsandbytes
from slipstream_core.model.quantised.compressed_tensors import read_compressed_tensors
from slipstream_core.model.quantised.float8 import read_fp8, read_modelopt
from slipstream_core.model.quantised.gptq import read_awq, read_gptq
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors
from slipstream_core.model.quantised.weight import QuantisedWeight

logger = logging.getLogger(__name__)

_Read = Callable[[Tensors, Mapping[str, Any]], dict[str, QuantisedWeight]]
READERS: dict[str, _Read] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
}
"""By methods, as checkpoints name them."""

_NUMBERS = (".weight", ".bias")
_PLAIN = ("BF16", "F16", "F32", "F64")
_SIXTEEN: dict[str, Format] = {"BF16": BFLOAT16, "F16": FLOAT16}


class QuantisedTensors:
    """A checkpoint's parameters by the names of its tensors, dequantised or coded."""

    def __init__(self, folder: Path, method: str, settings: Mapping[str, Any]) -> None:
        """Open the files and check them. Raises QuantisedWeightError, DamagedFileError."""
        self.tensors = Tensors(folder)
        self.weights = READERS[method](self.tensors, settings)
        used: set[str] = set()
        for weight in self.weights.values():
            used |= weight.used
        self._others = [name for name in self.tensors if name not in used]
        for name in self._others:
            dtype = self.tensors.headers[name].dtype
            if name.endswith(_NUMBERS) and dtype not in _PLAIN:
                raise QuantisedWeightError(
                    f"{name} is of type {dtype}, which {method!r} does not read; allowed: "
                    f"{', '.join(_PLAIN)}"
                )
        self._coded: dict[str, CodedMatrix] = {}

    @property
    def names(self) -> list[str]:
        """Names of parameters, with tensors that belong to none."""
        return [*self.weights, *self._others]

    def leave_out_zero_biases(self, without_place: Collection[str]) -> None:
        """Forget biases of quantised layers that are zero, of these names: AutoGPTQ writes one for
        every layer.
        """
        self._others = [
            name
            for name in self._others
            if name not in without_place
            or f"{name.removesuffix('.bias')}.weight" not in self.weights
            or bool(self.tensors.tensor(name).any())
        ]

    def keep_codes(self, is_kept: Callable[[str], bool]) -> None:
        """Have matrices stay coded for whose names this is true: quantised ones, and those of 16
        bits.
        """
        others: dict[str, list[str]] = {}
        for name, weight in self.weights.items():
            if len(weight.shape) != 2 or not is_kept(name):
                continue
            if weight.order is not None:
                why = "their groups are not of neighbouring inputs (g_idx)"
            elif panel_format(weight.matrix.format) is None:
                why = f"no kernel computes with {weight.matrix.format.name} in such groups"
            else:
                self._coded[name] = weight.matrix
                continue
            others.setdefault(why, []).append(name)
        for name in self._others:
            header = self.tensors.headers[name]
            form = _SIXTEEN.get(header.dtype)
            if form is not None and len(header.shape) == 2 and is_kept(name):
                self._coded[name] = of_tensor(self.tensors.tensor(name), form)
        for why, names in others.items():
            said = "%d matrices, %s the first, are dequantised: %s"
            logger.warning(said, len(names), names[0], why)

    def formats(self) -> list[str]:
        """Names of the formats of matrices that stay coded."""
        return sorted({matrix.format.name for matrix in self._coded.values()})

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that the parameters take in memory of their own, the rest of them in `dtype`."""
        total = sum(matrix.nbytes for name, matrix in self._coded.items() if name in self.weights)
        for name in self.names:
            if name not in self._coded:
                shape = (
                    self.weights[name].shape
                    if name in self.weights
                    else self.tensors.headers[name].shape
                )
                total += dtype.itemsize * prod(shape)
        return total

    def state_dict(self, *, for_slices: bool) -> tuple[dict[str, Any], Placeholders]:
        """The tensors that transformers loads, and the places of matrices that stay coded.

        for_slices: as of Placeholders.
        """
        placeholders = Placeholders(for_slices=for_slices)
        found: dict[str, Any] = {}
        for name in self._others:
            matrix = self._coded.get(name)
            found[name] = (
                self.tensors.part(name) if matrix is None else _Coded(matrix, placeholders)
            )
        for name, weight in self.weights.items():
            matrix = self._coded.get(name)
            found[name] = _Dequantised(weight) if matrix is None else _Coded(matrix, placeholders)
        return found, placeholders


class Placeholders:
    """Tensors without memory that stand for coded matrices until a model is loaded."""

    def __init__(self, *, for_slices: bool = False) -> None:
        """for_slices: they are contiguous, as transformers would copy others. Memory that nothing
        is written to is not taken from the machine.
        """
        self._for_slices = for_slices
        self._of: dict[int, tuple[torch.Tensor, CodedMatrix]] = {}

    def add(self, matrix: CodedMatrix) -> torch.Tensor:
        """One for this matrix, of its shape."""
        if self._for_slices:
            made = torch.empty(matrix.shape)
            made[0, 0] = torch.nan  # no two are equal: transformers would tie them
        else:
            made = torch.full((1, 1), torch.nan).expand(matrix.shape)
        self._of[made.data_ptr()] = (made, matrix)  # kept, so that no other has its address
        return made

    def replace(self, module: nn.Module) -> None:
        """Make coded parameters of those in a module. Raises ValueError for one that is not
        there.
        """
        left, self._of = self._of, {}
        for parameter in list(module.parameters()):
            _, matrix = left.pop(parameter.data_ptr(), (None, None))
            if matrix is not None:
                replace_parameters(module, {id(parameter): CodedParameter(matrix)})
        if left:
            raise ValueError(f"{len(left)} coded matrices have no parameters")


class _Coded:
    """A parameter that stays coded, as transformers reads tensors out of files."""

    def __init__(self, matrix: CodedMatrix, placeholders: Placeholders) -> None:
        self._matrix = matrix
        self._placeholders = placeholders

    def get_shape(self) -> list[int]:
        return list(self._matrix.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A placeholder of the whole or of a slice, which is float32 if it cuts through groups."""
        if index is ...:
            return self._placeholders.add(self._matrix)
        of_all = index if isinstance(index, tuple) else (index,)
        rows, columns = (*of_all, slice(None))[:2]
        try:
            return self._placeholders.add(self._matrix.sliced(rows, columns))
        except ValueError as error:
            logger.warning("a rank's slice of a matrix is dequantised: %s", error)
            own = torch.arange(*rows.indices(self._matrix.num_outputs))
            return self._matrix.rows(own)[:, columns].contiguous()


class _Dequantised:
    """A parameter that is dequantised when it is indexed: by `...`, or by slices."""

    def __init__(self, weight: QuantisedWeight) -> None:
        self._weight = weight

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Float32."""
        if index is ...:
            return self._weight.dequantised()
        if len(self._weight.shape) > 2:
            return self._weight.dequantised()[index]
        rows, *rest = index if isinstance(index, tuple) else (index,)
        return self._weight.dequantised(rows)[(slice(None), *rest)].contiguous()


def names_of_parameters(
    names: Collection[str], shell: PreTrainedModel, key_mapping: Mapping[str, str]
) -> dict[str, str]:
    """The parameters that tensors become as they are, by the tensors' names: those of which no
    others are made.
    """
    found = dict(_renamed(names, shell, key_mapping))
    own = set(shell.state_dict())
    return {name: parameter for name, parameter in found.items() if parameter in own}


def names_without_place(
    names: Collection[str], shell: PreTrainedModel, key_mapping: Mapping[str, str]
) -> set[str]:
    """Names of tensors that become no parameter or buffer of the model, nor a part of one."""
    own = set(shell.state_dict())
    renamed = _renamed(names, shell, key_mapping)
    return {name for name, parameter in renamed if parameter not in own}


def _renamed(
    names: Collection[str], shell: PreTrainedModel, key_mapping: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    conversions = get_model_conversion_mapping(shell, dict(key_mapping) or None)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    own = shell.state_dict()
    for name in names:
        renamed, pattern = rename_source_key(
            name, renamings, converters, shell.base_model_prefix, own
        )
        if pattern is None:
            yield name, renamed
