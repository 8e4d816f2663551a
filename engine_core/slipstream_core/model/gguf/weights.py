"""Fills a model with the weights of a GGUF file, a parameter at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream_core.forward.experts import compute_in_turn
from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, coded_parameters
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.gguf.architectures import num_drafting_blocks
from slipstream_core.model.gguf.blocks import (
    Order,
    coded_matrix,
    has_finite_scales,
    is_coded,
)
from slipstream_core.model.gguf.names import Layout, Parameter, UnknownTensorError, parameters_of
from slipstream_core.model.gguf.reader import GGUFError, GGUFModel, Tensor, read_gguf

_NOT_OF_ROWS = ("inputs_of_value_heads", "keys_and_values")  # layouts that codes cannot have


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
        architecture = str(model.metadata["general.architecture"])
        found = parameters_of(
            architecture, model.tensors, config.num_hidden_layers, num_drafting_blocks(model)
        )
        own = dict(module.named_parameters())
        kept = module.state_dict(keep_vars=True).keys()
        buffers = {each: value for each, value in module.named_buffers() if each in kept}
        filled: set[int] = set()
        for parameter in found:
            target = own.pop(parameter.name, buffers.get(parameter.name))
            if target is None and _is_unneeded(module, parameter.name):
                continue
            if target is None:
                raise GGUFError(
                    file, f"has tensor {parameter.tensors[0]!r}, which its configuration has not"
                )
            first = model.tensors[parameter.tensors[0]]
            for each in map(model.tensors.__getitem__, parameter.tensors):
                if is_coded(each) and not has_finite_scales(each):
                    raise GGUFError(file, f"has in tensor {each.name!r} a scale that is not finite")
            weight: torch.Tensor | None = None
            if parameter.name in coded:
                weight = _coded(model, parameter, config)
            if weight is None:
                value = _value(model, parameter, config).contiguous()
                if _without_ones(value.shape) == _without_ones(target.shape):
                    value = value.reshape(target.shape)
                # what is chosen by, as the bias of experts' scores, stays in its own type
                is_buffer = parameter.name in buffers
                weight = value.to(target.dtype if is_buffer else dtype).to(device)
                if not is_buffer:
                    weight = torch.nn.Parameter(weight, requires_grad=False)
            if weight.shape != target.shape:
                raise GGUFError(
                    file,
                    f"has tensor {first.name!r} for {parameter.name} of the shape "
                    f"{tuple(weight.shape)}, and its configuration tells of {tuple(target.shape)}",
                )
            parent, _, last = parameter.name.rpartition(".")
            setattr(module.get_submodule(parent), last, weight)
            filled.add(id(weight))
            buffers.pop(parameter.name, None)
    except (GGUFError, UnknownTensorError, OSError) as error:
        said = f"{file.name} has {error}" if isinstance(error, UnknownTensorError) else str(error)
        raise ModelLoadError(name, said) from error
    if any(each.dim() == 3 for each in coded_parameters(module)):
        compute_in_turn(module)
    module.tie_weights()
    left = [each for each, weight in module.named_parameters() if id(weight) not in filled]
    if left := left + list(buffers):
        raise ModelLoadError(name, f"{file.name} lacks {len(left)} weights, {left[0]} among them")


def _is_unneeded(module: PreTrainedModel, name: str) -> bool:
    """True for a parameter that transformers ignores in checkpoints: Gemma's keys and values of
    blocks that use another's.
    """
    both: tuple[Any, ...] = (module, module.base_model)
    patterns = [each for one in both for each in one._keys_to_ignore_on_load_unexpected or ()]
    return any(re.search(each, name) for each in patterns)


def coded_bytes(name: str, file: Path) -> int:
    """Bytes of a file's tensors once their codes are in memory, where those of 2 and 3 bits take 4.

    name: of the model, for errors. Raises ModelLoadError.
    """
    try:
        tensors = read_gguf(file).tensors.values()
    except (GGUFError, OSError) as error:
        raise ModelLoadError(name, str(error)) from error
    return sum(coded_matrix(each).nbytes if is_coded(each) else each.nbytes for each in tensors)


def _without_ones(shape: Iterable[int]) -> list[int]:
    """A shape without its dimensions of 1, which files have or have not."""
    return [size for size in shape if size != 1]


def _coded(
    model: GGUFModel, parameter: Parameter, config: PreTrainedConfig
) -> CodedParameter | None:
    """The codes of a matrix or of experts, in transformers' order; None where a tensor has no
    codes, or another format than that beside it, or another order than of rows.
    """
    tensors = [model.tensors[each] for each in parameter.tensors]
    if not all(map(is_coded, tensors)) or parameter.layout in _NOT_OF_ROWS:
        return None
    first, *others = map(coded_matrix, tensors)
    if any(each.format != first.format for each in others):
        return None
    if len(tensors[0].shape) == 3:
        return _coded_experts(parameter.layout, tensors[0].shape, first, others)
    matrix = first.joined(others) if others else first
    order = _order(parameter, matrix.num_outputs, config)
    return CodedParameter(matrix if order is None else matrix.reordered(order))


def _coded_experts(
    layout: Layout, shape: tuple[int, ...], matrix: CodedMatrix, others: list[CodedMatrix]
) -> CodedParameter:
    num_experts, num_outputs, _ = shape
    if others:
        rows = np.arange(2 * num_experts * num_outputs).reshape(2, num_experts, num_outputs)
        is_interleaved = layout == "interleaved"
        order = rows.transpose(1, 2, 0) if is_interleaved else rows.transpose(1, 0, 2)
        matrix = matrix.joined(others).reordered(np.ascontiguousarray(order).ravel())
    is_turned = layout in ("interleaved", "turned")
    return CodedParameter(matrix, num_experts, is_turned=is_turned)


def _value(model: GGUFModel, parameter: Parameter, config: PreTrainedConfig) -> torch.Tensor:
    """The parameter's values in transformers' order, in float32."""
    parts = [_read(model.tensors[each]) for each in parameter.tensors]
    first = parts[0]
    match parameter.layout:
        case "interleaved":
            both = torch.stack(parts, dim=2).reshape(len(first), -1, *first.shape[2:])
            return both.transpose(1, 2) if both.ndim == 3 else both
        case "turned":
            return first.transpose(1, 2) if first.ndim == 3 else first
        case "keys_and_values":
            return torch.cat([first.transpose(1, 2), parts[1]], dim=1).flatten(0, 1)
        case "plus_one":
            return first - 1
        case "flat":
            return first.flatten()
        case "inputs_of_value_heads":
            columns = _by_key_head(first.shape[1], config)
            return first[:, torch.from_numpy(columns)]
    whole = first if len(parts) == 1 else torch.cat(parts, dim=1 if first.ndim == 3 else 0)
    if parameter.layout in ("decay", "value_heads_decay"):
        whole = (-whole.flatten().double()).log().float()
        if not torch.isfinite(whole).all():
            tensor = model.tensors[parameter.tensors[0]]
            raise GGUFError(tensor.file, f"has in tensor {tensor.name!r} a decay of 0 or more")
    order = _order(parameter, len(whole), config)
    return whole if order is None else whole[torch.from_numpy(order)]


def _order(parameter: Parameter, num_rows: int, config: PreTrainedConfig) -> Order | None:
    """The file's row for each row of a parameter, where that is another."""
    match parameter.layout:
        case "halves":  # of each head the first of all rotated pairs, then the second
            is_query = ".q_proj." in parameter.name
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        case "value_heads" | "value_heads_decay":
            return _by_key_head(num_rows, config)
        case "value_heads_behind":
            return _by_key_head(num_rows, config, 2 * _key_width(config))
        case "by_key_head":
            keys = _key_width(config)
            values = (num_rows - 2 * keys) // 2
            ends = [keys, 2 * keys, 2 * keys + values]
            heads = config.linear_num_key_heads
            parts = [each.reshape(heads, -1) for each in np.split(np.arange(num_rows), ends)]
            return np.concatenate(parts, axis=1).ravel()
    return None


def _key_width(config: PreTrainedConfig) -> int:
    return int(config.linear_num_key_heads * config.linear_key_head_dim)


def _by_key_head(size: int, config: PreTrainedConfig, behind: int = 0) -> Order:
    """Value heads that files have in turns, one of each key head, as transformers has them: those
    of a key head side by side. behind: rows before them, which stay.
    """
    values, keys = config.linear_num_value_heads, config.linear_num_key_heads
    heads = np.arange(behind, size).reshape(values // keys, keys, -1)
    return np.concatenate([np.arange(behind), heads.swapaxes(0, 1).ravel()])


def _read(tensor: Tensor) -> torch.Tensor:
    """The values of a tensor."""
    try:
        if is_coded(tensor):
            return coded_matrix(tensor).dequantised().reshape(tensor.shape)
    except ValueError as error:
        raise GGUFError(tensor.file, f"has in tensor {tensor.name!r}: {error}") from None
    values = torch.from_numpy(np.array(tensor.read())).view(torch.float32).reshape(tensor.shape)
    if not torch.isfinite(values).all():
        raise GGUFError(tensor.file, f"has in tensor {tensor.name!r} a value that is not finite")
    return values
