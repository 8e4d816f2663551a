"""Finds the modules of a model that carry a state from token to token, and puts the step's rows
between them and the model.

- No model is known by name. A mixer is a module whose code asks a cache for such states; what these
  are is seen in a trial forward.
- A mixer's forward is replaced by one that calls the original once for all rows that decode and
  once for each chunk of a prompt (`StateStep`), so rows never meet, and the numbers are
  transformers' own.
- The replaced forwards find the step in the model's cache, a `StateCarrier`. The model gets it from
  a hook: the one of its attention context if that is a `MixingContext`, or that of a trial. Any
  other context is refused: rows would silently begin at each token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from slipstream_core.attention.interface import (
    CACHE_NAMES,
    WITHOUT_EFFECT,
    AttentionContext,
    AttentionParams,
    TrialContext,
    cache_argument,
)
from slipstream_core.states.state_cache import (
    EachTokenAlone,
    MixerStates,
    MixingStep,
    RowStates,
    StateCarrier,
    StateError,
)

_STATE_METHODS = {"update_conv_state", "update_recurrent_state"}
_POSITIONS = {"position_ids", "position_embeddings"}
# there is no padding to mask; `paged` is attention's
_IGNORED = WITHOUT_EFFECT | {"attention_mask", "paged", *CACHE_NAMES}


class Mixer:
    """A module that carries states, and its forward before it was replaced."""

    def __init__(self, module: Any, number: int) -> None:
        """number: among the model's mixers. Raises StateError for a forward that is not known."""
        self.module = module
        self.kind = type(module).__name__
        self.number = number
        self.layer: int = module.layer_idx
        self.width = 0  # of a token's inputs, once a trial has seen them
        self.is_stepped = False  # a chunk that continues a row is computed token by token
        # those of answers are, as what transformers limits are the chunks of `generate`: prompts
        self.is_limited = is_limited(getattr(module, "time_step_limit", (0.0, inf)))
        self._inner = module.forward
        self._names = list(inspect.signature(self._inner).parameters)
        if _POSITIONS & set(self._names):
            raise StateError(f"{self.kind} reads positions")
        self._cache_name = next((name for name in CACHE_NAMES if name in self._names), None)
        self._outputs: list[torch.Size | None] = []  # of a token, where it returns several

    def in_float32(self) -> Mixer:
        """A copy with weights of its own, in float32."""
        twin = copy.deepcopy(self)
        twin.module.float()
        return twin

    def unlimit(self) -> None:
        """Compute time steps as they are, in chunks, too."""
        if self.is_limited:
            self.module.time_step_limit = 0.0, inf
            self.is_limited = False

    def run(self, hidden: torch.Tensor, rows: RowStates) -> torch.Tensor:
        """The original forward of B rows [B, L, width], which continue from `rows`."""
        return self._joined(self._inner(hidden, **{str(self._cache_name): rows}), hidden)

    def _joined(self, outputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        """All that it returns for its tokens, side by side: [B, L, ...] each."""
        if isinstance(outputs, torch.Tensor):
            return outputs
        given: list[torch.Tensor] = [each for each in outputs if each is not None]
        if any(each.shape[:2] != hidden.shape[:2] for each in given):
            raise StateError(f"{self.kind} returns more than what is of its tokens")
        self._outputs = [None if each is None else each.shape[2:] for each in outputs]
        flat = [each.flatten(2) for each in given]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)

    def _parted(self, mixed: torch.Tensor) -> Any:
        """Return what `_joined` has put side by side, as it was."""
        if not self._outputs:
            return mixed
        sizes = [each.numel() for each in self._outputs if each is not None]
        parts = iter(torch.split(mixed, sizes, dim=-1))
        return tuple(
            None if each is None else next(parts).reshape(*mixed.shape[:2], *each)
            for each in self._outputs
        )

    def run_with(
        self,
        hidden: torch.Tensor,
        cache: Any,
        functions: Mapping[str, Callable[..., Any]],
        needed: Sequence[Sequence[str]],
    ) -> torch.Tensor:
        """The original forward, with functions of these names in place of those of its module.

        needed: names of which it has to call one each. Raises StateError.
        """
        original = inspect.unwrap(type(self.module).forward)
        called = _names(original.__code__)
        if not all(called.intersection(names) for names in needed):
            raise StateError(f"{self.kind} computes its states in an unknown way")
        copied = FunctionType(
            original.__code__,
            {**original.__globals__, **functions},
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        copied.__kwdefaults__ = original.__kwdefaults__
        return self._joined(copied(self.module, hidden, **{str(self._cache_name): cache}), hidden)

    def forward(self, hidden_states: torch.Tensor, *unnamed: object, **others: Any) -> Any:
        """Replaces the original forward: the step's tokens [1, T, width], each row from its
        state.
        """
        others |= dict(zip(self._names[1:], unnamed, strict=False))
        carrier = others.get(str(self._cache_name))
        if not isinstance(carrier, StateCarrier):
            raise StateError(f"{self.kind} is given no cache")
        for name, value in others.items():
            if value is not None and name not in _IGNORED:
                raise StateError(f"{self.kind} is passed {name!r}, whose meaning is not known")
        return self._parted(carrier.step.mix(self, hidden_states))


@dataclass(frozen=True, slots=True)
class MixingContext:
    """A forward's attention, and its rows for mixers."""

    attention: AttentionContext
    step: MixingStep

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend as `AttentionContext.attend` does."""
        return self.attention.attend(layer, query, key, value, params)


def install_mixers(model: nn.Module) -> tuple[Mixer, ...]:
    """Replace the forwards of a model's mixers; returns them, none for most models.

    Raises StateError for a mixer that is not understood.
    """
    is_mixer: dict[type, bool] = {}
    mixers: list[Mixer] = []
    module: Any
    for module in model.modules():
        kind = type(module)
        if kind not in is_mixer:
            is_mixer[kind] = _asks_for_states(kind)
        if is_mixer[kind] and isinstance(getattr(module, "layer_idx", None), int):
            mixer = Mixer(module, len(mixers))
            module.forward = mixer.forward
            mixers.append(mixer)
    if mixers:
        give = partial(_give_cache, cache_argument(model.forward))
        model.register_forward_pre_hook(give, with_kwargs=True)
    return tuple(mixers)


def read_states(model: Any, mixers: tuple[Mixer, ...], device: torch.device) -> list[MixerStates]:
    """The states of each mixer, from a forward in which each token is a row of its own.

    Raises StateError where a mixer does not run, or keeps nothing.
    """
    alone = EachTokenAlone()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with torch.inference_mode():
        model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            logits_to_keep=ids[0, :1],
            paged=MixingContext(_OwnValue(), alone),
        )
    for mixer in mixers:
        if mixer not in alone.shapes or not alone.shapes[mixer].num_bytes:
            raise StateError(f"{mixer.kind} of layer {mixer.layer} keeps no state")
    return [alone.shapes[mixer] for mixer in mixers]


class _OwnValue:
    """An attention context in which each token attends to itself."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend."""
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _give_cache(
    name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    paged = kwargs.get("paged")
    step: MixingStep
    if isinstance(paged, MixingContext):
        step = paged.step
    elif isinstance(paged, TrialContext):
        step = EachTokenAlone()
    else:
        raise StateError(f"a forward with {type(paged).__name__} has no rows for mixers")
    return args, {**kwargs, name: StateCarrier(step)}


def is_limited(time_steps: Sequence[float]) -> bool:
    """True if these are a least and a most one that leave some out."""
    return time_steps[0] > 0 or time_steps[1] != inf


def _asks_for_states(kind: type) -> bool:
    own = [cls for cls in kind.__mro__ if cls not in nn.Module.__mro__]
    functions = [each for cls in own for each in vars(cls).values() if inspect.isfunction(each)]
    return any(_names(inspect.unwrap(each).__code__) & _STATE_METHODS for each in functions)


def _names(code: CodeType) -> set[str]:
    """The names of attributes and globals in a function's code, nested functions included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
