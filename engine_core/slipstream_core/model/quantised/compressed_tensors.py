"""Weights of compressed-tensors: packed integers, and numbers of 8 bits, with their scales.

A weight is `scale * (code - zero point)`; with groups, of an input's group. Formats are those of
the package's `compressors`: pack-quantized, int-quantized, float-quantized, naive-quantized,
nvfp4-pack-quantized,
mxfp4-pack-quantized and mxfp8-quantized. The settings of a layer are those of the target in
`config_groups` that is its name, or else of the first pattern that it matches, or else of its
class. Patterns are in the order of the alphabet, not of the configuration; of a target that two
groups have, the last of them counts (the package's `match_targets`, `apply_quantization_config`).

Packed integers of 3, 5, 6 and 7 bits have two layouts under one name: up to the release 0.17 each
word has whole integers, from 0.18 on integers go over the borders of words. The width of the
tensor tells which, and where it does not, the release that the checkpoint names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, Rows
from slipstream_core.kernels.codes.formats import Codes, Format
from slipstream_core.model.quantised.float4 import mxfp4_weight, nvfp4_weight
from slipstream_core.model.quantised.float8 import TYPES, float8_weight
from slipstream_core.model.quantised.tensors import (
    Array,
    QuantisedWeightError,
    Tensors,
    refuse_beyond,
    refuse_shape,
    unpacked,
    unpacked_by_word,
)
from slipstream_core.model.quantised.weight import (
    QuantisedWeight,
    Scales,
    order_of_groups,
    scales_of,
    whole_groups,
)

_WORD_BITS = 32
_MX_GROUP = 32
_FIRST_DENSE = (0, 18)  # the release from which integers go over the borders of words
_NARROW = 4  # bits that codes have at least
_BYTE = 8
_PATTERN = "re:"
_CLASSES = ("Linear", "LinearBase")
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_ZEROS = ("channel", "group")  # strategies of which pack-quantized packs zeros, too
FORMATS = (
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
"""Formats that are read; layers of several are in a checkpoint of the format mixed-precision."""


def read_compressed_tensors(
    tensors: Tensors, settings: Mapping[str, Any]
) -> dict[str, QuantisedWeight]:
    """The weights of a compressed checkpoint. Raises QuantisedWeightError."""
    groups = _groups(settings)
    found = {}
    for layer in _layers(tensors):
        group = _group_of(layer, groups)
        form = group.get("format") or settings.get("format")
        weights = group["weights"]
        match form:
            case "pack-quantized":
                weight = _packed(tensors, layer, weights, settings)
            case "int-quantized" | "float-quantized" | "naive-quantized":
                weight = _numbers(tensors, layer, weights)
            case "mxfp4-pack-quantized":
                weight = mxfp4_weight(tensors, f"{layer}.weight_packed", f"{layer}.weight_scale")
            case "mxfp8-quantized":
                weight = mxfp8_weight(tensors, layer)
            case "nvfp4-pack-quantized":
                weight = nvfp4_weight_of(tensors, layer)
            case _:
                allowed = ", ".join(FORMATS)
                raise QuantisedWeightError(f"{layer} has the format {form!r}, allowed: {allowed}")
        found[f"{layer}.weight"] = weight
    return found


def _groups(settings: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Targets and the settings of their layers, in the order in which they count."""
    given = settings.get("config_groups")
    if not isinstance(given, Mapping) or not given:
        raise QuantisedWeightError(f"config_groups is {given!r}, allowed: groups of layers")
    sparse = settings.get("sparsity_config")
    kind = sparse.get("format") if isinstance(sparse, Mapping) else None
    if kind not in (None, "dense"):
        raise QuantisedWeightError(
            f"sparsity_config has the format {kind!r}, allowed: none, or 'dense'"
        )
    found: dict[str, Mapping[str, Any]] = {}
    for name, group in given.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if weights is None:  # its layers have activations alone
            continue
        if not isinstance(weights, Mapping):
            raise QuantisedWeightError(f"config_groups.{name}.weights is {weights!r}")
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            raise QuantisedWeightError(f"config_groups.{name}.targets is {targets!r}")
        found.update(dict.fromkeys(targets, group))
    return sorted(found.items(), key=lambda each: _order(each[0]))


