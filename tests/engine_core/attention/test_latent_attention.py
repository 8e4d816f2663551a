"""Attention over latents against attention over the keys and values that a model makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from slipstream_core.attention import kv_cache
from slipstream_core.attention.interface import AttentionParams, paged_attention
from slipstream_core.attention.latent_attention import cache_latents, latent_projections
from slipstream_core.model.loader import load_model
from slipstream_lab.models import tiny_models

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine

HEADS, RANK, ROTATED, PLAIN, VALUE = 4, 16, 8, 12, 10


class WholePrompt:
    """An attention context: each token sees those before it, and itself."""

    params: AttentionParams

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        self.params = params
        group = query.shape[1] // key.shape[1]
        keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (key, value))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * params.scale
        hidden = torch.ones(scores.shape[1:]).triu(1).bool()
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def attention(kind: type[Any] = DeepseekV3Attention) -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=PLAIN,
        v_head_dim=VALUE,
    )
    return kind(config, layer_idx=0).double()


def attend(module: Any) -> tuple[torch.Tensor, AttentionParams]:
    """What the attention of seven tokens gathers, and with which parameters."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    context = WholePrompt()
    query = normal(1, HEADS, 7, PLAIN + ROTATED)
    made = module.expand_kv(normal(1, 1, 7, RANK), normal(1, 1, 7, ROTATED))
    with torch.no_grad():
        output, _ = paged_attention(module, query, *made, None, scaling=0.3, paged=context)
    return output, context.params


def test_attends_as_over_keys_and_values() -> None:
    module = attention()
    expected, params = attend(module)
    assert not params.is_latent
    cache_latents(module)
    output, params = attend(module)
    assert params.is_latent
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)


def test_the_weight_is_not_copied() -> None:
    module = attention()
    cache_latents(module)
    projections = latent_projections(module)
    assert projections is not None
    storage = module.kv_b_proj.weight.untyped_storage().data_ptr()
    assert {each.untyped_storage().data_ptr() for each in projections} == {storage}


class ScaledAttention(DeepseekV3Attention):
    def expand_kv(
        self, kv_nope: torch.Tensor, k_rot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = DeepseekV3Attention.expand_kv(self, kv_nope, k_rot)
        return keys, 2 * values


class OtherAttention(DeepseekV3Attention):
    def expand_kv(
        self, kv_nope: torch.Tensor, k_rot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return DeepseekV3Attention.expand_kv(self, self.another_norm(kv_nope), k_rot)


class BiasedAttention(DeepseekV3Attention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_b_proj = torch.nn.Linear(RANK, HEADS * (PLAIN + VALUE))


@pytest.mark.parametrize("kind", [ScaledAttention, OtherAttention, BiasedAttention])
def test_a_model_that_makes_them_in_another_way_is_left_alone(kind: type[Any]) -> None:
    module = attention(kind)
    cache_latents(module)
    assert latent_projections(module) is None
    assert "expand_kv" not in vars(module)


def test_keys_that_are_changed_on_the_way_are_refused() -> None:
    module = attention()
    cache_latents(module)
    query = torch.zeros(1, HEADS, 3, PLAIN + ROTATED, dtype=torch.float64)
    key = torch.zeros(1, HEADS, 3, PLAIN + ROTATED)
    with pytest.raises(TypeError, match="other keys to attention than its latents"):
        paged_attention(module, query, key, key, None, paged=WholePrompt())


def test_a_cached_token_is_one_row(tmp_path: Path) -> None:
    [deepseek] = (each for each in tiny_models.ARCHITECTURES if each.name == "DeepSeek V3 (MLA)")
    tiny_models.save(deepseek, tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    row = deepseek.options["kv_lora_rank"] + deepseek.options["qk_rope_head_dim"]
    assert [each.bytes_per_token(model.dtype) for each in model.geometry] == [4 * row] * 4
    [layer, *_] = kv_cache.allocate(
        model.geometry, num_blocks=3, block_size=4, dtype=model.dtype, device=model.device
    )
    assert [memory.shape for memory in layer.blocks] == [(3, 4 * row)]
    layer.store(torch.tensor([5]), torch.ones(1, 1, row), torch.zeros(1, 1, 16))
    assert layer.values[5].eq(1).all(), "the beginning of the key"
