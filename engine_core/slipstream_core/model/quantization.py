"""Quantised checkpoints: which are served, and why others are refused.

They are read by `quantised`, which keeps codes or dequantises them; experts of MXFP4 that do not
stay coded are dequantised by transformers. Activations are not quantised, whatever a checkpoint
says of them: what is computed is the product with the dequantised weights.

What is refused, as it would be taken for other numbers:
- weights of a narrow type that no configuration names a method for;
- weights that go with rotated activations (`transform_config`), which nothing here rotates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream_core.kernels.codes.coded_parameter import coded_parameters, dequantise_parameters
from slipstream_core.kernels.codes.online import ONLINE
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.checkpoint_files import TensorHeader
from slipstream_core.model.host_memory import read_host_memory
from slipstream_core.model.hub import Source, read_json
from slipstream_core.model.quantised.checkpoint import READERS
from slipstream_core.model.quantised.mlx import UNCHANGED
from slipstream_core.model.quantised.modelopt import ALGORITHMS

logger = logging.getLogger(__name__)

MXFP4 = "mxfp4"
_SERVED = sorted(READERS)
_MODELOPT = "hf_quant_config.json"
# by what else checkpoints call them
_METHODS = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "sparseml": "compressed-tensors",
}
# beside config.json, by the tools that write them, with the method where the file names none
_OTHER_FILES = {
    _MODELOPT: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
# of configurations: compression_config was compressed-tensors', quantization is MLX's
_FIELDS = ("quantization_config", "compression_config", "quantization")
_IN_MLX = {"bits", "group_size"}
_NARROW = ("F4", "F6", "F8", "I8")  # in safetensors' spelling
# Where a layer's activations are rotated (compressed-tensors' locations). Rotations of weights are
# in the weights; those of queries and cached keys leave their products as they are.
_ROTATED = ("input", "output")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method by which a checkpoint is quantised, and its settings."""

    method: str
    settings: Mapping[str, Any]


def quantization_of(name: str, config: PreTrainedConfig, source: Source) -> Quantization | None:
    """The quantisation of a checkpoint, which its configuration does not tell of any more, so that
    transformers takes its weights as they are given. None if it is not quantised.

    Raises ModelLoadError for a method that is not served.
    """
    given, told_by = _quantization_config(config), ""
    if given is None:
        given, told_by = _from_other_files(source)
    if given is None:
        return None
    method, given = _method(given)
    if method == "modelopt":
        algorithm = given.get("quant_algo")
        if algorithm not in ALGORITHMS:
            raise ModelLoadError(
                name,
                f"its weights are quantised by 'modelopt' ({algorithm}{told_by}), of which "
                f"{', '.join(ALGORITHMS)} are served",
            )
    elif method == "mlx" and config.model_type not in UNCHANGED:
        why = (
            f"its weights are quantised by MLX{told_by}, which may change those of "
            f"{config.model_type!r}; served are {', '.join(sorted(UNCHANGED))}"
        )
        if given.get("quant_method") is None:  # bits and a group_size say it
            why += '; if they are GPTQ\'s, which was not named either, add "quant_method": "gptq"'
        raise ModelLoadError(name, why)
    elif method not in _SERVED:
        by = "a method that is not named" if method == "None" else repr(method)
        raise ModelLoadError(
            name,
            f"its weights are quantised by {by}{told_by}, which is not served; served are "
            f"checkpoints that are not quantised, and {', '.join(_SERVED)}",
        )
    for location in _rotations(given):
        raise ModelLoadError(
            name,
            f"its transform_config rotates the {location} of layers while the model runs, which is "
            "not served; served are checkpoints whose rotations are in their weights",
        )
    if method == MXFP4:
        given["dequantize"] = True
    else:
        for each in (config, config.get_text_config()):
            for own in _FIELDS:
                each.__dict__.pop(own, None)
    return Quantization(method, given)


