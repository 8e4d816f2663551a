"""Finds the products of a recorded forward that adapters may change, and lets the step's adapters
change them.

A site is a linear layer, known by its weight: behind each of its products stands a call of the
step's adapters, which nothing else reads around. It is put there once patterns are fused, so these
match as they do without adapters; only a sum with the residual is no longer the product's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from slipstream_core.adapters.sites import Site
from slipstream_core.attention.cpu_backend import CpuContext
from slipstream_core.attention.interface import AttentionContext
from slipstream_core.forward.projection import Coded, Dense, Projection, has_rows, look_up, project
from slipstream_core.kernels.cpu.step_adapters import StepAdapters
from slipstream_core.states.flat_step import FlatContext, attention_of

_EMBEDDINGS = (torch.ops.aten.embedding.default, look_up)


def adapters_of(context: AttentionContext | FlatContext) -> StepAdapters | None:
    """The adapters of a forward's step; None if no token has one."""
    attention = attention_of(context)
    return attention.adapters if isinstance(attention, CpuContext) else None


def adapt_by_context(
    context: AttentionContext | FlatContext,
    y: torch.Tensor,
    x: torch.Tensor,
    site: int,
    is_of_kept: bool,
) -> torch.Tensor:
    """The product y [1, rows, n] of x [1, rows, k], changed by the rows' adapters."""
    adapters = adapters_of(context)
    return y if adapters is None else adapters.adapt(y, x, site, is_of_kept=is_of_kept)


def mark_sites(graph: GraphModule, names: Mapping[int, str], *, kept: int) -> dict[str, Site]:
    """Let adapters change each product of a layer in `names`, by the id of its weight; returns the
    sites by name. kept: the number of tokens whose logits are wanted in the recording.

    A layer whose weight is read in any other way, but for looking up rows, is no site: a part of
    what it does would not be changed.
    """
    context = next(node for node in graph.graph.nodes if node.name == "context")
    others = _read_otherwise(graph)
    sites: dict[str, Site] = {}
    for node in list(graph.graph.find_nodes(op="call_function", target=project)):
        projection = getattr(graph, node.args[1].target)
        weight, x = _weight_of(projection), node.args[0]
        name = None if weight is None else names.get(id(weight))
        if name is None or id(weight) in others or not has_rows(x):
            continue
        num_inputs = int(x.meta["val"].shape[-1])
        site = sites.setdefault(name, Site(len(sites), projection.num_outputs, num_inputs))
        is_of_kept = int(x.meta["val"].shape[1]) == kept
        with graph.graph.inserting_after(node):
            call = graph.graph.call_function(
                adapt_by_context, (context, node, x, site.number, is_of_kept)
            )
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call, delete_user_cb=lambda user, own=call: user is not own)
    return sites


def _weight_of(projection: Projection) -> torch.Tensor | None:
    if isinstance(projection, Coded):
        return projection.weights[0] if len(projection.weights) == 1 else None
    return projection.weight if isinstance(projection, Dense) else None


def _read_otherwise(graph: GraphModule) -> set[int]:
    """Ids of tensors that some operator reads which is neither a product nor an embedding, and of
    those of which a product is not by row.
    """
    found = set()
    for node in graph.graph.find_nodes(op="get_attr"):
        held = getattr(graph, node.target)
        if isinstance(held, torch.Tensor) and any(
            each.target not in _EMBEDDINGS for each in node.users
        ):
            found.add(id(held))
    for node in graph.graph.find_nodes(op="call_function", target=project):
        weight = _weight_of(getattr(graph, node.args[1].target))
        if weight is not None and not has_rows(node.args[0]):
            found.add(id(weight))
    return found
