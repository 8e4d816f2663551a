"""The model that comparisons serve on a CPU unless another is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream_core.model.random_weights import is_random, random_config
from slipstream_lab.models.stand_in_tokenizer import stand_in_tokenizer

# model S of the README: 19.8 million parameters
SMALL_MODEL = (
    "random:llama-3.1-8b,hidden_size=256,intermediate_size=768,num_hidden_layers=4,"
    "num_attention_heads=4,num_key_value_heads=4,vocab_size=32000,max_position_embeddings=16384"
)
SMALL_MODEL_HELP = "default: 19.8 M parameters, random weights"


def cpu_settings(model: str, folder: Path, kv_cache_gib: float) -> dict[str, Any]:
    """The settings of a stack that serves `model` on a CPU; its tokenizer is made in `folder` where
    the weights are random.
    """
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gib": kv_cache_gib}
    if is_random(model):
        vocab_size = random_config(model).vocab_size
        settings["tokenizer"] = str(stand_in_tokenizer(folder, vocab_size))
    return settings