def _order(target: str) -> tuple[int, str]:
    """Names of layers, patterns, classes; each by the alphabet."""
    return 2 if target in _CLASSES else 1 if target.startswith(_PATTERN) else 0, target


def _layers(tensors: Tensors) -> Iterator[str]:
    """Names of layers whose weights are quantised."""
    seen = set()
    for name in tensors:
        for end in (".weight_packed", ".weight_scale", ".weight_zero_point"):
            layer = name.removesuffix(end)
            if layer != name and layer not in seen:
                seen.add(layer)
                yield layer
    for name, header in tensors.headers.items():
        layer = name.removesuffix(".weight")
        if layer != name and layer not in seen and header.dtype in (*TYPES, "I8"):
            raise QuantisedWeightError(f"{layer}.weight_scale is missing")


def _group_of(layer: str, groups: list[tuple[str, Mapping[str, Any]]]) -> Mapping[str, Any]:
    for target, group in groups:
        if target.startswith(_PATTERN):
            try:
                is_it = re.match(target.removeprefix(_PATTERN), layer) is not None
            except re.error as error:
                raise QuantisedWeightError(
                    f"the target {target!r} is no pattern: {error}"
                ) from None
        else:
            is_it = target == layer or target in _CLASSES
        if is_it:
            return group
    raise QuantisedWeightError(f"no group of config_groups targets {layer}, which is quantised")


def _packed(
    tensors: Tensors, layer: str, weights: Mapping[str, Any], settings: Mapping[str, Any]
) -> QuantisedWeight:
    bits = _bits(layer, weights)
    packed, scale, zero = (f"{layer}.weight_{end}" for end in ("packed", "scale", "zero_point"))
    words = tensors.array(packed, "I32", ndim=2)
    sizes = tensors.array(f"{layer}.weight_shape", "I64", "I32").reshape(-1).tolist()
    if len(sizes) != 2 or min(sizes) < 1:
        raise QuantisedWeightError(f"{layer}.weight_shape is {sizes}, allowed: two positive sizes")
    num_outputs, num_inputs = sizes
    unpack = _layout(packed, len(words), words.shape[1], bits, sizes, settings)
    scales = _scales(tensors, scale, weights, (num_outputs, num_inputs))
    used = {packed, scale, f"{layer}.weight_shape"}
    zeros = None
    if _is_symmetric(layer, weights):
        if zero in tensors:
            raise QuantisedWeightError(f"{zero} is there, but the weights are symmetric")
    elif _strategy(scale, weights) not in _PACKED_ZEROS:
        half = 1 << (bits - 1)
        given = _zeros(tensors, zero, scale, scales, weights, num_outputs)
        refuse_beyond(zero, -half, half - 1, given)
        zeros = (given.astype(np.int16) + half).astype(np.uint8)
        used.add(zero)
    else:
        num_groups = len(scales.of_rows(slice(0, 1))[0])
        columns = tensors.array(zero, "I32", ndim=2)
        turned = np.ascontiguousarray(columns.T)
        of_zeros = _layout(
            zero, num_groups, turned.shape[1], bits, [num_groups, num_outputs], settings
        )
        if len(turned) != num_groups:
            raise QuantisedWeightError(
                f"{zero} has {len(turned)} columns, allowed: {num_groups}, as {scale} has"
            )
        zeros = np.ascontiguousarray(of_zeros(turned, bits, num_outputs).T)
        used.add(zero)
    group = scales.group
    order = order_of_groups(tensors, f"{layer}.weight_g_idx", num_inputs, group or num_inputs)
    if f"{layer}.weight_g_idx" in tensors:
        used.add(f"{layer}.weight_g_idx")
    matrix = integer_matrix(
        bits,
        (num_outputs, num_inputs),
        scales,
        lambda rows: unpack(words[rows], bits, num_inputs),
        zeros,
        order,
        [words],
    )
    return QuantisedWeight((num_outputs, num_inputs), matrix, frozenset(used), order)


