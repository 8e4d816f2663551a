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

import logging
from typing import Any

import torch
from torch.fx import GraphModule

from slipstream_core.kernels.cpu.kernels import Kernels

logger = logging.getLogger(__name__)

MAX_COPY_BYTES = 1 << 29
MIN_GIVEN_UP = 1 << 16  # elements; smaller matrices may be held twice
_TRIAL_ROWS = 3
_TOLERANCE = 1e-4  # relative to the largest result: the order of sums differs

_linear = torch.nn.functional.linear


def pack(graph: GraphModule, kernels: Kernels) -> int:
    """Pack all matrices that qualify; returns the number of bytes packed."""
    num_bytes = 0
    for node in graph.graph.find_nodes(op="call_function", target=_linear):
        x, source, bias = node.args
        if getattr(source, "op", None) != "get_attr" or not _is_rows(x):
            continue
        weight = getattr(graph, source.target)
        is_alone = _is_read_once(graph, source)
        if weight.dtype != torch.float32 or (not is_alone and weight.nbytes > MAX_COPY_BYTES):
            continue
        packed = _tried(weight, kernels)
        if packed is None:
            continue
        name = f"packed_{source.target}"
        graph.register_buffer(name, packed)
        with graph.graph.inserting_before(node):
            attribute = graph.graph.get_attr(name)
            product = graph.graph.call_function(kernels.product, (x, attribute, bias, len(weight)))
        product.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
        num_bytes += weight.nbytes
        if is_alone and weight.numel() >= MIN_GIVEN_UP:
            _give_up(graph, weight.untyped_storage().data_ptr())
        del weight
    graph.graph.eliminate_dead_code()
    return num_bytes


def _is_rows(x: Any) -> bool:
    """True if x is [1, rows, k]."""
    shape = tuple(x.meta["val"].shape) if "val" in x.meta else ()
    return len(shape) == 3 and int(shape[0]) == 1


def _is_read_once(graph: GraphModule, source: Any) -> bool:
    """True if only one operator reads this node's memory."""
    held = getattr(graph, source.target).untyped_storage().data_ptr()
    return (
        sum(
            len(node.users)
            for node in graph.graph.find_nodes(op="get_attr")
            if getattr(graph, node.target).untyped_storage().data_ptr() == held
        )
        == 1
    )


def _tried(weight: torch.Tensor, kernels: Kernels) -> torch.Tensor | None:
    """The packed weight, or None if it cannot be packed or its product differs."""
    x = torch.linspace(-1, 1, _TRIAL_ROWS * weight.shape[1]).reshape(1, _TRIAL_ROWS, -1)
    try:
        with torch.no_grad():
            expected = _linear(x, weight)
            packed = kernels.pack(weight)
            given = kernels.product(x, packed, None, len(weight))
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError without memory
        said = str(error).partition("\n")[0][:200]
        logger.warning("a matrix of %d x %d stays as it is: %s", *weight.shape, said)
        return None
    if not (expected - given).abs().max() <= _TOLERANCE * expected.abs().max():
        logger.warning("a %d x %d matrix is not packed: the packed product differs", *weight.shape)
        return None
    return packed


def _give_up(graph: GraphModule, held: int) -> None:
    """Empty every tensor in this storage; the recording shares them with the module."""
    for tensor in (*graph.parameters(), *graph.buffers()):
        if tensor.untyped_storage().data_ptr() == held:
            tensor.data = tensor.new_empty(0)
