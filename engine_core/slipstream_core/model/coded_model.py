"""Models on a CPU that computes in float32, whose matrices are coded parameters.

The matrices of linear layers, embeddings and experts stay in 16 bits, where they lie in the
mapping of the checkpoint, and may be quantised as they are loaded. Everything else becomes
float32, which is small. Results are those of the dequantised matrices in float32, to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream_core.forward.experts import (
    UnknownExpertsError,
    compute_in_turn,
    expert_parameters,
    form_of,
)
from slipstream_core.kernels.codes.coded_matrix import of_experts, of_tensor
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, replace_parameters
from slipstream_core.kernels.codes.formats import BFLOAT16, FLOAT16, Format
from slipstream_core.kernels.codes.mapped_memory import release
from slipstream_core.kernels.codes.online import ONLINE, WITHOUT_ENDS, quantised
from slipstream_core.model.checkpoint_files import TensorHeader

logger = logging.getLogger(__name__)

_FORMATS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_SPELLED = {"BF16": torch.bfloat16, "F16": torch.float16}


def dtype_of_matrices(headers: Mapping[str, TensorHeader], shell: nn.Module) -> torch.dtype | None:
    """The type of 16 bits that all of a checkpoint's matrices have; None if they do not, or if the
    model has more than matrices.
    """
    if has_more_than_matrices(shell):
        return None
    types = {header.dtype for header in headers.values() if len(header.shape) > 1}
    return _SPELLED.get(next(iter(types))) if len(types) == 1 else None


def has_more_than_matrices(shell: nn.Module) -> bool:
    """True if a model has convolutions over several channels, or experts whose form is not known.

    What is no more than a matrix by its shape, as a convolution of each channel, stays as it is.
    """
    known = set(_expert_names(shell))
    return any(
        sum(size > 1 for size in each.shape) > 2 and name not in known
        for name, each in shell.named_parameters()
    )


def _expert_names(shell: nn.Module) -> list[str]:
    """The names of the matrices of experts whose form is known."""
    names: list[str] = []
    for name, module, _ in expert_parameters(shell):
        with suppress(UnknownExpertsError):
            form_of(module)
            names.append(name)
    return names


def names_of_matrices(shell: nn.Module) -> list[str]:
    """The names of the matrices of linear layers, embeddings and experts, but for those that latent
    attention takes the numbers of.
    """
    matrices = [
        f"{name}.weight" if name else "weight"
        for name, module in shell.named_modules()
        if (type(module) is nn.Linear or isinstance(module, nn.Embedding))
        and not name.endswith("kv_b_proj")
    ]
    return matrices + _expert_names(shell)


@contextmanager
def left_in(dtype: torch.dtype, names: list[str]) -> Iterator[None]:
    """Have transformers load these parameters in `dtype`, whatever the rest is loaded in."""
    # it has such a plan for modules that are to be wider, and no argument for another
    own = PreTrainedModel._get_dtype_plan
    plan = {f"^{name.replace('.', chr(92) + '.')}$": dtype for name in names}

    def with_matrices(self: PreTrainedModel, asked: torch.dtype) -> dict[str, torch.dtype]:
        return {**own(self, asked), **plan}

    PreTrainedModel._get_dtype_plan = with_matrices  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = own  # type: ignore[method-assign]


def keep_codes(module: PreTrainedModel, names: list[str], quantization: str | None = None) -> None:
    """Make coded parameters of a loaded module's matrices, tied ones once: of those that have 16
    bits, and in the format of this name of those that it is for.

    Raises ValueError for a weight that cannot be quantised, and if the format is for none of them.
    """
    ends = _ends(module)
    form = None if quantization is None else ONLINE[quantization]
    others: list[str] = []  # which the format is not for
    num_quantised = 0
    has_coded_experts = False
    for name in names:
        weight = module.get_parameter(name)
        is_turned = has_turned(module, name)
        num_inputs = weight.shape[-2 if is_turned else -1]
        if isinstance(weight, CodedParameter):  # tied to one before
            continue
        experts = len(weight) if weight.dim() == 3 else 0
        if form is not None and not _has_whole_groups(form, num_inputs):
            others.append(name)
        if form is not None and _is_for(form, weight, num_inputs, ends):
            rows = weight.transpose(1, 2) if is_turned else weight
            coded = CodedParameter(
                quantised(rows.reshape(-1, num_inputs), form), experts, is_turned=is_turned
            )
            release(weight.data_ptr(), weight.nbytes)
            num_quantised += 1
        elif (own := _FORMATS.get(weight.dtype)) is not None:
            matrix = of_experts(weight, own, is_turned) if experts else of_tensor(weight, own)
            coded = CodedParameter(matrix, experts, is_turned=is_turned)
        else:
            continue
        has_coded_experts |= experts > 0
        replace_parameters(module, {id(weight): coded})
    if has_coded_experts:
        compute_in_turn(module)
    if form is None or not others:
        return
    said = f"{len(others)} matrices, {others[0]} the first, have inputs in no whole groups"
    if not num_quantised:
        raise ValueError(f"{quantization} has groups of {form.group}, and all {said}")
    logger.warning("%s of %d and are not quantised to %s", said, form.group, quantization)


def quantised_bytes(shell: nn.Module, form: Format) -> int:
    """Bytes of all matrices in a format, those left out that it is not for."""
    total = 0
    for name in names_of_matrices(shell):
        weight = shell.get_parameter(name)
        num_inputs = weight.shape[-2 if has_turned(shell, name) else -1]
        if _has_whole_groups(form, num_inputs):
            total += weight.numel() // num_inputs * form.row_bytes(num_inputs)
    return total


def merged_bytes(shell: nn.Module, names: Collection[str], dtype: torch.dtype) -> int:
    """Bytes of experts that a checkpoint with tensors of these names has one by one: they are put
    together in memory of their own.
    """
    return sum(
        dtype.itemsize * shell.get_parameter(name).numel()
        for name in _expert_names(shell)
        if name not in names
    )


def has_turned(module: nn.Module, name: str) -> bool:
    """True of the parameters of experts that are [experts, inputs, outputs]."""
    return bool(getattr(module.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def _ends(module: PreTrainedModel) -> set[int]:
    """Embedding and head."""
    ends: Any = module
    both = (ends.get_input_embeddings(), ends.get_output_embeddings())
    return {id(each.weight) for each in both if each is not None}


def _is_for(form: Format, weight: nn.Parameter, num_inputs: int, ends: set[int]) -> bool:
    """True if a format is for this matrix: whole groups, or none of the ends."""
    return id(weight) not in ends if form in WITHOUT_ENDS else _has_whole_groups(form, num_inputs)


def _has_whole_groups(form: Format, num_inputs: int) -> bool:
    is_cut = not form.group or form.values != "integer"
    return is_cut or not num_inputs % form.group
