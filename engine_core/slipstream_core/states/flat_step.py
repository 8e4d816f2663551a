"""The rows of a step for recorded mixers: C kernels that continue each row's states in the pool.

A recorded forward computes a mixer's products for all tokens of a step at once. What remains by row
is a convolution and a recurrence, two calls each of which takes all rows (mixing.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.attention.interface import AttentionContext, AttentionParams
from slipstream_core.kernels.cpu.kernels import Convolve, Kernels, Mixing, Recur, dense, dense_rows
from slipstream_core.states.state_pool import StatePool


class MixingArguments(NamedTuple):
    """Addresses for a list of operations: of a Mixing, of each state's memory and its size."""

    mixing: int
    states: int
    sizes: int


class _Columns(NamedTuple):
    """The columns of Mixing in kernels.h, which documents them."""

    segments: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    saved: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    reads: npt.NDArray[np.int64]
    begins: npt.NDArray[np.uint8]
    prompts: npt.NDArray[np.int64]


class FlatStep:
    """The rows of one forward: those that decode, a token each, then chunks of prompts."""

    def __init__(
        self,
        kernels: Kernels,
        pool: StatePool,
        *,
        slots: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        prompt_lens: npt.NDArray[np.int32],
        saves: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
        reads: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Arguments as those of `StateStep`; the pool's states are float32."""
        self._kernels = kernels
        self._pool = pool
        num_rows = len(query_lens)
        ends = np.cumsum(query_lens, dtype=np.int64)
        segments = np.arange(num_rows + 1)
        saved = np.full(num_rows, -1)
        if saves:
            segments, ends, saved = _segments(query_lens, ends, saves, pool.num_slots)
        self._columns = _Columns(  # kept alive: the kernels have their addresses
            segments,
            np.concatenate([[0], ends]),
            saved,
            np.ascontiguousarray(slots, np.int64),
            np.ascontiguousarray(slots if reads is None else reads, np.int64),
            np.ascontiguousarray(starts == 0, np.uint8),
            np.clip(prompt_lens.astype(np.int64) - starts, 0, query_lens),
        )
        self._rows = Mixing(num_rows, *(each.ctypes.data for each in self._columns))
        self._at = ctypes.addressof(self._rows)

    @property
    def arguments(self) -> MixingArguments:
        """The addresses that a list of operations needs."""
        return MixingArguments(self._at, *self._pool.addresses)

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: int,
        activates: bool,
    ) -> torch.Tensor:
        """The convolution of x [1, T, channels] over each row's tokens, with weight [taps,
        channels] and bias [channels]; of silu if it `activates`.
        """
        x = dense_rows(x)
        output = x.new_empty(x.shape)
        states = self._pool.states[state]
        call = Convolve(
            mixing=self._at,
            x=x.data_ptr(),
            x_token=x.stride(1),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            output=output.data_ptr(),
            states=states.data_ptr(),
            state_size=states.shape[1],
            channels=x.shape[2],
            taps=len(weight),
            activates=activates,
        )
        self._kernels.convolve(ctypes.addressof(call))
        return output

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor | None,
        strength: torch.Tensor | None,
        skip: torch.Tensor | None,
        state: int,
        scale: float,
        epsilon: float,
        is_delta: bool,
        rates: torch.Tensor | None = None,
        least: float = 0.0,
        most: float = 0.0,
    ) -> torch.Tensor:
        """The recurrence of Recur in kernels.h over each row's tokens.

        query and key [T, key_heads, key_dim], value [T, heads, value_dim], decay [T, heads] or [T,
        heads, key_dim], strength [T, heads], skip [heads], rates [heads], or [heads, key_dim] in
        place of a decay; returns [T, heads, value_dim].
        """
        query, key, value = (_dense_heads(each) for each in (query, key, value))
        decay = None if decay is None else _dense_heads(decay)
        strength = None if strength is None else dense_rows(strength)
        num_heads, value_dim = value.shape[1:]
        output = value.new_empty(value.shape)
        states = self._pool.states[state]
        call = Recur(
            mixing=self._at,
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            decay=None if decay is None else decay.data_ptr(),
            strength=None if strength is None else strength.data_ptr(),
            skip=None if skip is None else skip.data_ptr(),
            rates=None if rates is None else rates.data_ptr(),
            output=output.data_ptr(),
            states=states.data_ptr(),
            query_token=query.stride(0),
            key_token=key.stride(0),
            value_token=value.stride(0),
            decay_token=0 if decay is None else decay.stride(0),
            strength_token=0 if strength is None else strength.stride(0),
            state_size=states.shape[1],
            key_heads=key.shape[1],
            heads=num_heads,
            key_dim=key.shape[2],
            value_dim=value_dim,
            is_delta=is_delta,
            decays_by_key=decay is not None and decay.dim() == 3,
            scale=scale,
            epsilon=epsilon,
            least=least,
            most=most,
        )
        self._kernels.recur(ctypes.addressof(call))
        return output


class FlatContext(NamedTuple):
    """The context of a recorded forward: its attention, and its rows for mixers."""

    attention: AttentionContext
    step: FlatStep

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


def attention_of(context: AttentionContext | FlatContext) -> AttentionContext:
    """The attention of a recorded forward."""
    return context.attention if isinstance(context, FlatContext) else context


def _segments(
    query_lens: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int64],
    saves: Mapping[int, Sequence[tuple[int, int]]],
    num_slots: int,
) -> tuple[npt.NDArray[np.int64], ...]:
    """Begins of rows' segments, ends of segments, and the slots that keep the states there."""
    segments, tokens, saved = [0], [], []
    for row, (length, end) in enumerate(zip(query_lens.tolist(), ends.tolist(), strict=True)):
        done = 0
        for done, snapshot in saves.get(row, ()):
            tokens.append(end - length + done)
            saved.append(num_slots + snapshot)
        if done < length:
            tokens.append(end)
            saved.append(-1)
        segments.append(len(tokens))
    return np.array(segments), np.array(tokens), np.array(saved)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...], copied if a token's numbers are not side by side."""
    return x if x[:1].is_contiguous() else dense(x)
