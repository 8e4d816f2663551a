"""Models with random weights: small ones of many architectures, and `random:NAME` in real models'
shapes, with a tokenizer that has a word for each id.

Small models have wide random weights, so that their outputs are diverse and their logits far apart;
their sliding windows are shorter than the prompts, so that they take effect.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

SMALL_VOCAB = 331

_SMALL: dict[str, Any] = {
    "vocab_size": SMALL_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

# By name: the configuration's class, and its options beside the above.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 11, "query_pre_attn_scalar": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, **_EXPERTS}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 11, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen3": ("Qwen3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 11, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2Config", {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512}),
}
QUICK_ARCHITECTURES = ("llama", "gemma2", "qwen3_moe", "gpt_oss")
BFLOAT16_ARCHITECTURES = ("llama", "gemma2", "qwen3_moe", "gpt_oss")

# Smaller `random:NAME` shapes for dry runs.
_QUICK = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_QUICK_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# not annotated in transformers
_from_config: Any = AutoModelForCausalLM.from_config


def save_small(name: str, folder: Path) -> Path:
    """Save a small model of an architecture, in float32; returns its folder."""
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{**_SMALL, **settings})
    torch.manual_seed(0)
    model: PreTrainedModel = _from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # parameters that start as zeros or ones (biases, sinks, norms) must take effect
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder / name)
    return folder / name


def model_of(shape: str, *, is_quick: bool) -> str:
    """The MODEL string of a shape with random weights."""
    if not is_quick:
        return f"random:{shape}"
    numbers = _QUICK | (_QUICK_EXPERTS if "a3b" in shape else {})
    return ",".join([f"random:{shape}", *(f"{name}={value}" for name, value in numbers.items())])


def shape_name(shape: str, *, is_quick: bool) -> str:
    """The shape's name in rows."""
    return f"{shape} shape" + (", tiny" if is_quick else "")


def stand_in_tokenizer(folder: Path, vocab_size: int) -> Path:
    """The folder of a tokenizer with `vocab_size` ids; made once for all sections."""
    path = folder / f"tokenizer-{vocab_size}"
    if not (path / "tokenizer.json").exists():
        path.mkdir(exist_ok=True)
        _save_tokenizer(path, vocab_size)
    return path


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level, with a made-up word for each id: text costs as much as with a real tokenizer."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [c + v for c in "bcdfghjklmnpqrstvwxz" for v in "aeiou"]
    number = 0
    while len(tokens) < vocab_size:
        word, rest = "", len(syllables) + number  # at least two syllables, so all differ
        while rest:
            rest, place = divmod(rest, len(syllables))
            word += syllables[place]
        tokens.append("\u0120" + word)
        number += 1
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.save(str(path / "tokenizer.json"))
