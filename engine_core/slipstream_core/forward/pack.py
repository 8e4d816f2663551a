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

from typing import Any

import torch
from torch.fx import GraphModule

from slipstream_core.forward.fuse import projection_of
from slipstream_core.forward.projection import add_projection, num_readers, project
from slipstream_core.kernels.cpu.kernels import Kernels

MAX_COPY_BYTES = 1 << 29
MIN_GIVEN_UP = 1 << 16  # elements; smaller matrices may be held twice


def pack(graph: GraphModule, kernels: Kernels) -> int:
    """Pack all matrices that qualify; returns the number of bytes packed."""
    readers, num_bytes = num_readers(graph, _storage), 0
    for node in graph.graph.find_nodes(op="call_function", target=project):
        if not _is_rows(node.args[0]):
            continue
        projection = projection_of(graph, node)
        matrices = [each for each in projection.tensors() if each.dim() > 1]
        is_alone = all(readers[_storage(each)] == 1 for each in matrices)
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
        for matrix in matrices:
            if is_alone and matrix.numel() >= MIN_GIVEN_UP:
                _give_up(graph, _storage(matrix))
    graph.graph.eliminate_dead_code()
    return num_bytes


def _is_rows(x: Any) -> bool:
    """True if x is [1, rows, k]."""
    shape = tuple(x.meta["val"].shape) if "val" in x.meta else ()
    return len(shape) == 3 and int(shape[0]) == 1


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _give_up(graph: GraphModule, held: int) -> None:
    """Empty every tensor in this storage; the recording shares them with the module."""
    for tensor in (*graph.parameters(), *graph.buffers()):
        if _storage(tensor) == held:
            tensor.data = tensor.new_empty(0)
