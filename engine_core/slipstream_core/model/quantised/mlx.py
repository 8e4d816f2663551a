"""Weights of MLX, and of what transformers calls metal: integers in words of 32 bits, the lowest
bits first and over the borders of words, with a scale and an offset for each group of inputs.

A weight is `scale * integer + bias`; its layer has `weight` [N, K * bits / 32], `scales` and
`biases` (metal's `qbiases`) [N, K / group_size]. Layers may have settings of their own, under their
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import Codes, Format
from slipstream_core.model.quantised.float4 import mxfp4_weight
from slipstream_core.model.quantised.tensors import (
    QuantisedWeightError,
    Tensors,
    refuse_shape,
    unpacked,
)
from slipstream_core.model.quantised.weight import QuantisedWeight, scales_of

UNCHANGED = frozenset(
    (
        "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite",
        "helium", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss",
        "smollm3", "starcoder2",
    )
)  # fmt: skip
"""Types of models whose names and numbers MLX has as transformers has them (mlx-lm's `sanitize`);
in others it turns convolutions, adds to norms or joins experts.
"""

_WIDTHS = {2: 4, 3: 4, 4: 4, 5: 5, 6: 6, 8: 8}  # of codes, by bits in words
_MODES = ("affine", "mxfp4")


def read_mlx(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint. Raises QuantisedWeightError, also where the settings name no
    method and the tensors are GPTQ's.
    """
    found = {}
    for name in tensors:
        if name.endswith(".qweight") and settings.get("quant_method") is None:
            raise QuantisedWeightError(
                f"its quantization_config names no quant_method, as MLX's and old ones of GPTQ do, "
                f'and {name} is not MLX\'s: if it is GPTQ\'s, add "quant_method": "gptq"'
            )
        layer = name.removesuffix(".scales")
        if layer == name:
            continue
        own = settings.get(layer)
        if own is not None and not isinstance(own, Mapping):
            raise QuantisedWeightError(f"{name} is there, but the settings of {layer} are {own!r}")
        found[f"{layer}.weight"] = _weight(tensors, layer, {**settings, **(own or {})})
    return found


def _weight(tensors: Tensors, layer: str, settings: Mapping[str, Any]) -> QuantisedWeight:
    mode = settings.get("mode") or "affine"
    if mode == "mxfp4":
        return mxfp4_weight(tensors, f"{layer}.weight", f"{layer}.scales")
    bits, group = settings.get("bits"), settings.get("group_size")
    if mode != "affine":
        allowed = ", ".join(_MODES)
        raise QuantisedWeightError(f"{layer} is quantised by {mode!r}, allowed: {allowed}")
    if bits not in _WIDTHS:
        raise QuantisedWeightError(f"{layer} has bits {bits!r}, allowed: 2, 3, 4, 5, 6, 8")
    if not isinstance(group, int) or group < 1:
        raise QuantisedWeightError(f"group_size is {group!r}, allowed: a positive integer")
    names = [f"{layer}.{each}" for each in ("weight", "scales", "biases")]
    if names[2] not in tensors:
        names[2] = f"{layer}.qbiases"
    words = tensors.array(names[0], "U32", ndim=2)
    num_inputs = group * tensors.array(names[1], "BF16", "F16", ndim=2).shape[1]
    refuse_shape(names[0], words.shape, (len(words), -(-num_inputs * bits // 32)))
    shape = (len(words), num_inputs)
    scales, offsets = (scales_of(tensors, each, shape, group=group) for each in names[1:])
    if scales.number != offsets.number:
        raise QuantisedWeightError(f"{names[2]} is of another type than {names[1]}")
    width = _WIDTHS[bits]
    form = Format(
        f"mlx{bits}_{scales.number}",
        width,
        "unsigned" if width == 8 else "integer",
        group=scales.group,
        scale=scales.number,
        offset=scales.number,
    )

    def read(rows: Rows) -> Codes:
        codes = unpacked(np.ascontiguousarray(words[rows]), bits, num_inputs)
        return Codes(codes, scales=scales.of_rows(rows), offsets=offsets.of_rows(rows))

    return QuantisedWeight(shape, CodedMatrix(form, *shape, read, [words]), frozenset(names))
