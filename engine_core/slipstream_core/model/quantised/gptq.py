"""Weights of GPTQ and AWQ: integers in words of 32 bits, by groups of inputs.

GPTQ packs along inputs, qweight [K * bits / 32, N]; AWQ along outputs, qweight [K, N / 8], the
eight of a word in the order 0, 2, 4, 6, 1, 3, 5, 7. Zeros are packed along outputs in both.
`checkpoint_format` gptq_v2 has them as they are; in GPTQ's first version a word of zeros is less by
a one in each place, as one subtraction of 32 bits, so that a zero of 0 borrows from its neighbour
(GPTQModel's `utils/model.py`). A layer with `desc_act` has its groups by g_idx.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import Rows
from slipstream_core.model.quantised.compressed_tensors import integer_matrix
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
_IS_FIRST = {"gptq": True, "gptq_v2": False}


def read_gptq(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """The weights of a GPTQ checkpoint. Raises QuantisedWeightError."""
    kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if not isinstance(kind, str) or kind not in _IS_FIRST:
        raise QuantisedWeightError(f"checkpoint_format is {kind!r}, allowed: gptq, gptq_v2")
    found = {}
    for layer in _layers(tensors):
        own = _settings_of(layer, settings)
        bits, size = own.get("bits"), _group_size(own.get("group_size", -1))
        if not isinstance(bits, int) or bits not in _ONES:
            raise QuantisedWeightError(f"bits is {bits!r}, allowed: 2, 4, 8")
        found[f"{layer}.weight"] = _gptq(tensors, layer, bits, size, is_first=_IS_FIRST[kind])
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


def _gptq(tensors: Tensors, layer: str, bits: int, size: int, *, is_first: bool) -> QuantisedWeight:
    names = {each: f"{layer}.{each}" for each in ("qweight", "qzeros", "scales", "g_idx")}
    each = _WORD_BITS // bits
    words = tensors.array(names["qweight"], "I32", ndim=2)
    num_inputs, num_outputs = each * len(words), words.shape[1]
    scales, num_groups = _scales_by_column(tensors, names["scales"], num_inputs, num_outputs, size)
    packed = tensors.array(names["qzeros"], "I32", ndim=2)
    refuse_shape(names["qzeros"], packed.shape, (num_groups, -(-num_outputs // each)))
    if is_first:
        packed = (packed.view(np.uint32) + np.uint32(_ONES[bits])).view(np.int32)
    zeros = unpacked(packed, bits, num_outputs).T
    order = order_of_groups(tensors, names["g_idx"], num_inputs, scales.group or num_inputs)

    def codes(rows: Rows) -> Array:
        return unpacked(np.ascontiguousarray(words[:, rows].T), bits, num_inputs)

    sizes = (num_outputs, num_inputs)
    matrix = integer_matrix(bits, sizes, scales, codes, zeros, order, [words])
    used = frozenset(name for name in names.values() if name in tensors)
    return QuantisedWeight(sizes, matrix, used, order)


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
