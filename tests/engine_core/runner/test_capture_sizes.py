"""The sizes of recorded steps; what cannot be recorded is known beforehand, and rotary embeddings
stay what they are.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.meta_card import MAX_MODEL_LEN, meta_model, meta_runner
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM, Qwen3MoeConfig

from slipstream_core.config import CoreConfig
from slipstream_core.model import loader
from slipstream_core.model.loader import load_model
from slipstream_core.model.rope import freeze_frequencies
from slipstream_core.runner.capture_sizes import (
    batch_sizes,
    graph_sizes,
    token_buckets,
    why_eager,
)
from slipstream_core.sharding.rank import Rank

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": None,
}
HOPPER, AMPERE = (9, 0), (8, 0)


def experts() -> Any:
    config = Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    return meta_model(config).module


def test_experts_are_recorded_in_bfloat16_on_hopper() -> None:
    module = experts()
    assert why_eager(module, torch.bfloat16, HOPPER) is None
    assert why_eager(module, torch.bfloat16, None) is None
    assert "float16" in str(why_eager(module, torch.float16, HOPPER))
    assert "8.0" in str(why_eager(module, torch.bfloat16, AMPERE))


def test_all_else_is_recorded() -> None:
    module = meta_model(LlamaConfig(**_SIZES)).module
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for capability in (AMPERE, HOPPER, None):
            assert why_eager(module, dtype, capability) is None


def test_a_core_says_why_it_records_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    module = experts()
    config = CoreConfig(model="it", address="", max_num_seqs=4)

    def sizes(dtype: torch.dtype, device: str = "cuda") -> tuple[int, ...]:
        model: Any = SimpleNamespace(
            module=module, dtype=dtype, device=torch.device(device), rank=None
        )
        return graph_sizes(model, config)

    assert sizes(torch.bfloat16) == (1, 2, 4)
    assert sizes(torch.bfloat16, "cpu") == ()
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        assert sizes(torch.float32) == ()
    assert "experts in float32 synchronize with the host" in caplog.text


def test_steps_of_several_ranks_are_recorded_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    model: Any = SimpleNamespace(
        module=experts(), dtype=torch.bfloat16, device=torch.device("cuda"), rank=Rank(1, 2)
    )
    with caplog.at_level(logging.WARNING):
        assert graph_sizes(model, CoreConfig(model="it", address="", max_num_seqs=4)) == ()
    assert "recorded with --cuda-graphs-over-ranks alone" in caplog.text
    config = CoreConfig(model="it", address="", max_num_seqs=4, cuda_graphs_over_ranks=True)
    assert graph_sizes(model, config) == (1, 2, 4)


def longrope() -> Phi3Config:
    return Phi3Config(
        **_SIZES,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [4.0, 5.0, 6.0, 8.0],
            "original_max_position_embeddings": 64,
        },
    )


def test_longrope_keeps_its_short_frequencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    Phi3ForCausalLM(longrope()).save_pretrained(tmp_path)
    ids = torch.arange(60)[None]
    reference = Phi3ForCausalLM.from_pretrained(tmp_path).eval()
    settled = Phi3ForCausalLM.from_pretrained(tmp_path).eval()
    freeze_frequencies(settled)
    with torch.inference_mode():
        expected, given = reference(ids).logits, settled(ids).logits
        assert torch.equal(given, expected)
        # and what it is kept from would have shown
        far = torch.arange(60, 120)[None]
        assert not torch.equal(
            reference(ids, position_ids=far).logits, settled(ids, position_ids=far).logits
        )
    was_settled: list[bool] = []
    monkeypatch.setattr(loader, "freeze_frequencies", lambda module: was_settled.append(True))
    load_model(str(tmp_path), device="cpu", max_model_len=64)
    assert was_settled


def test_longrope_is_recorded() -> None:
    with meta_runner(meta_model(longrope()), (2,)) as (_, recorder):
        assert recorder.num_recorded > 0


def test_a_module_that_makes_its_frequencies_anew_is_given_those_it_has() -> None:
    class Rope(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope_type = "default"
            self.attention_scaling = 1.5
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.5]))
            self.rope_init_fn: Any = lambda config: (torch.tensor([1.0, 0.5]), 1.5)

    rope = Rope()
    assert rope.rope_init_fn(None)[0] is not rope.inv_freq
    freeze_frequencies(torch.nn.ModuleList([rope]))
    for each in (rope, rope.to(torch.float64)):
        frequencies, scaling = each.rope_init_fn(None, device="anywhere")
        assert frequencies is each.inv_freq
        assert scaling == 1.5


def test_token_buckets() -> None:
    steps = (768, 1024, 1280, 1536, 1792, 2048)
    assert token_buckets(8192) == (16, 32, 64, 128, 256, 512, *steps)
    assert token_buckets(800) == (16, 32, 64, 128, 256, 512, 768, 1024)
    assert token_buckets(512) == (16, 32, 64, 128, 256, 512)
    assert token_buckets(100) == (16, 32, 64, 128)
    assert token_buckets(1) == (16,)


def test_batch_sizes() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(3) == (1, 2, 3)
    assert batch_sizes(21) == (1, 2, 4, 8, 16, 21)
    assert batch_sizes(256)[-3:] == (240, 248, 256)
    assert batch_sizes(1024)[-2:] == (960, 1024)
    assert len(batch_sizes(1024)) < 64
    assert batch_sizes(64, (32, 1, 32, 65)) == (1, 32)
