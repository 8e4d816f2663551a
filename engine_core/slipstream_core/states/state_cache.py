"""The cache of a model with recurrent states, in place of transformers' own.

Transformers' mixers (Mamba, gated delta nets, short convolutions) reach their states through a few
methods of a cache. The model gets a `StateCarrier`, which tells attention that there is no past, as
the paged cache has it, and brings mixers the rows of the step. A mixer's own forward is called with
`RowStates`, those of the rows that it computes together.

Neither inherits from transformers' Cache: a method that is not here raises, so a model that needs
another one is refused when it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from slipstream_core.attention.interface import NoPast

if TYPE_CHECKING:
    from slipstream_core.states.mixers import Mixer


class StateError(TypeError):
    """A model carries its states in a way that is not known."""


class StateShape(NamedTuple):
    """A state of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class MixerStates(NamedTuple):
    """The states that a row has in one mixer, by transformers' numbers for them."""

    conv: dict[int, StateShape]
    recurrent: dict[int, StateShape]

    @property
    def num_bytes(self) -> int:
        """Bytes of a row's states."""
        return sum(each.num_bytes for each in (*self.conv.values(), *self.recurrent.values()))


class RowStates:
    """The states of B rows in one mixer, each [B, ...]; without any, the rows begin."""

    def __init__(
        self, layer: int, conv: dict[int, torch.Tensor], recurrent: dict[int, torch.Tensor]
    ) -> None:
        self.conv = conv
        self.recurrent = recurrent
        self._layer = layer

    @property
    def shapes(self) -> MixerStates:
        """The shapes of a row's states."""
        conv, recurrent = (
            {at: StateShape(tuple(state.shape[1:]), state.dtype) for at, state in states.items()}
            for states in (self.conv, self.recurrent)
        )
        return MixerStates(conv, recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution, which the mixer may write in place."""
        self._check(layer_idx)
        return self.conv.get(state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution; returns all, with those before them.

        conv_states: new inputs [B, channels, length]. Rows that begin are padded with zeros.
        """
        self._check(layer_idx)
        before = self.conv.get(state_idx)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            lacking = max(0, width - conv_states.shape[-1])
            inputs = torch.nn.functional.pad(conv_states, (lacking, 0))
        else:
            width = before.shape[-1]
            inputs = torch.cat([before, conv_states], dim=-1)
        self.conv[state_idx] = inputs[..., -width:]
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state before the tokens of this call."""
        self._check(layer_idx)
        return self.recurrent.get(state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        """Keep the recurrent state behind the tokens of this call, in the dtype of the first one;
        returns it.
        """
        self._check(layer_idx)
        before = self.recurrent.get(state_idx)
        kept = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self.recurrent[state_idx] = kept
        return kept

    def is_recording_past(self, layer_idx: int) -> bool:
        """True if states are kept so that tokens can be taken back, which they never are."""
        self._check(layer_idx)
        return False

    def _check(self, layer_idx: int) -> None:
        if layer_idx != self._layer:
            raise StateError(
                f"the mixer of layer {self._layer} asks for states of layer {layer_idx}"
            )


class MixingStep(Protocol):
    """The rows whose tokens a forward computes."""

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer over T tokens [1, T, width], each row from its own state; returns as many."""


class StateCarrier(NoPast):
    """A model's cache in one forward."""

    def __init__(self, step: MixingStep) -> None:
        self.step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: object = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values as they are; attention stores them in the paged cache.

        kwargs: the forward's, which caches of transformers 5.24 take and nothing here needs.
        """
        return key_states, value_states


class EachTokenAlone:
    """A trial's rows: each token begins one of its own.

    shapes: those of the states that mixers have kept.
    """

    def __init__(self) -> None:
        self.shapes: dict[Mixer, MixerStates] = {}

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Implements `MixingStep.mix`. Raises StateError for a mixer that runs twice."""
        if mixer in self.shapes:
            raise StateError(f"{mixer.kind} runs for several layers")
        mixer.width = hidden.shape[-1]
        rows = RowStates(mixer.layer, {}, {})
        mixed = mixer.run(hidden.transpose(0, 1), rows)
        self.shapes[mixer] = rows.shapes
        return mixed.transpose(0, 1)


def concerns_states(error: Exception) -> bool:
    """True if the model failed because it carries its states in an unknown way, such as by a cache
    method that is missing here.
    """
    lacks = isinstance(error, AttributeError) and isinstance(error.obj, RowStates | StateCarrier)
    return lacks or isinstance(error, StateError)