def integer_matrix(
    bits: int,
    sizes: tuple[int, int],
    scales: Scales,
    codes: Callable[[Rows], Array],
    zeros: Array | None,
    order: Array | None = None,
    memory: list[Array] | tuple[Array, ...] = (),
) -> CodedMatrix:
    """The matrix [N, K] of a layer, of unsigned integers of so many bits.

    zeros: uint8 [N, groups] of what is subtracted from them, half of their range if None. order: as
    of a QuantisedWeight.
    """
    half = 1 << (bits - 1)
    is_byte = bits > 6
    if zeros is not None and (zeros == half).all():
        zeros = None
    shift = half if is_byte else 0
    own_zeros = None if zeros is None else (zeros.astype(np.int16) - shift).astype(np.int8)
    form = Format(
        f"int{bits}_{scales.number}",
        _BYTE if is_byte else max(bits, _NARROW),
        group=scales.group,
        scale=scales.number,
        zero=half if own_zeros is None and not is_byte else 0,
        has_zeros=own_zeros is not None,
    )

    def read(rows: Rows) -> Codes:
        some = codes(rows)
        if order is not None:
            some = some[:, order]
        if is_byte:
            some = (some - np.uint8(half)).view(np.int8)
        return Codes(
            some,
            scales=scales.of_rows(rows),
            zeros=None if own_zeros is None else own_zeros[rows],
        )

    return CodedMatrix(form, *sizes, read, memory)


def _numbers(tensors: Tensors, layer: str, weights: Mapping[str, Any]) -> QuantisedWeight:
    """A weight of 8-bit integers or floating point numbers, one to a byte."""
    name, scale, zero = f"{layer}.weight", f"{layer}.weight_scale", f"{layer}.weight_zero_point"
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise QuantisedWeightError(f"{layer} has weights of type {kind!r}, allowed: int, float")
    codes = tensors.array(name, *(TYPES if kind == "float" else ("I8",)))
    shape = tensors.headers[name].shape
    if len(shape) < 2:
        raise QuantisedWeightError(f"{name} has the shape {list(shape)}, allowed: a matrix")
    scales = _scales(tensors, scale, weights, shape)
    used = {name, scale}
    is_symmetric = _is_symmetric(layer, weights)
    if kind == "float":
        if not is_symmetric:
            raise QuantisedWeightError(f"{layer} has floating point weights with zero points")
        return float8_weight(tensors, name, scales, used)
    num_outputs, num_inputs = shape[-2:]
    if len(shape) != 2:
        raise QuantisedWeightError(f"{name} has the shape {list(shape)}, allowed: a matrix")
    own_zeros = None
    if not is_symmetric:
        own_zeros = _zeros(tensors, zero, scale, scales, weights, num_outputs)
        used.add(zero)
    form = Format(
        f"int8_{scales.number}",
        _BYTE,
        group=scales.group,
        scale=scales.number,
        has_zeros=own_zeros is not None,
    )

    def read(rows: Rows) -> Codes:
        return Codes(
            codes[rows],
            scales=scales.of_rows(rows),
            zeros=None if own_zeros is None else own_zeros[rows],
        )

    matrix = CodedMatrix(form, num_outputs, num_inputs, read, [codes])
    return QuantisedWeight(shape, matrix, frozenset(used))


def _zeros(
    tensors: Tensors,
    name: str,
    scale: str,
    scales: Scales,
    weights: Mapping[str, Any],
    num_outputs: int,
) -> Array:
    """Zero points int8 [N, groups], which rows share as they share scales, of the same shape."""
    given = tensors.array(name, "I8")
    refuse_shape(name, given.shape, tensors.headers[scale].shape)
    rows = given.reshape(-1, len(scales.of_rows(slice(0, 1))[0]))
    height = 1
    if _strategy(scale, weights) == "block":
        height, _ = _block(weights.get("block_structure"))
    elif len(rows) == 1:
        height = num_outputs
    return np.ascontiguousarray(np.repeat(rows, height, axis=0)[:num_outputs])


