"""Weights of GPTQ, AWQ and AutoRound: integers in words of 32 bits, by groups of inputs.

GPTQ packs along inputs, qweight [K * bits / 32, N]; AWQ along outputs, qweight [K, N / 8], the
eight of a word in the order 0, 2, 4, 6, 1, 3, 5, 7. Zeros are packed along outputs in both.
`checkpoint_format` gptq_v2 has them as they are; in GPTQ's first version a word of zeros is less by
a one in each place, as one subtraction of 32 bits, so that a zero of 0 borrows from its neighbour
(GPTQModel's `utils/model.py`). Widths that do not divide 32 go over the borders of words, and each
place is less by one; but what GPTQModel itself takes from three words of zeros of 3 bits is another
number, which it adds again. AutoRound writes either layout, and names which. A layer with
`desc_act` has its groups by g_idx.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import Rows
from slipstream_core.model.quantised.compressed_tensors import (
    integer_matrix,
    mxfp8_weight,
    nvfp4_weight_of,
)
from slipstream_core.model.quantised.float4 import mxfp4_weight
from slipstream_core.model.quantised.tensors import (
    Array,
    QuantisedWeightError,
    Tensors,
    refuse_shape,
    unpacked,
)
from slipstream_core.model.quantised.weight import (
    QuantisedWeight,
    Scales,
    order_of_groups,
    scales_of,
    whole_groups,
)

_WORD_BITS = 32
_AWQ_BITS, _AWQ_EACH = 4, 8
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of each of eight outputs in its word
_PACKED = ".qweight"
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in each place of a word
_OF_THREE = (0x24924924, 0x92492492, 0x49249249)  # GPTQModel's, of 3 bits, by turns
_BITS = range(2, 9)
_IS_FIRST = {"gptq": True, "gptq_v2": False}
_OLD_AUTO_ROUND = ("auto_round:exllamav2", "auto_round:triton", "auto_round:gptq:")
_AUTO_ROUND = ("auto_round", "auto_round:auto_awq", "auto_round:auto_gptq", "auto_round:gptqmodel")


def read_gptq(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a GPTQ checkpoint. Raises QuantisedWeightError."""
    kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if not isinstance(kind, str) or kind not in _IS_FIRST:
        raise QuantisedWeightError(f"checkpoint_format is {kind!r}, allowed: gptq, gptq_v2")
    found = {}
    for layer in _layers(tensors):
        own = _settings_of(layer, settings)
        bits, size = own.get("bits"), _group_size(own.get("group_size", -1))
        zeros = _Zeros(is_first=_IS_FIRST[kind], is_by_gptqmodel=_is_by_gptqmodel(settings))
        found[f"{layer}.weight"] = _gptq(tensors, layer, _checked(bits), size, zeros)
    return found


class _Zeros(NamedTuple):
    """The way in which zeros are written."""

    is_first: bool
    is_by_gptqmodel: bool = False


def _checked(bits: Any) -> int:
    if not isinstance(bits, int) or bits not in _BITS:
        raise QuantisedWeightError(f"bits is {bits!r}, allowed: 2 to 8")
    return bits


def _is_by_gptqmodel(settings: Mapping[str, Any]) -> bool:
    meta = settings.get("meta")
    made_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = made_by if isinstance(made_by, list) else [made_by]
    return any(str(each).startswith("gptqmodel") for each in names)


