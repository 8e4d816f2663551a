"""Fills a model with the weights of a GGUF file, a parameter at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream_core.forward.experts import compute_in_turn
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, coded_parameters
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.gguf.blocks import (
    Order,
    coded_matrix,
    has_finite_scales,
    is_coded,
)
from slipstream_core.model.gguf.names import Parameter, UnknownTensorError, parameters_of
from slipstream_core.model.gguf.reader import GGUFError, GGUFModel, Tensor, read_gguf


def load_weights(
    name: str,
    file: Path,
    module: PreTrainedModel,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    coded: Collection[str] = (),
) -> None:
    """Give `module` the file's weights as `dtype` on `device`, dequantised but for those parameters
    that are named in `coded`, which keep the file's codes. Raises ModelLoadError.

    name: of the model, for errors. Peak memory beyond the weights is one of them in float32.
    """
    try:
        model = read_gguf(file)
        architecture = model.metadata["general.architecture"]
        found = parameters_of(str(architecture), model.tensors, config.num_hidden_layers)
        own = dict(module.named_parameters())
        filled: set[int] = set()
        for parameter in found:
            target = own.pop(parameter.name, None)
            if target is None:
                raise GGUFError(
                    file, f"has tensor {parameter.tensors[0]!r}, which its configuration has not"
                )
            first = model.tensors[parameter.tensors[0]]
            for each in map(model.tensors.__getitem__, parameter.tensors):
                if is_coded(each) and not has_finite_scales(each):
                    raise GGUFError(file, f"has in tensor {each.name!r} a scale that is not finite")
            weight: torch.nn.Parameter | None = None
            if parameter.name in coded and len(first.shape) == 3:
                weight = _coded_experts(model, parameter)
            if weight is not None:
                pass
            elif parameter.name in coded and is_coded(first) and len(first.shape) == 2:
                weight = CodedParameter(coded_matrix(first, _order(first, parameter, config)))
            else:
                value = _value(model, parameter, config).contiguous().to(dtype).to(device)
                weight = torch.nn.Parameter(value, requires_grad=False)
            if weight.shape != target.shape:
                raise GGUFError(
                    file,
                    f"has tensor {first.name!r} for {parameter.name} of the shape "
                    f"{tuple(weight.shape)}, and its configuration tells of {tuple(target.shape)}",
                )
            parent, _, last = parameter.name.rpartition(".")
            setattr(module.get_submodule(parent), last, weight)
            filled.add(id(weight))
    except (GGUFError, UnknownTensorError, OSError) as error:
        said = f"{file.name} has {error}" if isinstance(error, UnknownTensorError) else str(error)
        raise ModelLoadError(name, said) from error
    if any(each.dim() == 3 for each in coded_parameters(module)):
        compute_in_turn(module)
    module.tie_weights()
    left = [each for each, weight in module.named_parameters() if id(weight) not in filled]
    if left:
        raise ModelLoadError(name, f"{file.name} lacks {len(left)} weights, {left[0]} among them")


def _coded_experts(model: GGUFModel, parameter: Parameter) -> CodedParameter | None:
    """The codes of experts, in transformers' order; None where a tensor has no codes, or another
    format than that beside it.
    """
    tensors = [model.tensors[each] for each in parameter.tensors]
    if not all(map(is_coded, tensors)):
        return None
    first, *others = (coded_matrix(each, None) for each in tensors)
    if any(each.format != first.format for each in others):
        return None
    num_experts, num_outputs, _ = tensors[0].shape
    matrix = first
    if others:
        rows = np.arange(2 * num_experts * num_outputs).reshape(2, num_experts, num_outputs)
        is_interleaved = parameter.layout == "interleaved"
        order = rows.transpose(1, 2, 0) if is_interleaved else rows.transpose(1, 0, 2)
        matrix = first.joined(others).reordered(np.ascontiguousarray(order).ravel())
    is_turned = parameter.layout in ("interleaved", "turned")
    return CodedParameter(matrix, num_experts, is_turned=is_turned)


def _value(model: GGUFModel, parameter: Parameter, config: PreTrainedConfig) -> torch.Tensor:
    """The parameter's values in transformers' order, in float32."""
    layout = parameter.layout
    tensors = [model.tensors[each] for each in parameter.tensors]
    parts = [_read(each, _order(each, parameter, config)) for each in tensors]
    first = parts[0]
    if layout == "plus_one":
        return first - 1
    if layout == "interleaved":
        both = torch.stack(parts, dim=2).reshape(len(first), -1, *first.shape[2:])
        return both.transpose(1, 2) if both.ndim == 3 else both
    if layout == "turned":
        return first.transpose(1, 2) if first.ndim == 3 else first
    return first if len(parts) == 1 else torch.cat(parts, dim=1)


def _order(tensor: Tensor, parameter: Parameter, config: PreTrainedConfig) -> Order | None:
    """The file's rows in transformers' order where it is another: of each head the first of all
    rotated pairs, then the second.
    """
    if parameter.layout != "halves":
        return None
    is_query = ".q_proj." in parameter.name
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    num_rows = tensor.shape[0]
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _read(tensor: Tensor, order: Order | None) -> torch.Tensor:
    """The values of a tensor, its rows in another order where one is given."""
    try:
        if is_coded(tensor):
            return coded_matrix(tensor, order).dequantised().reshape(tensor.shape)
    except ValueError as error:
        raise GGUFError(tensor.file, f"has in tensor {tensor.name!r}: {error}") from None
    values = torch.from_numpy(np.array(tensor.read())).view(torch.float32).reshape(tensor.shape)
    if not torch.isfinite(values).all():
        raise GGUFError(tensor.file, f"has in tensor {tensor.name!r} a value that is not finite")
    return values if order is None else values[torch.from_numpy(order)]
