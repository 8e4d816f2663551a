"""Random weights in the shapes of published models: `random:NAME[,OPTION=NUMBER...]`.

For measurements: a forward takes the same time whatever the weights are, and 61 GB need not be
downloaded, stored or read. The text is meaningless. The shapes are from the models' config.json.

- Weights are created on their device in their dtype, with no copy on the host.
- The same string gives the same weights on the same kind of device and version of torch.
- An option replaces a number of the configuration (`num_hidden_layers=2`), so tests can make models
  tiny. Types and structure are fixed.
- The name always begins with `random:`. There is no end-of-text token and no tokenizer.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

PREFIX = "random:"

# by name: the configuration class and its arguments
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
    ),
}
_SEED = 0

# missing from transformers' annotations
_from_config: Any = AutoModelForCausalLM.from_config


def is_random(model: str) -> bool:
    """True if a model string names random weights."""
    return model.startswith(PREFIX)


def random_config(model: str) -> PreTrainedConfig:
    """The configuration of `random:NAME,...`. Raises ValueError that says what is allowed."""
    name, *options = model.removeprefix(PREFIX).split(",")
    if name not in _SHAPES:
        raise ValueError(f"{name!r} is not a shape; allowed: {', '.join(_SHAPES)}")
    kind, settings = _SHAPES[name]
    config: PreTrainedConfig = getattr(transformers, kind)(
        **{**settings, **_replaced(options, settings), "dtype": torch.bfloat16},
        bos_token_id=None,
        eos_token_id=None,
    )
    return config


def _replaced(options: list[str], settings: dict[str, Any]) -> dict[str, int]:
    numbers = [key for key, value in settings.items() if type(value) is int]
    found: dict[str, int] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in numbers:
            raise ValueError(f"unknown option {key!r}; allowed: {', '.join(numbers)}")
        if key in found:
            raise ValueError(f"option {key!r} is given twice")
        if not (value.isascii() and value.isdecimal() and 1 <= len(value) <= 9 and int(value)):
            raise ValueError(f"option {key!r} is {value!r}; allowed: a whole number, 1 or more")
        found[key] = int(value)
    return found


def random_module(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, **settings: Any
) -> PreTrainedModel:
    """A model of that configuration, created on `device`; `settings` go to transformers."""
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cards), torch.device(device):
        torch.manual_seed(_SEED)
        module: PreTrainedModel = _from_config(config, dtype=dtype, **settings)
    return module
