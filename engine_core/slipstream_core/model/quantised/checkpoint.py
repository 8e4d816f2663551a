"""Reads a quantised checkpoint for transformers, parameter by parameter.

Transformers gives tensors their places and merges those of experts; what it is given are objects
that dequantise a parameter, or a slice of it, when they are indexed. A matrix that is to stay coded
gives a placeholder of its shape instead, which takes no memory and is replaced behind it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from slipstream_core.forward.experts import compute_in_turn
from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, of_tensor
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, replace_parameters
from slipstream_core.kernels.codes.formats import BFLOAT16, FLOAT16, Format
from slipstream_core.kernels.cpu.coded_panels import panel_format
from slipstream_core.model.quantised.bitsandbytes import read_bitsandbytes
from slipstream_core.model.quantised.compressed_tensors import read_compressed_tensors
from slipstream_core.model.quantised.float4 import read_mxfp4
from slipstream_core.model.quantised.float8 import read_fp8
from slipstream_core.model.quantised.gptq import read_auto_round, read_awq, read_gptq
from slipstream_core.model.quantised.mlx import read_mlx
from slipstream_core.model.quantised.modelopt import read_modelopt, read_quark
from slipstream_core.model.quantised.packed_bytes import read_bitnet, read_gemma
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors
from slipstream_core.model.quantised.weight import QuantisedWeight

logger = logging.getLogger(__name__)

_Read = Callable[[Tensors, Mapping[str, Any]], dict[str, QuantisedWeight]]
READERS: dict[str, _Read] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitnet": read_bitnet,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gemma": read_gemma,
    "gptq": read_gptq,
    "metal": read_mlx,
    "mlx": read_mlx,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "mxfp8": read_fp8,
    "quark": read_quark,
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
        self._coded: dict[str, _Kept] = {}

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

    def keep_codes(
        self, is_kept: Callable[[str], bool], is_turned: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Have matrices stay coded for whose names this is true: quantised ones, and those of 16
        bits. Of tensors [experts, ...] those stay so that are turned as their parameters are.
        """
        others: dict[str, list[str]] = {}
        for name, weight in self.weights.items():
            if not is_kept(name):
                continue
            experts = weight.shape[0] if len(weight.shape) > 2 else 0
            if experts and weight.is_turned != is_turned(name):
                why = "their inputs are rows"
            elif (why := _why_not(weight)) == "":
                self._coded[name] = _Kept(weight.matrix, experts, weight.is_turned)
                continue
            others.setdefault(why, []).append(name)
        for name in self._others:
            if is_kept(name) and (matrix := self._of_16_bits(name)) is not None:
                self._coded[name] = _Kept(matrix)
        for why, names in others.items():
            said = "%d matrices, %s the first, are dequantised: %s"
            logger.warning(said, len(names), names[0], why)

    def keep_experts(self, parts: Mapping[str, list[str]], num_experts: Mapping[str, int]) -> None:
        """Have the matrices of experts stay coded that lie in tensors of their own.

        parts: by the parameters that they become, the names of tensors with the outputs of the
        first expert, then those of the second, and so on. num_experts: by parameter.
        """
        left: list[str] = []
        for parameter, names in parts.items():
            matrices = [self._matrix(name) for name in names]
            first, *rest = matrices
            try:
                if first is None or None in rest:
                    raise ValueError("some have no panels")
                whole = first.joined([each for each in rest if each is not None])
            except ValueError as error:
                left.append(f"{parameter} ({error})")
                continue
            self._coded[parameter] = _Kept(whole, num_experts[parameter], parts=tuple(names))
        if left:
            said = "the experts of %d parameters are dequantised, those of %s the first"
            logger.warning(said, len(left), left[0])

    def _matrix(self, name: str) -> CodedMatrix | None:
        """The matrix of a tensor that may stay coded; None if it may not."""
        weight = self.weights.get(name)
        if weight is None:
            return self._of_16_bits(name)
        return weight.matrix if len(weight.shape) == 2 and not _why_not(weight) else None

    def _of_16_bits(self, name: str) -> CodedMatrix | None:
        header = self.tensors.headers[name]
        form = _SIXTEEN.get(header.dtype)
        if form is None or len(header.shape) != 2:
            return None
        return of_tensor(self.tensors.tensor(name), form)

    def formats(self) -> list[str]:
        """Names of the formats of matrices that stay coded."""
        return sorted({each.matrix.format.name for each in self._coded.values()})

    def num_bytes(self, dtype: torch.dtype, without_place: Collection[str] = ()) -> int:
        """Bytes that the parameters take in memory of their own, the rest of them in `dtype`.

        without_place: names of tensors that become none.
        """
        left_out = {*self._parts(), *without_place}
        total = sum(
            each.matrix.nbytes for each in self._coded.values() if each.matrix.format.bits < 16
        )
        for name in self.names:
            if name not in self._coded and name not in left_out:
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
        parts = self._parts()
        found: dict[str, Any] = {
            name: _Dequantised(self.weights[name])
            if name in self.weights
            else self.tensors.part(name)
            for name in self.names
            if name not in parts
        }
        found |= {name: _Coded(kept, placeholders) for name, kept in self._coded.items()}
        return found, placeholders

    def _parts(self) -> set[str]:
        """Names of tensors that experts are put together of without being read."""
        return {name for kept in self._coded.values() for name in kept.parts}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A parameter that stays coded: a matrix, or those of experts. parts: the names of the tensors
    of theirs, where that is not the parameter's own.
    """

    matrix: CodedMatrix
    experts: int = 0
    is_turned: bool = False
    parts: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        if not self.experts:
            return self.matrix.shape
        inner = (self.matrix.num_outputs // self.experts, self.matrix.num_inputs)
        return (self.experts, *(inner[::-1] if self.is_turned else inner))


def _why_not(weight: QuantisedWeight) -> str:
    """The reason why a weight is dequantised; empty if it may stay coded."""
    if weight.order is not None:
        return "their groups are not of neighbouring inputs (g_idx)"
    if panel_format(weight.matrix.format) is None:
        return f"no kernel computes with {weight.matrix.format.name} in such groups"
    return ""


class Placeholders:
    """Tensors without memory that stand for coded matrices until a model is loaded."""

    def __init__(self, *, for_slices: bool = False) -> None:
        """for_slices: they are contiguous, as transformers would copy others. Memory that nothing
        is written to is not taken from the machine.
        """
        self._for_slices = for_slices
        self._of: dict[int, tuple[torch.Tensor, _Kept]] = {}

    def add(self, kept: _Kept) -> torch.Tensor:
        """One for this parameter, of its shape."""
        if self._for_slices:
            made = torch.empty(kept.shape)
            made[0, 0] = torch.nan  # no two are equal: transformers would tie them
        else:
            made = torch.full((1,) * len(kept.shape), torch.nan).expand(kept.shape)
        self._of[made.data_ptr()] = (made, kept)  # held, so that no other has its address
        return made

    def replace(self, module: nn.Module) -> None:
        """Make coded parameters of those in a module. Raises ValueError for one that is not
        there.
        """
        left, self._of = self._of, {}
        has_experts = any(kept.experts for _, kept in left.values())
        for parameter in list(module.parameters()):
            _, kept = left.pop(parameter.data_ptr(), (None, None))
            if kept is not None:
                coded = CodedParameter(kept.matrix, kept.experts, is_turned=kept.is_turned)
                replace_parameters(module, {id(parameter): coded})
        if left:
            raise ValueError(f"{len(left)} coded matrices have no parameters")
        if has_experts:
            compute_in_turn(module)


class _Coded:
    """A parameter that stays coded, as transformers reads tensors out of files."""

    def __init__(self, kept: _Kept, placeholders: Placeholders) -> None:
        self._kept = kept
        self._placeholders = placeholders

    def get_shape(self) -> list[int]:
        return list(self._kept.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A placeholder of the whole or of a slice, which is float32 if it cuts through groups."""
        if index is ...:
            return self._placeholders.add(self._kept)
        matrix = self._kept.matrix
        of_all = index if isinstance(index, tuple) else (index,)
        rows, columns = (*of_all, slice(None))[:2]
        try:
            return self._placeholders.add(_Kept(matrix.sliced(rows, columns)))
        except ValueError as error:
            logger.warning("a rank's slice of a matrix is dequantised: %s", error)
            own = torch.arange(*rows.indices(matrix.num_outputs))
            return matrix.rows(own)[:, columns].contiguous()


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


