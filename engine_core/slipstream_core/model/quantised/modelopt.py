"""Weights of ModelOpt's and Quark's checkpoints, in which the types of a weight and of its scales
tell how it is written.

    weight      weight_scale                      is
    F8_E4M3     F32, of the matrix, rows, blocks  scale times number (*)
    F8_E4M3     U8 [N, K / 32]                    power of two times number (MXFP8)
    I8          F32 [N], or of the matrix         scale times integer
    U8          U8 [N, K / 32]                    MXFP4
    U8          F8_E4M3 [N, K / 16]               NVFP4, times weight_scale_2

(*) Of blocks (FP8_PB_WO) it is [N / 128, 1, K / 128, 1], or [N / 128, K / 128] by the name of
weight_scale_inv, and multiplies under that name, too.

Weights that go with inputs of another scale (`pre_quant_scale`) are refused: nothing multiplies
these here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.formats import Codes, Format
from slipstream_core.model.quantised.float4 import mxfp4_weight, nvfp4_weight
from slipstream_core.model.quantised.float8 import TYPES, float8_weight
from slipstream_core.model.quantised.tensors import QuantisedWeightError, Tensors
from slipstream_core.model.quantised.weight import QuantisedWeight, scales_of

ALGORITHMS = (
    "FP8",
    "FP8_PB_WO",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "MIXED_PRECISION",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
)
"""ModelOpt's that are read; of mixed precision each layer has one of the others."""

_BLOCK = (128, 128)
_NUM_SPREAD = 4  # dimensions of scales of blocks, where a 1 is behind each size
_MX_GROUP = 32
_FACTOR = ".pre_quant_scale"


def read_modelopt(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint of ModelOpt. Raises QuantisedWeightError."""
    layers = settings.get("quantized_layers")
    for layer, own in layers.items() if isinstance(layers, Mapping) else ():
        algorithm = own.get("quant_algo") if isinstance(own, Mapping) else own
        if algorithm not in ALGORITHMS and algorithm is not None:
            raise QuantisedWeightError(
                f"{layer} is quantised by {algorithm!r}, allowed: {', '.join(ALGORITHMS)}"
            )
    return _weights(tensors)


def read_quark(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint of Quark. Raises QuantisedWeightError."""
    weights = (settings.get("global_quant_config") or {}).get("weight")
    if isinstance(weights, list):
        raise QuantisedWeightError("its weights are quantised twice, allowed: once")
    return _weights(tensors)


def _weights(tensors: Tensors) -> dict[str, QuantisedWeight]:
    found = {}
    for name, header in tensors.headers.items():
        if name.endswith(_FACTOR):
            raise QuantisedWeightError(
                f"{name} is there: inputs of a layer that are multiplied are not served"
            )
        if len(header.shape) < 2 or header.dtype not in (*TYPES, "I8", "U8"):
            continue
        scale = f"{name}_scale"
        if header.dtype in TYPES and f"{name}_scale_inv" in tensors:
            scale = f"{name}_scale_inv"
        if name.endswith((".weight", "_proj")) and scale not in tensors:
            raise QuantisedWeightError(f"{scale} is missing")
        if scale in tensors:
            found[name] = _weight(tensors, name, scale)
    return found


def _weight(tensors: Tensors, name: str, scale: str) -> QuantisedWeight:
    header, of_scale = tensors.headers[name], tensors.headers[scale]
    if header.dtype == "U8":
        if of_scale.dtype == "U8":
            return mxfp4_weight(tensors, name, scale)
        return nvfp4_weight(tensors, name, scale, f"{name}_scale_2", is_divided=False)
    if header.dtype == "I8":
        return _int8(tensors, name, scale)
    if of_scale.dtype == "U8":
        scales = scales_of(tensors, scale, header.shape, group=_MX_GROUP, is_e8m0=True)
        return float8_weight(tensors, name, scales, {name, scale})
    sizes = of_scale.shape[::2] if len(of_scale.shape) == _NUM_SPREAD else of_scale.shape
    *outer, num_outputs, num_inputs = header.shape
    blocks = (*outer, -(-num_outputs // _BLOCK[0]), -(-num_inputs // _BLOCK[1]))
    # [N] is of rows, also where a row of blocks has N of them
    block = _BLOCK if sizes == blocks and blocks[-2:] != (1, 1) else None
    scales = scales_of(tensors, scale, header.shape, block=block)
    return float8_weight(tensors, name, scales, {name, scale})


def _int8(tensors: Tensors, name: str, scale: str) -> QuantisedWeight:
    codes = tensors.array(name, "I8", ndim=2)
    num_outputs, num_inputs = codes.shape
    shape = tensors.headers[name].shape
    scales = scales_of(tensors, scale, shape)
    form = Format(f"int8_{scales.number}", 8, scale=scales.number)
    matrix = CodedMatrix(
        form,
        num_outputs,
        num_inputs,
        lambda rows: Codes(codes[rows], scales=scales.of_rows(rows)),
        [codes],
    )
    return QuantisedWeight(shape, matrix, frozenset({name, scale}))