def mxfp8_weight(tensors: Tensors, layer: str) -> QuantisedWeight:
    """The weight of a layer of MXFP8. Raises QuantisedWeightError."""
    name, scale = f"{layer}.weight", f"{layer}.weight_scale"
    tensors.array(name, *TYPES, ndim=2)
    shape = tensors.headers[name].shape
    scales = scales_of(tensors, scale, shape, group=_MX_GROUP, is_e8m0=True)
    return float8_weight(tensors, name, scales, {name, scale})


def nvfp4_weight_of(tensors: Tensors, layer: str) -> QuantisedWeight:
    """The weight of a layer of NVFP4. Raises QuantisedWeightError."""
    packed, scale, whole = (f"{layer}.weight_{end}" for end in ("packed", "scale", "global_scale"))
    return nvfp4_weight(tensors, packed, scale, whole, is_divided=True)


def _scales(
    tensors: Tensors, name: str, weights: Mapping[str, Any], shape: tuple[int, ...]
) -> Scales:
    strategy, size = _strategy(name, weights), weights.get("group_size")
    if strategy == "group":
        if not isinstance(size, int) or size < 1:
            raise QuantisedWeightError(f"group_size is {size!r}, allowed: a positive integer")
        if shape[-1] % size:
            raise QuantisedWeightError(
                f"{name} has groups of {size}, of which {shape[-1]} inputs are no whole number"
            )
        if group := whole_groups(shape[-1], size):
            return scales_of(tensors, name, shape, group=group)
    if strategy == "block":
        return scales_of(tensors, name, shape, block=_block(weights.get("block_structure")))
    return scales_of(tensors, name, shape)


def _strategy(name: str, weights: Mapping[str, Any]) -> str:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:  # as the package fills it in
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        allowed = ", ".join(_STRATEGIES)
        raise QuantisedWeightError(f"{name} is by {strategy!r}, allowed: {allowed}")
    return str(strategy)


def _block(given: Any) -> tuple[int, int]:
    match given:
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
        case _:
            raise QuantisedWeightError(f"block_structure is {given!r}, allowed: two sizes")


def _bits(layer: str, weights: Mapping[str, Any]) -> int:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if kind != "int":
        raise QuantisedWeightError(f"{layer} has packed weights of type {kind!r}, allowed: int")
    if not isinstance(bits, int) or not 1 <= bits <= _BYTE:
        raise QuantisedWeightError(f"{layer} has num_bits {bits!r}, allowed: 1 to 8")
    return bits


def _is_symmetric(layer: str, weights: Mapping[str, Any]) -> bool:
    given = weights.get("symmetric", True)
    if not isinstance(given, bool):
        raise QuantisedWeightError(f"{layer} has symmetric {given!r}, allowed: true, false")
    return given


def _layout(
    name: str,
    num_rows: int,
    num_words: int,
    bits: int,
    shape: list[int],
    settings: Mapping[str, Any],
) -> Callable[[Array, int, int], Array]:
    """The way in which rows of `shape[1]` integers are packed. Raises QuantisedWeightError."""
    across, by_word = -(-shape[1] * bits // _WORD_BITS), -(-shape[1] // (_WORD_BITS // bits))
    if num_rows != shape[0] or num_words not in (across, by_word):
        raise QuantisedWeightError(
            f"{name} has {num_rows} x {num_words} words, allowed: {shape[0]} x {across} for "
            f"{shape[0]} x {shape[1]} integers of {bits} bits"
        )
    if not _WORD_BITS % bits:
        return unpacked
    if across != by_word:
        return unpacked if num_words == across else unpacked_by_word
    release = re.match(r"(\d+)\.(\d+)", str(settings.get("version", "")))
    if release is None:
        raise QuantisedWeightError(
            f"{name} has integers of {bits} bits, whose layout changed with compressed-tensors "
            "0.18, and quantization_config names no version"
        )
    is_dense = (int(release[1]), int(release[2])) >= _FIRST_DENSE
    return unpacked if is_dense else unpacked_by_word
