"""Models on a CPU that computes in float32, whose matrices are coded parameters.

The matrices of linear layers and embeddings of 16 bits remain the checkpoint's mapping, and may be
quantised as they are loaded. Everything else becomes float32, which is small. Results are those of
the dequantised matrices in float32, to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream_core.model.checkpoint_files import TensorHeader
from slipstream_core.weights.coded_matrix import of_tensor
from slipstream_core.weights.coded_parameter import CodedParameter, replace_parameters
from slipstream_core.weights.formats import BFLOAT16, FLOAT16, Format
from slipstream_core.weights.mapped_memory import release
from slipstream_core.weights.online import ONLINE, WITHOUT_ENDS, quantised

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
    """True if a model has experts or convolutions, tensors of three dimensions."""
    return any(parameter.dim() > 2 for parameter in shell.parameters())


def names_of_matrices(shell: nn.Module) -> list[str]:
    """The names of the matrices of linear layers and embeddings, but for those that latent
    attention takes the numbers of.
    """
    return [
        f"{name}.weight" if name else "weight"
        for name, module in shell.named_modules()
        if (type(module) is nn.Linear or isinstance(module, nn.Embedding))
        and not name.endswith("kv_b_proj")
    ]


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
    for name in names:
        weight = module.get_parameter(name)
        if isinstance(weight, CodedParameter):  # tied to one before
            continue
        if form is not None and not _has_whole_groups(form, weight):
            others.append(name)
        if form is not None and _is_for(form, weight, ends):
            coded = CodedParameter(quantised(weight, form))
            release(weight.data_ptr(), weight.nbytes)
            num_quantised += 1
        elif (own := _FORMATS.get(weight.dtype)) is not None:
            coded = CodedParameter(of_tensor(weight, own))
        else:
            continue
        replace_parameters(module, {id(weight): coded})
    if form is None or not others:
        return
    said = f"{len(others)} matrices, {others[0]} the first, have inputs in no whole groups"
    if not num_quantised:
        raise ValueError(f"{quantization} has groups of {form.group}, and all {said}")
    logger.warning("%s of %d and are not quantised to %s", said, form.group, quantization)


def quantised_bytes(shell: nn.Module, form: Format) -> int:
    """Bytes of all matrices in a format, those left out that it is not for."""
    matrices = map(shell.get_parameter, names_of_matrices(shell))
    return sum(
        len(each) * form.row_bytes(each.shape[1])
        for each in matrices
        if _has_whole_groups(form, each)
    )


def _ends(module: PreTrainedModel) -> set[int]:
    """Embedding and head."""
    ends: Any = module
    both = (ends.get_input_embeddings(), ends.get_output_embeddings())
    return {id(each.weight) for each in both if each is not None}


def _is_for(form: Format, weight: nn.Parameter, ends: set[int]) -> bool:
    """True if a format is for this matrix: whole groups, or none of the ends."""
    return id(weight) not in ends if form in WITHOUT_ENDS else _has_whole_groups(form, weight)


def _has_whole_groups(form: Format, weight: torch.Tensor) -> bool:
    is_cut = not form.group or form.values != "integer"
    return is_cut or not weight.shape[1] % form.group
