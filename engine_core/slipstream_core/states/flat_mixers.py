"""Mixers over all tokens of a step at once.

What a mixer computes by row is in functions of a few names, which all of transformers' mixers
share. A mixer's own forward is called with a copy of its globals, in which these are kernels, or
leave markers in a recording, and with a cache that keeps nothing. A forward that calls others for
its states is not understood, and mixers run as they are.

- Convolutions and recurrences of all families are the two of mixing.c: the gated delta rule, that
  with a decay for each channel of a key (Kimi Delta Attention), Mamba-2's, without a delta, and
  Mamba-1's, where each channel is a head of its own.
- Whether that computes what the mixer does is tried when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slipstream_core.states.flat_step import FlatStep
from slipstream_core.states.mixers import Mixer, is_limited
from slipstream_core.states.state_cache import MixerStates, StateError
from slipstream_core.states.state_pool import number_states

_SILU = ("silu", "swish")
_KEY_EPSILON = 1e-6  # of transformers' l2norm

# markers in a recording; missing from torch's annotations
_library: Any = torch.library
_LIBRARY = _library.Library("slipstream", "FRAGMENT")
_LIBRARY.define(
    "convolve(Tensor x, Tensor weight, Tensor? bias, int state, bool activates) -> Tensor"
)
_LIBRARY.define(
    "recur(Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? strength, Tensor? skip, "
    "int state, float scale, float epsilon, bool is_delta, Tensor? rates, float least, float most) "
    "-> Tensor"
)
_LIBRARY.impl("convolve", lambda x, *_: x.new_empty(x.shape), "CompositeExplicitAutograd")
_LIBRARY.impl(
    "recur",
    lambda query, key, value, *_: value.new_empty(value.shape),
    "CompositeExplicitAutograd",
)


class FlatMixers:
    """A step whose mixers compute all tokens at once."""

    def __init__(
        self,
        states: Sequence[MixerStates],
        convolve: Callable[..., torch.Tensor],
        recur: Callable[..., torch.Tensor],
    ) -> None:
        """states: of each mixer. convolve, recur: as FlatStep's, but that a convolution's weight is
        [channels, taps]. Raises StateError for states that kernels do not keep.
        """
        for each in states:
            for shape in (*each.conv.values(), *each.recurrent.values()):
                if shape.dtype != torch.float32:
                    raise StateError(f"a state is {shape.dtype}")
        self._numbers = number_states(states)
        self._states = states
        self.convolve, self.recur = convolve, recur

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Implements `MixingStep.mix`. Raises StateError."""
        cache = _NoStates(mixer, self)
        states = self._states[mixer.number]
        functions = {name: make(cache) for name, make in _FUNCTIONS.items()}
        mixed = mixer.run_with(hidden, cache, functions, _needed(states))
        if cache.num_continued != len(states.conv) + len(states.recurrent):
            raise StateError(f"{mixer.kind} computes its states in an unknown way")
        return mixed

    def number(self, mixer: Mixer, kind: str, at: int) -> int:
        """The number of a mixer's state among `StatePool.states`."""
        return self._numbers[mixer.number, kind, at]


def mixer_markers(states: Sequence[MixerStates]) -> FlatMixers:
    """Mixers of a recording, which leave markers. Raises StateError, as FlatMixers does."""
    return FlatMixers(states, torch.ops.slipstream.convolve, torch.ops.slipstream.recur)


