"""Packs the matrices of a recorded forward into the layout of our own products.

torch's product of a few rows with a large matrix reaches half of the cores' speed, as it repacks
the weight in every call; with a small matrix the call costs as much as its arithmetic. `products.c`
takes a matrix that was packed once, at load.

- A matrix that only one operator reads is packed and, from MIN_GIVEN_UP elements on, released, so
  weights are held once. The recorded module cannot run afterwards.
- A matrix that is read elsewhere too (a head tied to the embedding) is packed as a copy if it takes
  at most MAX_COPY_BYTES.
- Each packed matrix is compared with the original before it replaces it. A matrix that differs, or
  cannot be packed, stays as it is.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from slipstream_core.forward.experts import mix
from slipstream_core.forward.fuse import projection_of
from slipstream_core.forward.projection import (
    Coded,
    Lookup,
    Packed,
    Projection,
    Stacked,
    add_projection,
    has_rows,
    num_readers,
    project,
)
from slipstream_core.kernels.codes.coded_parameter import CodedParameter
from slipstream_core.kernels.codes.mapped_memory import release
from slipstream_core.kernels.cpu.kernels import Kernels

MAX_COPY_BYTES = 1 << 29
MIN_GIVEN_UP = 1 << 16  # elements; smaller matrices may be held twice


def pack(graph: GraphModule, kernels: Kernels, *, keeps_module: bool = False) -> int:
    """Pack all matrices that qualify; returns the number of bytes packed. keeps_module: none is
    released.
    """
    give_up = _keep if keeps_module else _give_up
    readers, num_bytes = num_readers(graph, _storage), 0
    for node in graph.graph.find_nodes(op="call_function", target=project):
        projection = projection_of(graph, node)
        if not has_rows(node.args[0]) and not isinstance(projection, Stacked):
            continue
        matrices = [each for each in projection.tensors() if each.dim() > 1]
        lookups = _lookups(graph, projection)
        is_alone = all(readers[_storage(each)] == 1 + len(lookups) for each in matrices)
        own_bytes = sum(each.nbytes for each in matrices)
        if not is_alone and own_bytes > MAX_COPY_BYTES:
            continue
        packed = projection.packed(kernels)
        if packed is None:
            continue
        with graph.graph.inserting_before(node):
            node.update_arg(1, add_projection(graph, packed))
        num_bytes += own_bytes
        readers.subtract(map(_storage, projection.tensors()))
        if isinstance(packed, Packed) and packed.number:
            for lookup in lookups:
                lookup.read_from(kernels, packed.panels, packed.number)
        elif lookups:
            continue
        for matrix in matrices:
            if is_alone and matrix.numel() >= MIN_GIVEN_UP:
                give_up(graph, _storage(matrix))
    for node in graph.graph.find_nodes(op="call_function", target=mix):
        mixture = getattr(graph, node.args[3].target)
        packed_mixture = mixture.packed(kernels)
        if packed_mixture is None:
            continue
        with graph.graph.inserting_before(node):
            node.update_arg(3, add_projection(graph, packed_mixture))
        for matrix in (mixture.up, mixture.down):
            num_bytes += matrix.nbytes
            if readers[_storage(matrix)] == 1 and matrix.numel() >= MIN_GIVEN_UP:
                give_up(graph, _storage(matrix))
    for lookup in [each for each in graph.children() if isinstance(each, Lookup)]:
        if readers[_storage(lookup.weight)] == 1 and lookup.pack(kernels):
            give_up(graph, _storage(lookup.weight))
    graph.graph.eliminate_dead_code()
    return num_bytes


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _keep(_graph: GraphModule, _held: int) -> None:
    """Leave a storage as it is."""


def _give_up(graph: GraphModule, held: int) -> None:
    """Empty every tensor in this storage; the recording shares them with the module."""
    tensors = [each for each in (*graph.parameters(), *graph.buffers()) if _storage(each) == held]
    for tensor in tensors:
        if isinstance(tensor, CodedParameter):
            tensor.give_up()
        elif tensor.is_contiguous():
            release(tensor.data_ptr(), tensor.nbytes)
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def _lookups(graph: GraphModule, projection: Projection) -> list[Lookup]:
    """The lookups that take rows of a projection's own matrix."""
    if not isinstance(projection, Coded) or len(projection.weights) > 1:
        return []
    found = [each for each in graph.children() if isinstance(each, Lookup)]
    return [each for each in found if each.weight is projection.weights[0]]