def read_auto_round(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a checkpoint of AutoRound. Raises QuantisedWeightError."""
    # before there were names of layouts, one stood in front of its kernel
    kind = str(settings.get("packing_format") or settings.get("backend") or _AUTO_ROUND[2])
    is_awq, is_first = "awq" in kind, "gptq" in kind and "gptqmodel" not in kind
    if "llm_compressor" in kind:
        return _floats(tensors, settings)
    if not (is_awq or kind in _AUTO_ROUND or kind.startswith(_OLD_AUTO_ROUND)):
        raise QuantisedWeightError(
            f"packing_format is {kind!r}, allowed: {', '.join(_AUTO_ROUND)}, "
            "auto_round:llm_compressor"
        )
    found = {}
    for layer in _layers(tensors):
        own = _own_settings(layer, settings)
        if own.get("data_type", "int") != "int":
            raise QuantisedWeightError(
                f"{layer} has the data_type {own['data_type']!r}, allowed: int"
            )
        bits, size = _checked(own.get("bits")), _group_size(own.get("group_size", -1))
        if is_awq and bits != _AWQ_BITS:
            raise QuantisedWeightError(f"{layer} has bits {bits}, allowed: 4")
        found[f"{layer}.weight"] = (
            _awq(tensors, layer, size)
            if is_awq
            else _gptq(tensors, layer, bits, size, _Zeros(is_first))
        )
    return found


def _own_settings(layer: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a layer, with those of `extra_config` that are under its name, or of the
    first pattern there that is in its name.
    """
    extra = settings.get("extra_config") or {}
    own = extra.get(layer)
    for pattern in extra if own is None else ():
        try:
            is_it = re.search(pattern, layer) is not None
        except re.error as error:
            raise QuantisedWeightError(f"{pattern!r} is no pattern: {error}") from None
        if is_it:
            own = extra[pattern]
            break
    return {**settings, **(own or {})}


def _floats(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """Weights of 4 and 8 bits of floating point, in compressed-tensors' layouts."""
    found = {}
    for name in tensors:
        layer = name.removesuffix(".weight_scale")
        if layer == name:
            continue
        if f"{layer}.weight_global_scale" in tensors:
            weight = nvfp4_weight_of(tensors, layer)
        elif f"{layer}.weight_packed" in tensors:
            weight = mxfp4_weight(tensors, f"{layer}.weight_packed", name)
        elif str(_own_settings(layer, settings).get("data_type")).startswith("mx"):
            weight = mxfp8_weight(tensors, layer)
        else:
            raise QuantisedWeightError(f"{layer}.weight_packed is missing")
        found[f"{layer}.weight"] = weight
    return found


def _settings_of(layer: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a layer, with those of the first pattern of `dynamic` that it matches
    (GPTQModel's `dynamic_get`). Raises QuantisedWeightError.
    """
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise QuantisedWeightError(f"dynamic is {dynamic!r}, allowed: patterns and their settings")
    for given, own in dynamic.items():
        pattern = given.removeprefix("-:").removeprefix("+:")
        try:
            is_it = re.match(pattern, layer) is not None
        except re.error as error:
            raise QuantisedWeightError(f"{given!r} of dynamic is no pattern: {error}") from None
        if not is_it:
            continue
        if given.startswith("-:"):
            raise QuantisedWeightError(
                f"{layer}{_PACKED} is there, but {given!r} of dynamic says that it is not quantised"
            )
        if not isinstance(own, Mapping):
            raise QuantisedWeightError(f"dynamic has {own!r} for {given!r}, allowed: settings")
        return {**settings, **own}
    return settings


def read_awq(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of an AWQ checkpoint. Raises QuantisedWeightError."""
    bits = settings.get("bits", settings.get("w_bit"))
    size = _group_size(settings.get("group_size", settings.get("q_group_size", -1)))
    if bits != _AWQ_BITS:
        raise QuantisedWeightError(f"bits is {bits!r}, allowed: 4")
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise QuantisedWeightError(f"version is {version!r}, allowed: gemm")
    return {f"{layer}.weight": _awq(tensors, layer, size) for layer in _layers(tensors)}


def _layers(tensors: Tensors) -> list[str]:
    return [name.removesuffix(_PACKED) for name in tensors if name.endswith(_PACKED)]


def _group_size(given: Any) -> int:
    if not isinstance(given, int) or not (given == -1 or given > 0):
        raise QuantisedWeightError(f"group_size is {given!r}, allowed: -1, or a positive integer")
    return given


def _gptq(tensors: Tensors, layer: str, bits: int, size: int, of_zeros: _Zeros) -> QuantisedWeight:
    names = {each: f"{layer}.{each}" for each in ("qweight", "qzeros", "scales", "g_idx")}
    words = tensors.array(names["qweight"], "I32", ndim=2)
    num_inputs, num_outputs = _WORD_BITS * len(words) // bits, words.shape[1]
    scales, num_groups = _scales_by_column(tensors, names["scales"], num_inputs, num_outputs, size)
    packed = tensors.array(names["qzeros"], "I32", ndim=2)
    num_words = -(-num_outputs * bits // _WORD_BITS)
    refuse_shape(names["qzeros"], packed.shape, (num_groups, num_words))
    zeros = _zeros(packed, bits, num_outputs, of_zeros).T
    order = order_of_groups(tensors, names["g_idx"], num_inputs, scales.group or num_inputs)

    def codes(rows: Rows) -> Array:
        return unpacked(np.ascontiguousarray(words[:, rows].T), bits, num_inputs)

    sizes = (num_outputs, num_inputs)
    matrix = integer_matrix(bits, sizes, scales, codes, zeros, order, [words])
    used = frozenset(name for name in names.values() if name in tensors)
    return QuantisedWeight(sizes, matrix, used, order)


def _zeros(packed: Array, bits: int, num_outputs: int, of: _Zeros) -> Array:
    """The zeros [groups, N] of words of them."""
    words = packed.view(np.uint32)
    own: Array = np.zeros(1, np.uint32)
    if of.is_first and bits in _ONES:
        own = np.array([_ONES[bits]], np.uint32)
    elif of.is_first and bits == len(_OF_THREE) and of.is_by_gptqmodel:
        own = np.resize(np.array(_OF_THREE, np.uint32), packed.shape[1])
    zeros = unpacked((words + own).view(np.int32), bits, num_outputs)
    if of.is_first and not np.any(own):
        zeros = zeros + np.uint8(1) & np.uint8((1 << bits) - 1)
    return zeros


def _awq(tensors: Tensors, layer: str, size: int) -> QuantisedWeight:
    names = {each: f"{layer}.{each}" for each in ("qweight", "qzeros", "scales")}
    words = tensors.array(names["qweight"], "I32", ndim=2)
    num_inputs, num_outputs = len(words), _AWQ_EACH * words.shape[1]
    scales, num_groups = _scales_by_column(tensors, names["scales"], num_inputs, num_outputs, size)
    packed = tensors.array(names["qzeros"], "I32", ndim=2)
    refuse_shape(names["qzeros"], packed.shape, (num_groups, words.shape[1]))
    zeros = _interleaved(packed).T

    def codes(rows: Rows) -> Array:
        if isinstance(rows, slice):
            first, last, _ = rows.indices(num_outputs)
            some = words[:, first // _AWQ_EACH : -(-last // _AWQ_EACH)]
            start = first % _AWQ_EACH
            return np.ascontiguousarray(_interleaved(some)[:, start : start + last - first].T)
        places = _AWQ_PLACES[rows % _AWQ_EACH] * _AWQ_BITS
        some = words.view(np.uint32)[:, rows // _AWQ_EACH] >> places.astype(np.uint32)
        return np.ascontiguousarray((some & np.uint32(15)).astype(np.uint8).T)

    sizes = (num_outputs, num_inputs)
    matrix = integer_matrix(_AWQ_BITS, sizes, scales, codes, zeros, None, [words])
    return QuantisedWeight(sizes, matrix, frozenset(names.values()))


def _interleaved(words: Array) -> Array:
    """AWQ's integers [n, W] of words in the order of outputs, uint8 [n, 8 W]."""
    by_place = unpacked(words, _AWQ_BITS, _AWQ_EACH * words.shape[1])
    found: Array = by_place.reshape(len(words), -1, _AWQ_EACH)[:, :, _AWQ_PLACES]
    return found.reshape(len(words), -1)


def _scales_by_column(
    tensors: Tensors, name: str, num_inputs: int, num_outputs: int, size: int
) -> tuple[Scales, int]:
    """Scales [groups, N], and the number of groups."""
    group = whole_groups(num_inputs, size)
    if group and num_inputs % group:
        raise QuantisedWeightError(
            f"{name} has groups of {group}, of which {num_inputs} inputs are no whole number"
        )
    num_groups = num_inputs // group if group else 1
    scales = scales_of(tensors, name, (num_groups, num_outputs), block=(1, 1))
    turned = np.ascontiguousarray(scales.of_rows(slice(0, num_groups)).T)
    return Scales(scales.number, group, lambda rows: turned[rows]), num_groups
