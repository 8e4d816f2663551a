"""Attention that a model computes itself: followed where it is known, refused where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from slipstream_core.attention.interface import (
    ATTENTION_NAME,
    AttentionParams,
    NotPassedError,
    paged_attention,
)
from slipstream_core.attention.own_attention import check_followed, follow_keys
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import load_model

HEADS, DIM, VOCAB = 4, 8, 64
Tensor = torch.Tensor
Attend = Callable[[Any, Any, Any, Any], Any]


class Model(nn.Module):
    """One layer that attends in a way of its own; without a cache it makes its mask."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, attend: Attend, kv_heads: int = HEADS, window: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.kv_heads, self.window = attend, kv_heads, window
        self.embed = nn.Embedding(VOCAB, HEADS * DIM)
        self.query = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.others = nn.Linear(HEADS * DIM, 2 * kv_heads * DIM)
        self.text = SimpleNamespace(_attn_implementation="eager")
        self.config = SimpleNamespace(get_text_config=lambda: self.text)

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **_: Any) -> Any:
        hidden = self.embed(input_ids)
        query = self.query(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        key, value = self.others(hidden).unflatten(-1, (2, self.kv_heads, DIM)).unbind(2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        mask = None
        if past_key_values is None:
            far = torch.arange(len(hidden[0]))[:, None] - torch.arange(len(hidden[0]))
            hidden_ones = (far < 0) | (far >= self.window)
            mask = torch.zeros(far.shape).masked_fill(hidden_ones, -math.inf)
        else:
            key, value = past_key_values.update(key, value, 0)
        return SimpleNamespace(logits=self.attend(query, key, value, mask).transpose(1, 2))


def plain(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = query @ key.transpose(-1, -2)
    scores /= math.sqrt(DIM)
    return functional.softmax(scores + mask if mask is not None else scores + None, dim=-1) @ value


def wide(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = 0.3 * torch.matmul(query.float(), key.to(torch.float32).transpose(3, 2)) * 2
    scores = scores if mask is None else scores + mask
    probabilities = nn.Softmax(dim=-1)(scores).to(value.dtype)
    assert key.shape[-2] == query.shape[-2]
    return torch.matmul(nn.Dropout(0.5).eval()(probabilities), value)


@pytest.mark.parametrize("attend", [plain, wide])
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_what_is_followed_is_what_the_model_computes(attend: Attend, kv_heads: int) -> None:
    model = Model(attend, kv_heads)
    follow_keys(model)
    assert model.text._attn_implementation == ATTENTION_NAME
    check_followed(model, vocab_size=VOCAB, max_model_len=64)
    assert model.text._attn_implementation == ATTENTION_NAME


def biased(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return (query @ key.transpose(-1, -2) + torch.ones(1)).softmax(-1) @ value


def masked(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = query @ key.transpose(-1, -2)
    return scores.masked_fill(torch.ones(8, 8) > 0, -1.0).softmax(-1) @ value


def chosen(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = query @ key.transpose(-1, -2)
    return torch.where(torch.ones(8, 8) > 0, scores, -1.0).softmax(-1) @ value


def over_queries(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return (query @ key.transpose(-1, -2)).softmax(-2) @ value


def repeated(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return (query @ key.repeat(1, 2, 1, 1).transpose(-1, -2)).softmax(-1) @ value


def not_transposed(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return (query @ key).softmax(-1) @ value


def scaled_values(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ (value * 2)


@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (biased, "add"),
        (masked, "masked_fill"),
        (chosen, "where"),
        (over_queries, "softmax"),
        (repeated, "repeat"),
        (not_transposed, "matmul"),
        (scaled_values, "mul"),
    ],
)
def test_an_operation_that_is_not_known_raises(attend: Attend, said: str) -> None:
    model = Model(attend)
    follow_keys(model)
    with pytest.raises(ValueError, match=rf"in a way that is not known \({said}\)"):
        check_followed(model, vocab_size=VOCAB, max_model_len=64)


def test_groups_of_heads_that_do_not_meet_raise() -> None:
    model = Model(plain, kv_heads=2)
    follow_keys(model)
    with pytest.raises(ValueError, match="products of groups of heads"):
        check_followed(model, vocab_size=VOCAB, max_model_len=64)


def to_all(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return plain(query, key, value, None if mask is None else torch.zeros(()))


@pytest.mark.parametrize("model", [Model(to_all), Model(plain, window=3)], ids=["all", "window"])
def test_what_only_a_mask_tells_is_seen(model: Model) -> None:
    follow_keys(model)
    with pytest.raises(ValueError, match="not causal, or has more to it than can be followed"):
        check_followed(model, vocab_size=VOCAB, max_model_len=64)


def test_keys_bring_their_context_to_an_attention_function() -> None:
    seen: list[tuple[int, AttentionParams]] = []

    class Context:
        def attend(
            self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
        ) -> Tensor:
            seen.append((layer, params))
            return value

    module = SimpleNamespace(layer_idx=0, is_causal=True)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        output, _ = paged_attention(module, query, key, value, mask, scaling=0.5)  # type: ignore[arg-type]
        return output.transpose(1, 2)

    model = Model(attend)
    with pytest.raises(NotPassedError, match="does not pass its keyword arguments on"):
        paged_attention(module, *torch.ones(3, 1, HEADS, 2, DIM), None)  # type: ignore[arg-type]
    follow_keys(model)
    model(input_ids=torch.tensor([[1, 2]]), paged=Context())
    assert seen == [(0, AttentionParams(0.5))]


def test_an_encoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.RoFormerConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"RoFormer.* its attention is not causal"):
        load_model(str(tmp_path), device="cpu")
