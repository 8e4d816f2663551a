"""What mixers find in place of transformers' cache: the same states, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import Cache, LinearAttentionLayer

from slipstream_core.states.state_cache import RowStates, StateCarrier

LAYER, NUM_ROWS, CHANNELS = 3, 2, 5


class Theirs(Cache):
    """Transformers' own, of one layer."""

    def __init__(self) -> None:
        super().__init__(layers=[LinearAttentionLayer() for _ in range(LAYER + 1)])


@given(
    width=st.integers(1, 4),
    lens=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    is_named=st.booleans(),
    seed=st.integers(0, 99),
)
def test_states_are_those_of_transformers(
    width: int, lens: list[int], is_named: bool, seed: int
) -> None:
    lens[0] = lens[0] if is_named else max(lens[0], width)  # else the width is the first length's
    generator = torch.Generator().manual_seed(seed)
    ours: Any = RowStates(LAYER, {}, {})
    theirs: Any = Theirs()
    assert ours.get_conv_state(LAYER) is theirs.get_conv_state(LAYER) is None
    for length in lens:
        inputs = torch.randn(NUM_ROWS, CHANNELS, length, generator=generator)
        state = torch.randn(NUM_ROWS, 2, 3, generator=generator, dtype=torch.float64)
        named = {"conv_kernel_size": width} if is_named else {}
        seen = [cache.update_conv_state(inputs, LAYER, **named) for cache in (ours, theirs)]
        assert torch.equal(*seen)
        kept = [cache.update_recurrent_state(state, LAYER) for cache in (ours, theirs)]
        assert torch.equal(*kept)
        assert torch.equal(ours.get_conv_state(LAYER), theirs.get_conv_state(LAYER))
        assert torch.equal(ours.get_recurrent_state(LAYER), theirs.get_recurrent_state(LAYER))
    assert ours.shapes.recurrent[0].dtype == torch.float64


def test_states_of_another_layer_are_refused() -> None:
    rows = RowStates(LAYER, {}, {})
    with pytest.raises(TypeError, match="layer 3 asks for states of layer 2"):
        rows.get_conv_state(LAYER - 1)


@pytest.mark.parametrize("cache", [RowStates(LAYER, {}, {}), StateCarrier(None)])  # type: ignore[arg-type]
@pytest.mark.parametrize("method", ["crop", "reorder_cache", "update_indexer", "layers", "reset"])
def test_other_methods_of_a_cache_are_not_there(cache: Any, method: str) -> None:
    with pytest.raises(AttributeError):
        getattr(cache, method)


def test_attention_learns_of_no_past() -> None:
    carrier: Any = StateCarrier(None)  # type: ignore[arg-type]
    key, value = torch.ones(1), torch.zeros(1)
    assert carrier.update(key, value, 0) == (key, value)
    assert carrier.get_seq_length() == carrier.get_query_offset() == 0
    assert carrier.get_mask_sizes(7, 0) == (7, 0)