def check_quantization(name: str, own: Quantization | None, asked: str, *, why: str) -> None:
    """Raise ModelLoadError unless `asked` is the checkpoint's own method, or a format that matrices
    of a checkpoint that is not quantised may get.

    why: what stands against the latter, if anything does.
    """
    if own is not None and _METHODS.get(asked, asked) == own.method:
        return
    if own is not None:
        raise ModelLoadError(
            name,
            f"quantization is {asked!r}, but its weights are quantised by {own.method!r} already",
        )
    if asked not in ONLINE:
        allowed = ", ".join(ONLINE)
        raise ModelLoadError(
            name,
            f"quantization is {asked!r}, but its weights are not quantised; allowed: {allowed}",
        )
    if why:
        raise ModelLoadError(name, f"quantization is {asked!r}, but {why}")


def refuse_narrow(name: str, headers: Mapping[str, TensorHeader]) -> None:
    """Raise ModelLoadError for weights of a narrow type, which no configuration tells of."""
    for tensor, header in headers.items():
        if header.dtype.startswith(_NARROW):
            raise ModelLoadError(
                name,
                f"its weights are quantised, {tensor} of type {header.dtype} among them, and "
                "no configuration names the method; give a checkpoint whose config.json does",
            )


def widen(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert what was dequantised to bfloat16 to the wider type that the model is served in."""
    if dtype != torch.float32:
        return
    for parameter in module.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def widen_codes(module: PreTrainedModel) -> bool:
    """Make float32 of a module's coded matrices, whose forward is not recorded; True if it had any.

    Without memory for them they stay, and each step dequantises them anew.
    """
    coded = list(coded_parameters(module))
    if not coded:
        return False
    needed, memory = sum(4 * each.numel() for each in coded), read_host_memory()
    if memory is not None and needed > memory.available:
        logger.warning(
            "matrices stay coded, and every step dequantises them, which is slow: %.2f GiB of "
            "memory are needed for float32",
            needed / 2**30,
        )
        return False
    logger.info("coded matrices become float32, as they cannot be packed")
    dequantise_parameters(module)
    return True


def _quantization_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The quantization_config of the model or of its text part, as the checkpoint's config.json has
    it.
    """
    for each in (config, config.get_text_config()):
        for own in _FIELDS:
            given = getattr(each, own, None)
            if isinstance(given, dict) and (own != _FIELDS[-1] or given.keys() >= _IN_MLX):
                return given
    return None


def _method(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a method as it is served, and its settings."""
    inner, producer = given.get("quantization"), given.get("producer")
    if isinstance(inner, dict):  # as ModelOpt's own file has it
        given = {**inner, **given}
    method = given.get("quant_method")
    if method is None and isinstance(producer, dict):
        method = producer.get("name")
    elif method is None and given.keys() >= _IN_MLX:
        method = "mlx"
    return _METHODS.get(str(method), str(method)), given


def _from_other_files(source: Source) -> tuple[dict[str, Any] | None, str]:
    """The quantisation that another file of the checkpoint names, and that file for the error
    message.
    """
    for file, method in _OTHER_FILES.items():
        given = read_json(source, file)
        if given is None:
            continue
        if file == _MODELOPT:
            inner = given.get("quantization")
            if not isinstance(inner, dict) or inner.get("quant_algo") is None:
                continue  # of the cache alone
            return {"quant_method": method, **inner}, f", as {file} says"
        return {"quant_method": method, **given}, f" (as {file} says)"
    return None, ""


def _rotations(given: Mapping[str, Any]) -> Iterator[str]:
    """The places where a compressed checkpoint has activations rotated that its weights go with."""
    config = given.get("transform_config")
    groups = config.get("config_groups") if isinstance(config, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        places = group.get("apply") if isinstance(group, dict) else None
        for place in places if isinstance(places, list) else ():
            location = place.get("location") if isinstance(place, dict) else None
            if location in _ROTATED:
                yield location
