"""The trial of a fused forward: what is told from a rounding, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream_core.attention.interface import AttentionContext
from slipstream_core.forward.trace import TRIALS, Forward, eager
from slipstream_core.forward.trace_card import _Trial
from slipstream_core.model.loader import load_model

_CPU = torch.device("cpu")
_DEEP = "random:qwen3-0.6b,hidden_size=256,intermediate_size=768,head_dim=32,vocab_size=500"
_VOCAB = 500


def _exactly_rounded(module: Any) -> Forward:
    """The module's weights, with every product and sum in float32."""
    wide = load_model(_DEEP, device="cpu", dtype="float32").module
    wide.load_state_dict({name: each.float() for name, each in module.state_dict().items()})
    inner = eager(wide)

    def forward(
        ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        return inner(ids, positions, keep, context).to(torch.bfloat16)

    return forward


def _with_other_gates(module: Any) -> Forward:
    for layer in module.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()
    return eager(module)


@torch.inference_mode()
def test_what_untrained_weights_make_of_roundings_is_allowed() -> None:
    module = load_model(_DEEP, device="cpu", dtype="bfloat16").module
    trial, other = _Trial(module, _VOCAB, _CPU), _exactly_rounded(module)
    assert max(trial.error_of(other, num_tokens) for num_tokens in TRIALS) > 0.1, "nothing shown"
    for num_tokens in TRIALS:
        trial.compare(other, num_tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.inference_mode()
def test_another_computation_is_not(dtype: Any) -> None:
    module, other = (load_model(_DEEP, device="cpu", dtype=dtype).module for _ in range(2))
    wrong = _with_other_gates(other)
    trial = _Trial(module, _VOCAB, _CPU)
    for num_tokens in TRIALS:
        with pytest.raises(ValueError, match=r"differ: by .* of their size, where .* is allowed"):
            trial.compare(wrong, num_tokens)


@torch.inference_mode()
def test_zeros_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that amplifies a rounding to anything."""
    trial = _Trial(load_model(_DEEP, device="cpu", dtype="bfloat16").module, _VOCAB, _CPU)
    monkeypatch.setattr(trial, "_own_error", 1.0)

    def zeros(
        ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        return torch.zeros(1, len(keep), _VOCAB, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match="differ"):
        trial.compare(zeros, 3)


@torch.inference_mode()
def test_in_float32_a_small_difference_is_one() -> None:
    module, other = (load_model(_DEEP, device="cpu", dtype="float32").module for _ in range(2))
    other.model.layers[5].mlp.down_proj.weight.data *= 1.05
    with pytest.raises(ValueError, match="differ"):
        _Trial(module, _VOCAB, _CPU).compare(eager(other), 1)
