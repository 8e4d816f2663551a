"""Quantised checkpoints: which are served, and why others are refused.

Those that transformers can dequantise are dequantised as they are loaded, so they take the memory
and give the speed of the type that they are served in. Nothing is computed in their own type: the
kernels for that exist on some cards only, and none has been tried here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream_core.runner.load_error import ModelLoadError

# By method, as checkpoints name it: the package that transformers needs to dequantise it, by its
# module and its name in registries.
_SERVED: dict[str, tuple[str, str] | None] = {
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "fp8": ("accelerate", "accelerate"),
    "mxfp4": None,
}


def dequantise(name: str, config: PreTrainedConfig, *, is_sliced: bool = False) -> bool:
    """Have a quantised checkpoint dequantised when it is loaded; returns whether it is quantised.

    is_sliced: a rank's slice is loaded. Raises ModelLoadError for that, for a method that is not
    served, and for a package that is missing.
    """
    given = _quantization_config(config)
    if given is None:
        return False
    method = str(given.get("quant_method"))
    if method not in _SERVED:
        raise ModelLoadError(
            name,
            f"its weights are quantised by {method!r}, which is not served; served are checkpoints "
            f"that are not quantised, and {', '.join(sorted(_SERVED))}, which are dequantised as "
            "they are loaded",
        )
    needed = _SERVED[method]
    if needed is not None and find_spec(needed[0]) is None:
        raise ModelLoadError(
            name,
            f"its weights are quantised by {method!r}, which transformers dequantises with "
            f"{needed[1]}; install it (pip install {needed[1]}), or give a checkpoint that is not "
            "quantised",
        )
    if is_sliced:  # transformers cuts before it dequantises, without regard to scales' blocks
        raise ModelLoadError(
            name,
            "its weights are quantised, and such checkpoints are not cut for several devices; set "
            "tensor_parallel_size to 1",
        )
    given["dequantize"] = True
    return True


def widen(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert what was dequantised to bfloat16 to the wider type that the model is served in."""
    if dtype != torch.float32:
        return
    for parameter in module.parameters():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _quantization_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    """As the checkpoint's config.json has it, of the model or of its text part."""
    for each in (config, config.get_text_config()):
        given = getattr(each, "quantization_config", None)
        if isinstance(given, dict):
            return given
    return None
