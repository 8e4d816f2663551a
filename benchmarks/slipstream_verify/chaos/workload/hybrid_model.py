"""A tiny model with recurrent states, of random weights: Qwen3.5's layers (three gated delta nets,
then attention), with the demo model's tokenizer and chat template.

Its logits spread by about one, so answers wander over the vocabulary and near ties are rare.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from slipstream.demo_model import MODEL_PATH

_SPREAD = 0.1  # of weights: the logits' is this times the root of the hidden size
_OPTIONS: dict[str, Any] = {
    "vocab_size": 4096,  # the tokenizer's
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": _SPREAD,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save_hybrid(folder: Path) -> None:
    """Write the model into a new folder; the same weights each time."""
    import torch
    import transformers

    folder.mkdir()
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.for_model("qwen3_5_text", **_OPTIONS)
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copy(MODEL_PATH / name, folder / name)
