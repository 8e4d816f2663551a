"""Attention that a model computes itself, from the keys and values that its cache returns.

Older models look up none of transformers' attention functions (GPT-J, Falcon), or do not pass it
the arguments of their forward (StableLM, Nemotron). Such a model gets a cache that returns
stand-ins. What it computes of them is followed, until probabilities meet values: that is a call of
our attention. Keys that reach an attention function bring the context along.

- An operation that is not known raises, so the model is refused when it is loaded.
- A model that gets no mask makes no window, nor anything else that only a mask would tell. That
  what is left is what the model computes with a mask is tried with its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream_core.attention.interface import (
    ATTENTION_NAME,
    AttentionContext,
    AttentionParams,
    InContext,
    NoPast,
    TrialContext,
    cache_argument,
)

_NUM_TOKENS = 8
_TOLERANCE = 1e-3  # relative to the largest logit: the order of sums differs
_OF_FEW_DIGITS = 0.05
_LAST_TWO = {2, 3}  # dimensions, of keys [1, num_kv_heads, T, dim]


class _Followed:
    """A tensor that a model makes of its keys or values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Follow an operator of torch."""
        return _step(func.__name__)(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """A method of a tensor."""
        return partial(_step(name), self)

    def __matmul__(self, other: Any) -> Any:
        return _matmul(self, other)

    def __truediv__(self, other: Any) -> Any:
        return _div(self, other)

    def __mul__(self, other: Any) -> Any:
        return _mul(self, other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return _add(self, other)


@dataclass(frozen=True)
class _States(_Followed, InContext):
    """Keys or values as a cache returns them."""

    @property
    def shape(self) -> torch.Size:
        """The shape that they were returned with."""
        return self.states.shape

    @property
    def dtype(self) -> torch.dtype:
        """Their type in the cache."""
        return self.states.dtype


@dataclass(frozen=True)
class _Keys(_States):
    is_transposed: bool = False


class _Values(_States):
    pass


@dataclass(frozen=True)
class _Scores(_Followed):
    """Products of queries [1, num_heads, T, dim] and keys."""

    query: torch.Tensor
    keys: _Keys
    scale: float = 1.0


@dataclass(frozen=True)
class _Probabilities(_Followed):
    """A softmax of scores over keys."""

    scores: _Scores


def _matmul(left: Any, right: Any) -> Any:
    match left, right:
        case torch.Tensor(), _Keys(is_transposed=True) if left.dim() == 4:
            return _Scores(left, right)
        case _Probabilities(scores=scores), _Values(states=values):
            keys = scores.keys
            query = scores.query.to(keys.states.dtype)
            if keys.states.shape[1] not in (1, query.shape[1]):
                _break_off("products of groups of heads")
            query, key, value = (each[0].transpose(0, 1) for each in (query, keys.states, values))
            params = AttentionParams(scores.scale)
            output = keys.context.attend(keys.layer, query, key, value, params)
            return output.transpose(0, 1)[None]
    return _break_off("matmul")


def _mul(left: Any, right: Any) -> Any:
    if isinstance(left, _Scores) and isinstance(right, float | int):
        return replace(left, scale=left.scale * right)
    return _break_off("mul")


def _div(left: Any, right: Any) -> Any:
    if isinstance(left, _Scores) and isinstance(right, float | int):
        return replace(left, scale=left.scale / right)
    return _break_off("div")


def _add(left: Any, right: Any) -> Any:
    # there is no mask
    return left if isinstance(left, _Scores) and right is None else _break_off("add")


def _transpose(left: Any, *dims: int) -> Any:
    if isinstance(left, _Keys) and {each % 4 for each in dims} == _LAST_TWO:
        return replace(left, is_transposed=not left.is_transposed)
    return _break_off("transpose")


def _softmax(left: Any, dim: int | None = None, **_: object) -> Any:
    # in another dtype it is rounded otherwise
    if isinstance(left, _Scores) and dim in (-1, 3):
        return _Probabilities(left)
    return _break_off("softmax")


def _same(left: Any, *_: object, **__: object) -> Any:
    """The same, of another type or without dropout: there is none."""
    return left


_STEPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("to", "float", "type", "type_as", "contiguous", "dropout"), _same),
    "transpose": _transpose,
    "matmul": _matmul,
    "softmax": _softmax,
}


def _step(name: str) -> Callable[..., Any]:
    return _STEPS.get(name.strip("_")) or _break_off(name)


def _break_off(name: str) -> Any:
    """Raise ValueError for an operation that is not followed; torch would replace a TypeError."""
    raise ValueError(f"it computes with its keys in a way that is not known ({name})")


@dataclass(frozen=True)
class _KeyCache(NoPast):
    """The cache of a model that computes attention itself, in one forward."""

    context: AttentionContext

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: object = None,
    ) -> tuple[_Keys, _Values]:
        """Stand-ins for the keys and values of a layer."""
        return (
            _Keys(self.context, layer_idx, key_states),
            _Values(self.context, layer_idx, value_states),
        )


def follow_keys(model: Any) -> None:
    """Give a model whose attention does not get its context a cache that does."""
    text = model.config.get_text_config()
    text._attn_implementation = ATTENTION_NAME  # for which no masks are made
    give = partial(_give_cache, cache_argument(model.forward))
    model.register_forward_pre_hook(give, with_kwargs=True)


def _give_cache(
    name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    if "paged" not in kwargs:
        return args, kwargs  # the model's own
    given = dict(kwargs)
    given[name] = _KeyCache(given.pop("paged"))
    return args, given


class _Causal(TrialContext):
    """An attention context of one row, without a past."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend."""
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=params.scale, enable_gqa=True
        )
        return output[0].transpose(0, 1).contiguous()


def check_followed(module: Any, *, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError if a model that `follow_keys` has prepared computes something else than what
    was followed.
    """
    num_tokens = min(_NUM_TOKENS, max_model_len)
    ids = torch.arange(num_tokens, device=module.device)[None] % vocab_size
    text = module.config.get_text_config()
    with torch.inference_mode():
        ours = module(input_ids=ids, use_cache=False, paged=_Causal()).logits.float()
        text._attn_implementation = "eager"
        try:
            theirs = module(input_ids=ids, use_cache=False).logits.float()
        finally:
            text._attn_implementation = ATTENTION_NAME
    allowed = _TOLERANCE if module.dtype == torch.float32 else _OF_FEW_DIGITS
    if not bool((ours - theirs).abs().max() <= allowed * theirs.abs().max()):
        raise ValueError("its attention is not causal, or has more to it than can be followed")
