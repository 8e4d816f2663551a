"""Models with random weights: small ones of many architectures, and `random:NAME` in real models'
shapes, with a tokenizer that has a word for each id; and the settings with which they are served.

Small models have wide random weights, so that their outputs are diverse and their logits far apart;
their sliding windows are shorter than the prompts, so that they take effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream_core.config import CoreConfig
from slipstream_core.model.random_weights import random_config
from slipstream_lab.models.stand_in_tokenizer import stand_in_tokenizer
from slipstream_verify.gpu_check.setting import GpuSetting

SMALL_VOCAB = 331
SMALL_BLOCK = 8  # tokens in a block of the cache

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
    # wide enough for products of one row
    "llama": ("LlamaConfig", {"hidden_size": 256, "intermediate_size": 512}),
    "gemma2": ("Gemma2Config", {"sliding_window": 11, "query_pre_attn_scalar": 32}),
    # wide enough for experts of few tokens, and for a router with a norm
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"hidden_size": 256, "num_experts": 16, **_EXPERTS, "moe_intermediate_size": 128},
    ),
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

GRAPH_SIZES = ("cuda_graph_sizes", "cudagraph_capture_sizes")  # the setting's possible names

# not annotated in transformers
_from_config: Any = AutoModelForCausalLM.from_config


def small_config(name: str) -> Any:
    """The configuration of a small model of an architecture."""
    kind, settings = ARCHITECTURES[name]
    return getattr(transformers, kind)(**{**_SMALL, **settings})


def save_small(name: str, folder: Path) -> Path:
    """Save a small model of an architecture, in float32; returns its folder."""
    config = small_config(name)
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


def core_config(
    setting: GpuSetting,
    shape: str,
    *,
    num_requests: int,
    max_model_len: int,
    num_tokens: int | None = None,
    address: str = "",
    graph_sizes: Sequence[int] = (),
    enforce_eager: bool = False,
) -> CoreConfig:
    """The core's settings for a shape.

    num_tokens: size of the cache; None: as many as fit the card. graph_sizes: the measured batches;
    only these are captured. enforce_eager: none are.
    """
    options: dict[str, Any] = {}
    for name in GRAPH_SIZES:
        if graph_sizes and name in CoreConfig.__struct_fields__:
            options[name] = tuple(graph_sizes)
    return CoreConfig(
        model=model_of(shape, is_quick=setting.is_quick),
        served_model_name=setting.name_of(shape),
        address=address,
        device=setting.device,
        dtype="float32" if setting.device == "cpu" else "bfloat16",
        threads=1 if setting.device == "cpu" else None,
        num_blocks=None if num_tokens is None else -(-num_tokens // 16) + num_requests + 1,
        # the largest load must fit: 117 GiB of cache on a card of 139 (Qwen3-0.6B, 1,024 requests
        # of 1,024 tokens); loads that do not fit are skipped
        gpu_memory_utilization=0.95,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        max_model_len=max_model_len,
        enforce_eager=enforce_eager,
        **options,
    )


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Implements `slipstream_lab.common.simulated_stack.ServedDevice`."""

    setting: GpuSetting
    shape: str
    batch: int
    max_model_len: int
    num_tokens: int  # capacity of the cache
    stream_interval: int | Literal["auto"] = "auto"

    def settings(self) -> dict[str, Any]:
        """A stack's settings."""
        model = model_of(self.shape, is_quick=self.setting.is_quick)
        config = core_config(
            self.setting,
            self.shape,
            num_requests=self.batch,
            max_model_len=self.max_model_len,
            num_tokens=self.num_tokens,
            graph_sizes=(self.batch,),
        )
        names = [
            *("device", "dtype", "threads", "num_blocks", "max_num_seqs", "max_num_batched_tokens"),
            *(name for name in GRAPH_SIZES if name in config.__struct_fields__),
        ]
        return {
            "model": model,
            "tokenizer": str(
                stand_in_tokenizer(self.setting.folder, random_config(model).vocab_size)
            ),
            "max_model_len": self.max_model_len,
            "stream_interval": self.stream_interval,
            "spare_core": False,
            "spare_worker": False,
            **{name: getattr(config, name) for name in names},
        }