def parts_of_experts(
    names: Collection[str], shell: PreTrainedModel, key_mapping: Mapping[str, str]
) -> dict[str, list[str]]:
    """The tensors of which transformers stacks the parameters of experts, by these: the outputs of
    the first expert, then those of the second, and so on.
    """
    found: dict[str, dict[tuple[int, int], str]] = {}
    conversions = get_model_conversion_mapping(shell, dict(key_mapping) or None)
    stacking = {
        pattern: (each.source_patterns, _expert_number(pattern))
        for each in conversions
        if isinstance(each, WeightConverter) and _is_stacking(each.operations)
        for pattern in each.source_patterns
    }
    for name, parameter, pattern in _all_renamed(names, shell, key_mapping):
        sources, number = stacking.get(pattern or "", ((), None))
        expert = None if number is None else number.search(name)
        if expert is not None and pattern is not None:
            place = (int(expert[1]), sources.index(pattern))
            found.setdefault(parameter, {})[place] = name
    whole = {}
    for parameter, places in found.items():
        ordered = sorted(places)
        experts, parts = ordered[-1][0] + 1, ordered[-1][1] + 1
        if len(ordered) == experts * parts == len(shell.get_parameter(parameter)) * parts:
            whole[parameter] = [places[place] for place in ordered]
    return whole


def _is_stacking(operations: list[Any]) -> bool:
    """True if tensors of experts are stacked, and those of one laid behind each other."""
    match operations:
        case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return True
    return False


def _expert_number(pattern: str) -> re.Pattern[str] | None:
    """A pattern that finds an expert's number in a tensor's name."""
    before, star, _ = pattern.rpartition("*")
    last = before.rstrip(".").rpartition(".")[2]
    return re.compile(rf"\b{re.escape(last)}\.(\d+)\.") if star and last else None


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
    for name, renamed, pattern in _all_renamed(names, shell, key_mapping):
        if pattern is None:
            yield name, renamed


def _all_renamed(
    names: Collection[str], shell: PreTrainedModel, key_mapping: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None]]:
    """Names, the names of their parameters, and the pattern of what makes others of tensors."""
    conversions = get_model_conversion_mapping(shell, dict(key_mapping) or None)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    own = shell.state_dict()
    for name in names:
        renamed, pattern = rename_source_key(
            name, renamings, converters, shell.base_model_prefix, own
        )
        yield name, renamed, pattern
