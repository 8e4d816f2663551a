"""Recorded forwards: what the model computes, joined where it may be, or none at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream_core.adapters.sites import Site
from slipstream_core.attention.interface import AttentionParams
from slipstream_core.forward import trace
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import LoadedModel, load_model

torch.set_num_threads(1)
KERNELS = kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
VOCAB = 199


def _load(folder: Path, kind: str, **more: Any) -> LoadedModel:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        **more,
    }
    torch.manual_seed(0)
    if kind == "llama":
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=8)).save_pretrained(folder)
    return load_model(str(folder), device="cpu", dtype="float32")


class _Summing:
    """Each token sees itself and all before it, without a softmax; order and shapes matter."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key).tril() * params.scale / (layer + 1)
        return torch.einsum("hqk,khd->qhd", scores, value).contiguous() / len(query)


def _both(model: LoadedModel, forward: trace.Forward, num_tokens: int) -> list[torch.Tensor]:
    ids = torch.randint(0, VOCAB, (1, num_tokens))
    positions = torch.randint(0, 200, (1, num_tokens))
    keep = torch.arange(num_tokens - 1, -1, -3)
    with torch.inference_mode():
        return [
            each(ids, positions, keep, _Summing()) for each in (trace.eager(model.module), forward)
        ]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "llama tied", "llama with biases"])
def test_computes_what_the_model_computes(tmp_path: Path, kind: str) -> None:
    more = {
        "tie_word_embeddings": kind == "llama tied",
        "attention_bias": kind == "llama with biases",
    }
    model = _load(tmp_path, kind.split()[0], **more)
    before = {name: each.clone() for name, each in model.module.state_dict().items()}
    forward = trace.trace(model.module, KERNELS, VOCAB)  # type: ignore[arg-type]
    assert forward is not None
    for num_tokens in (1, 2, 7, 100):
        expected, given = _both(model, forward, num_tokens)
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-3)
    # the module keeps its weights, wherever they lie now
    for name, each in model.module.state_dict().items():
        assert torch.equal(each, before[name]), name


def test_products_are_joined_and_weights_are_held_once(tmp_path: Path) -> None:
    model = _load(tmp_path, "llama")

    def memory() -> int:
        storages = {p.untyped_storage().data_ptr(): p for p in model.module.parameters()}
        return sum(p.untyped_storage().nbytes() for p in storages.values())

    before = sum(p.nbytes for p in model.module.parameters())
    forward = trace.trace(model.module, KERNELS, VOCAB)  # type: ignore[arg-type]
    assert forward is not None
    attention = model.module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    first, second = attention.q_proj.weight, attention.k_proj.weight  # type: ignore[union-attr]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert memory() <= before * 1.01


def test_a_second_recording_of_a_module_works(tmp_path: Path) -> None:
    model = _load(tmp_path, "llama")
    for _ in range(2):
        forward = trace.trace(model.module, KERNELS, VOCAB)  # type: ignore[arg-type]
        assert forward is not None
        expected, given = _both(model, forward, 5)
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-3)


class _Odd(torch.nn.Module):
    """A model of one product that does with its tokens what `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(VOCAB, 8))
        self._way = way

    def forward(self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_: Any) -> Any:
        x = self.weight[input_ids]
        num_tokens = input_ids.shape[1]
        if self._way == "counts":
            x = x + float(num_tokens)
        elif self._way == "looks" and bool(input_ids.sum() > 3):
            x = x * 2
        elif self._way == "multiplies":
            x = x.reshape(num_tokens * 8)[: num_tokens * 8].view(1, num_tokens, 8)
        elif self._way == "branches":
            x = x * (2 if num_tokens > 20 else 1)
        return SimpleNamespace(logits=(x @ self.weight.t())[:, logits_to_keep])


@pytest.mark.parametrize("way", ["counts", "looks", "multiplies", "branches"])
def test_what_is_not_understood_is_not_used(way: str) -> None:
    assert trace.trace(_Odd(way), KERNELS, VOCAB) is None  # type: ignore[arg-type]


def test_the_odd_model_without_its_oddity_is_used() -> None:
    sites = {"of an attempt before": Site(0, 1, 1)}
    forward = trace.trace(_Odd("plain"), KERNELS, VOCAB, sites=sites)  # type: ignore[arg-type]
    assert forward is not None
    assert "of an attempt before" not in sites
