"""Quantised checkpoints: which are served, and why others are refused.

Those that transformers can dequantise are dequantised as they are loaded, so they take the memory
and give the speed of the type that they are served in. Nothing is computed in their own type: the
kernels for that exist on some cards only, and none has been tried here.

What is refused, as it would be dequantised to other numbers:
- weights of a narrow type that no configuration names a method for;
- FP8 weights whose sizes are no multiples of their blocks: transformers takes the blocks to be as
  many equal parts as there are scales;
- packed integers of 3, 5, 6 or 7 bits: their layout changed under the same name in
  compressed-tensors 0.18;
- weights that go with rotated activations (`transform_config`): transformers does not rotate these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.checkpoint_files import TensorHeader
from slipstream_core.model.host_memory import read_host_memory
from slipstream_core.model.hub import Source, read_json
from slipstream_core.weights.coded_parameter import coded_parameters, dequantise_parameters
from slipstream_core.weights.online import ONLINE

logger = logging.getLogger(__name__)

# By method, as checkpoints name it: the package that transformers needs to dequantise it, by its
# module and its name in registries.
_SERVED: dict[str, tuple[str, str] | None] = {
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "fp8": ("accelerate", "accelerate"),
    "mxfp4": None,
}
_MODELOPT = "hf_quant_config.json"
# beside config.json, by the tools that write them, with the method where the file names none
_OTHER_FILES = {
    _MODELOPT: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
_NARROW = ("F4", "F6", "F8", "I8")  # in safetensors' spelling
_WORD_BITS = 32  # of packed integers
# Where a layer's activations are rotated (compressed-tensors' locations). Rotations of weights are
# in the weights; those of queries and cached keys leave their products as they are.
_ROTATED = ("input", "output")


def dequantise(
    name: str, config: PreTrainedConfig, source: Source, *, is_sliced: bool = False
) -> bool:
    """Have a quantised checkpoint dequantised when it is loaded; returns whether it is quantised.

    is_sliced: a rank's slice is loaded. Raises ModelLoadError for that, for a method that is not
    served, and for a package that is missing.
    """
    given, told_by = _quantization_config(config), ""
    if given is None:
        given, told_by = _from_other_files(source)
    if given is None:
        return False
    method = str(given.get("quant_method"))
    if method not in _SERVED or told_by:
        raise ModelLoadError(
            name,
            f"its weights are quantised by {method!r}{told_by}, which is not served; served are "
            f"checkpoints that are not quantised, and {', '.join(sorted(_SERVED))}, named in "
            "config.json, which are dequantised as they are loaded",
        )
    needed = _SERVED[method]
    if needed is not None and find_spec(needed[0]) is None:
        raise ModelLoadError(
            name,
            f"its weights are quantised by {method!r}, which transformers dequantises with "
            f"{needed[1]}; install it (pip install 'slipstream[quantised]'), or give a checkpoint "
            "that is not quantised",
        )
    if is_sliced:  # transformers cuts before it dequantises, without regard to scales' blocks
        raise ModelLoadError(
            name,
            "its weights are quantised, and such checkpoints are not cut for several devices; set "
            "tensor_parallel_size to 1",
        )
    for bits in _packed_bits(given):
        if _WORD_BITS % bits:
            raise ModelLoadError(
                name,
                f"its weights are packed integers of {bits} bits, whose layout depends on the "
                "release of compressed-tensors that packed them; served are those of 1, 2, 4 and "
                "8 bits",
            )
    for location in _rotations(given):
        raise ModelLoadError(
            name,
            f"its transform_config rotates the {location} of layers while the model runs, which is "
            "not served; served are checkpoints whose rotations are in their weights",
        )
    given["dequantize"] = True
    return True


def check_quantization(
    name: str, config: PreTrainedConfig, asked: str, *, is_quantised: bool, why: str
) -> None:
    """Raise ModelLoadError unless `asked` is the checkpoint's own method, or a format that matrices
    of a checkpoint that is not quantised may get.

    why: what stands against the latter, if anything does.
    """
    given = _quantization_config(config) or {"quant_method": "gguf"}  # which has none
    own = str(given.get("quant_method")) if is_quantised else None
    if asked == own:
        return
    if own is not None:
        raise ModelLoadError(
            name, f"quantization is {asked!r}, but its weights are quantised by {own!r} already"
        )
    if asked not in ONLINE:
        allowed = ", ".join(ONLINE)
        raise ModelLoadError(
            name,
            f"quantization is {asked!r}, but its weights are not quantised; allowed: {allowed}",
        )
    if why:
        raise ModelLoadError(name, f"quantization is {asked!r}, but {why}")


def refuse_misread(
    name: str, config: PreTrainedConfig, headers: Mapping[str, TensorHeader], *, is_quantised: bool
) -> None:
    """Raise ModelLoadError for weights that would be taken for other numbers than they are."""
    if not is_quantised:
        for tensor, header in headers.items():
            if header.dtype.startswith(_NARROW):
                raise ModelLoadError(
                    name,
                    f"its weights are quantised, {tensor} of type {header.dtype} among them, and "
                    "no configuration names the method; give a checkpoint whose config.json does",
                )
        return
    blocks = (_quantization_config(config) or {}).get("weight_block_size")
    for tensor, scale in headers.items():
        weight = headers.get(tensor.removesuffix("_scale_inv"))
        if not tensor.endswith("_scale_inv") or weight is None or len(scale.shape) < 2:
            continue
        if weight.dtype.startswith("F8") and not _are_whole(weight.shape, scale.shape, blocks):
            sizes = [" x ".join(map(str, each)) for each in (weight.shape, scale.shape)]
            of = "" if blocks is None else f" of {' x '.join(map(str, blocks))}"
            raise ModelLoadError(
                name,
                f"{tensor.removesuffix('_scale_inv')} is {sizes[0]}, which is no whole number of "
                f"blocks{of}, with {sizes[1]} scales; such FP8 weights are not served",
            )


def _are_whole(weight: tuple[int, ...], scale: tuple[int, ...], blocks: Any) -> bool:
    """True if the weight divides into equal blocks, one per scale, of the size that `blocks`
    names.
    """
    sizes = list(zip(weight[-2:], scale[-2:], strict=True))
    if any(not parts or size % parts for size, parts in sizes):
        return False
    if not isinstance(blocks, list | tuple) or len(blocks) != 2:
        return True
    return all(
        parts == 1 or size // parts == block
        for (size, parts), block in zip(sizes, blocks, strict=True)
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
        given = getattr(each, "quantization_config", None)
        if isinstance(given, dict):
            return given
    return None


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
            algorithm = inner.get("quant_algo") if isinstance(inner, dict) else None
            if algorithm is None:  # of the cache alone
                continue
            return {"quant_method": method}, f" ({algorithm}, as {file} says)"
        return {"quant_method": given.get("quant_method", method)}, f" (as {file} says)"
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


def _packed_bits(given: Mapping[str, Any]) -> Iterator[int]:
    """The widths of packed integers, in bits, of every group of a compressed checkpoint."""
    groups = given.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        form = group.get("format") or given.get("format") if isinstance(group, dict) else None
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if form == "pack-quantized" and isinstance(bits, int) and bits > 0:
            yield bits