def mixers_by_kernels(states: Sequence[MixerStates], step: FlatStep) -> FlatMixers:
    """Mixers of a model that is not recorded. Raises StateError, as FlatMixers does."""

    def convolve(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        return step.convolve(x, weight.t().contiguous(), *others)

    return FlatMixers(states, convolve, step.recur)


class _NoStates:
    """A mixer's cache that keeps nothing, and counts the states that functions continue."""

    def __init__(self, mixer: Mixer, step: FlatMixers) -> None:
        self._mixer = mixer
        self.step = step
        self._conv = self._recurrent = 0  # numbers of the states that come next
        self.num_continued = 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return nothing: the row begins, for all that the mixer knows."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return nothing, as `get_conv_state`."""

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> torch.Tensor:
        """The inputs of the convolution that comes next, as they are."""
        self._conv = state_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor | None, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor | None:
        """The state, as it is."""
        return recurrent_states

    def continued(self, kind: str) -> int:
        """The number of the state of this kind that a function is about to continue."""
        self.num_continued += 1
        at = self._conv if kind == "conv" else self._recurrent
        return self.step.number(self._mixer, kind, at)


def _convolution(cache: _NoStates) -> Callable[..., torch.Tensor]:
    def causal_conv1d(
        hidden_states: torch.Tensor,  # [1, channels, T]
        weight: torch.Tensor,  # [channels, taps]
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        _refuse(others)
        if activation is not None and activation not in _SILU:
            raise StateError(f"a convolution is activated by {activation}")
        tokens_first = hidden_states.transpose(1, 2)
        state = cache.continued("conv")
        mixed = cache.step.convolve(tokens_first, weight, bias, state, activation is not None)
        return mixed.transpose(1, 2)

    return causal_conv1d


def _delta_rule(cache: _NoStates) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def gated_delta_rule(
        query: torch.Tensor,  # [1, T, key_heads, key_dim]
        key: torch.Tensor,
        value: torch.Tensor,  # [1, T, heads, value_dim]
        g: torch.Tensor,  # [1, T, heads] or [1, T, heads, key_dim]
        beta: torch.Tensor,  # [1, T, heads]
        chunk_size: int = 0,
        initial_state: None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _refuse(others)
        epsilon = _KEY_EPSILON if use_qk_l2norm_in_kernel else -1.0
        scale = float(query.shape[-1]) ** -0.5
        state = cache.continued("recurrent")
        mixed = cache.step.recur(
            *(query[0], key[0], value[0], g[0], beta[0], None, state, scale, epsilon, True),
            *(None, 0.0, 0.0),
        )
        return mixed[None], mixed

    return gated_delta_rule


def _mamba2(cache: _NoStates) -> Callable[..., Any]:
    def chunk_scan(
        hidden_states: torch.Tensor,  # [1, T, heads, value_dim]
        dt: torch.Tensor,  # [1, T, heads]
        A: torch.Tensor,  # noqa: N803  [heads]
        B: torch.Tensor,  # noqa: N803  [1, T, groups, key_dim]
        C: torch.Tensor,  # noqa: N803
        chunk_size: int = 0,
        D: torch.Tensor | None = None,  # noqa: N803  [heads]
        dt_bias: torch.Tensor | None = None,
        initial_states: None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        _refuse(others)
        if not dt_softplus:
            raise StateError("time steps are not those of softplus")
        if dt_bias is not None:
            dt = dt + dt_bias
        dt = torch.nn.functional.softplus(dt)
        state = cache.continued("recurrent")
        # transformers limits those of chunks, which are prompts, and not those of single steps
        rates = A if is_limited(dt_limit) else None
        mixed = cache.step.recur(
            *(C[0], B[0], hidden_states[0], (A * dt)[0], dt[0], D, state, 1.0, -1.0, False),
            *(rates, float(dt_limit[0]), float(dt_limit[1])),
        )
        return (mixed[None], mixed) if return_final_states else mixed[None]

    return chunk_scan


def _mamba1(cache: _NoStates) -> Callable[..., Any]:
    def selective_scan(
        hidden_states: torch.Tensor,  # [1, channels, T]
        dt: torch.Tensor,  # [1, channels, T]
        A: torch.Tensor,  # noqa: N803  [channels, key_dim]
        B: torch.Tensor,  # noqa: N803  [1, key_dim, T]
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803  [channels]
        z: torch.Tensor | None = None,  # [1, channels, T]
        delta_bias: torch.Tensor | None = None,  # [channels]
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **others: Any,
    ) -> Any:
        _refuse(others)
        if not delta_softplus:
            raise StateError("time steps are not those of softplus")
        x, dt, query, key = (each.transpose(1, 2) for each in (hidden_states, dt, C, B))
        _, num_tokens, channels = x.shape
        query, key = (each.view(1, num_tokens, 1, each.shape[2]) for each in (query, key))
        if delta_bias is not None:
            dt = dt + delta_bias
        dt = torch.nn.functional.softplus(dt)
        state = cache.continued("recurrent")
        mixed = cache.step.recur(
            *(query[0], key[0], x.view(1, num_tokens, channels, 1)[0], None, dt[0], D, state),
            *(1.0, -1.0, False, A, 0.0, 0.0),
        )
        mixed = mixed[None].view(1, num_tokens, channels)
        if z is not None:
            mixed = mixed * torch.nn.functional.silu(z.transpose(1, 2))
        mixed = mixed.transpose(1, 2)
        return (mixed, mixed) if return_last_state else mixed

    return selective_scan


_CONVOLUTIONS = ("causal_conv1d_fn",)
_RECURRENCES = (
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)
_FUNCTIONS: Mapping[str, Callable[[_NoStates], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}


def _needed(states: MixerStates) -> list[Sequence[str]]:
    """The names of which a mixer with these states has to call one each."""
    return [
        names
        for names, own in ((_CONVOLUTIONS, states.conv), (_RECURRENCES, states.recurrent))
        if own
    ]


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise StateError(f"a mixer passes {name!r}, whose meaning is not known")
