"""Takes transformers' wrappers off a model that it has loaded in slices.

Transformers keeps slices as DTensors and wraps the forward of each module that its plan names,
which costs more host time per call than the call computes. Here the parameters become local
tensors, products projections that know how the ranks' parts come together, and other forwards
functions that end in a collective where the plan has one. What was loaded whole to be cut is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from slipstream_core.forward.projection import SlicedInputs, SlicedOutputs
from slipstream_core.sharding.collectives import (
    gather_over_ranks,
    slice_of,
    sum_over_ranks,
)
from slipstream_core.sharding.corrections import (
    FUSED_HEADS,
    LEAD_ALONE,
    NORM_OF_HEADS,
    NORM_OVER_RANKS,
)
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.sharding_plan import ShardingPlan, part_of

_Forward = Callable[..., torch.Tensor]


class UnknownStyleError(ValueError):
    """The plan shards a module in a way that is not implemented here."""


def as_local_modules(model: nn.Module, plan: ShardingPlan, rank: Rank) -> None:
    """Make the parameters local tensors, and put slices in the place of products and forwards.

    Raises UnknownStyleError.
    """
    heights = _as_local_tensors(model)
    for name, module in list(model.named_modules()):
        for own, parameter in list(module.named_parameters(recurse=False)):
            if plan.styles.get(part_of(f"{name}.{own}")) == LEAD_ALONE and not rank.leads:
                module._parameters[own] = _local(torch.zeros_like(parameter))
        if plan.keeps_one_head(name):
            _keep_own_head(module, plan, rank)
        style = plan.styles.get(part_of(name))
        if style is None:
            continue
        module.__dict__.pop("forward", None)  # transformers' wrapper
        if style == FUSED_HEADS:
            _keep_own_heads(model.get_submodule(name.rpartition(".")[0]), module, rank)
            continue
        projection = _projection(module, style, rank)
        forward = None if projection is not None else _forward(module, style, rank, heights)
        if projection is not None:
            model.set_submodule(name, projection)
        elif forward is not None:
            module.forward = MethodType(forward, module)
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # would be compared with the slice's size


def _as_local_tensors(model: nn.Module) -> dict[int, int]:
    """Replace all DTensors; the whole height of each embedding's matrix, by the module's id."""
    from torch.distributed.tensor import DTensor  # imports much, for this alone

    local: dict[int, tuple[Any, nn.Parameter]] = {}  # by parameter, which is kept for its id
    heights: dict[int, int] = {}
    for module in model.modules():
        own: dict[str, Any] = module._parameters  # torch's annotations know no DTensor here
        for name, parameter in list(own.items()):
            if not isinstance(parameter, DTensor):
                continue
            if isinstance(module, nn.Embedding):
                heights[id(module)] = parameter.shape[0]
            if id(parameter) not in local:  # tied parameters stay one
                local[id(parameter)] = (parameter, _local(parameter.to_local().detach()))
            own[name] = local[id(parameter)][1]
    return heights


def _local(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _keep_rows(module: Any, rows: torch.Tensor) -> None:
    module.weight = _local(module.weight.detach()[rows])
    if getattr(module, "bias", None) is not None:
        module.bias = _local(module.bias.detach()[rows])


def _keep_own_head(module: Any, plan: ShardingPlan, rank: Rank) -> None:
    """Cut a key or value projection, or a norm of keys, to the head that this rank shares with
    others.
    """
    assert plan.shared_key_heads is not None
    rows = torch.arange(len(module.weight)).chunk(plan.shared_key_heads)
    _keep_rows(module, rows[rank.index * plan.shared_key_heads // rank.size])


def _keep_own_heads(attention: Any, module: nn.Module, rank: Rank) -> None:
    """Cut a projection to queries, keys and values, and tell the attention that it has fewer."""
    heads, key_heads = attention.config.num_attention_heads, attention.num_key_value_heads
    dim = attention.head_dim
    first, last = (index * key_heads // rank.size for index in (rank.index, rank.index + 1))
    keys = range(first, max(last, first + 1))  # one at least, which others may have as well
    queries = range(rank.index * heads // rank.size, (rank.index + 1) * heads // rank.size)
    kept = [
        *queries,
        *(heads + key for key in keys),
        *(heads + key_heads + value for value in keys),
    ]
    rows = torch.tensor(kept)[:, None] * dim + torch.arange(dim)
    _keep_rows(module, rows.flatten().to(next(module.parameters()).device))
    attention.num_key_value_heads = len(keys)
    attention.config = copy.copy(attention.config)  # of this module alone
    attention.config.num_attention_heads = len(queries)


def _projection(module: nn.Module, style: str, rank: Rank) -> nn.Module | None:
    """A rank's part of a product, in the place of `module`; None if its form stays."""
    if not isinstance(module, nn.Linear):
        return None
    match style:
        case "rowwise":
            return SlicedInputs(module.weight, module.bias)
        case "rowwise_split_input" | "rowwise_rep":
            own = slice(*slice_of(module.in_features, rank.index, rank.size))
            return SlicedInputs(module.weight, module.bias, own)
        case "colwise_gather_output" | "colwise_rep":
            return SlicedOutputs(module.weight, module.bias, module.out_features)
        case _:
            return None


def _forward(module: nn.Module, style: str, rank: Rank, heights: dict[int, int]) -> _Forward | None:
    """The forward of a module of this style; None for that of its class."""
    own: _Forward = type(module).forward
    match style:
        case (
            "colwise"
            | "packed_colwise"
            | "replicate"
            | "replicated_with_grad_allreduce"
            | "local_params"
            | "mla_kv_a_proj"
        ):
            return None
        case _ if style == NORM_OF_HEADS:
            return None
        case "embedding_rowwise" if isinstance(module, nn.Embedding):
            begin, end = slice_of(heights[id(module)], rank.index, rank.size)
            return lambda self, ids: _embedded(self, ids, own, begin, end)
        case "embedding_colwise" if isinstance(module, nn.Embedding):
            width = module.embedding_dim
            return lambda self, ids: gather_over_ranks(own(self, ids), width)
        case "moe_tp_experts" | "all_reduce":
            return lambda self, *args, **kwargs: sum_over_ranks(own(self, *args, **kwargs))
        case _ if style == NORM_OVER_RANKS:
            return lambda self, x: _normed(self, x, rank.size)
        case _:
            raise UnknownStyleError(f"{type(module).__name__} in the style {style!r}")


def _embedded(self: Any, ids: torch.Tensor, own: _Forward, begin: int, end: int) -> torch.Tensor:
    """The embeddings of the ids of which this rank has the rows, zeros for others, summed."""
    is_ours = (ids >= begin) & (ids < end)
    rows = own(self, torch.where(is_ours, ids - begin, 0))
    return sum_over_ranks(rows.masked_fill(~is_ours.unsqueeze(-1), 0))


def _normed(self: Any, x: torch.Tensor, size: int) -> torch.Tensor:
    """The root mean square norm over what all ranks have, each the same share."""
    h = x.float()
    mean = sum_over_ranks(h.pow(2).sum(-1, keepdim=True)) / (size * x.shape[-1])
    normed: torch.Tensor = self.weight * (h * torch.rsqrt(mean + self.variance_epsilon))
    return normed.to(x.dtype)
