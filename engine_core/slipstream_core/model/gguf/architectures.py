"""The configurations of transformers that the metadata of each served architecture stands for.

A function per family takes its keys; what is left is refused (`metadata.refuse_others`). Sources of
the keys: `convert_hf_to_gguf.py`, `llama-arch.cpp` and `llama-model.cpp` of llama.cpp. What a file
does not say, because llama.cpp has it in its code, stands here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np

from slipstream_core.model.gguf.metadata import Metadata
from slipstream_core.model.gguf.reader import GGUFModel, Tensor

Config = dict[str, Any]

_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Llama 3.1's scaling, by which llama.cpp's converter makes the tensor rope_freqs
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_LAYERS_OF_GEMMA_2_27B, _LAYERS_OF_GEMMA_3_27B = 46, 62
_GEMMA_3_FULL = 6  # every sixth layer attends to all
_DTYPES = {"F32": "float32", "F16": "float16"}  # others are served in bfloat16 where it is quick


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata and tensors of a file of one architecture."""

    architecture: str
    metadata: Metadata
    tensors: Mapping[str, Tensor]

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of the architecture's keys."""
        return self.metadata.integer(f"{self.architecture}.{key}", default, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the architecture's keys."""
        return self.metadata.number(f"{self.architecture}.{key}", default)

    def has(self, key: str) -> bool:
        """True if the architecture's key is there."""
        return self.metadata.has(f"{self.architecture}.{key}")

    def require(self, key: str, allowed: float | bool) -> None:
        """Take a key of the architecture's that may have this value alone."""
        self.metadata.require(f"{self.architecture}.{key}", allowed)


def read_config(model: GGUFModel) -> Config:
    """The config.json that the file stands for. Raises GGUFError."""
    metadata = Metadata(model)
    architecture = architecture_of(metadata)
    header = Header(architecture, metadata, model.tensors)
    config = _common(header) | ARCHITECTURES[architecture](header)
    metadata.ignore_prefix("tokenizer.")  # looked at with the tokenizer
    metadata.ignore_prefix("general.sampling.")  # and with the settings of generation
    metadata.refuse_others()
    return config


def architecture_of(metadata: Metadata) -> str:
    """The name of a file's architecture. Raises GGUFError for one that is not served."""
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.error(
            f"is a model of the architecture {architecture!r}, which is not served from GGUF "
            f"files; served are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _common(header: Header) -> Config:
    """The settings that all architectures have."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise header.metadata.error("lacks the tensor 'token_embd.weight'")
    vocab_size = embedding.shape[0]
    if header.integer("vocab_size", vocab_size) != vocab_size:
        raise header.metadata.error(f"embeds {vocab_size} tokens, and says that they are others")
    heads = header.integer("attention.head_count")
    hidden = header.integer("embedding_length")
    head_dim = header.integer("attention.key_length", hidden // heads)
    header.require("attention.value_length", head_dim)
    kinds = [each.type.name for each in header.tensors.values() if len(each.shape) > 1]
    most = max(kinds, key=kinds.count)
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _DTYPES.get(most, "bfloat16"),
        "use_cache": True,
        **{f"{each}_token_id": None for each in ("bos", "eos", "pad")},
    }


def _llama(header: Header) -> Config:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": _has_bias(header),
        "mlp_bias": False,
        "rope_parameters": _rope(header),
    }
    header.require("expert_count", 0)
    header.require("expert_used_count", 0)
    if header.has("attention.sliding_window"):
        # Mistral's first models; those after them are Llamas but for their name
        del config["attention_bias"], config["mlp_bias"]
        config |= {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": header.integer("attention.sliding_window"),
        }
    return config


def _qwen2(header: Header) -> Config:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(header),
    }


def _qwen3(header: Header) -> Config:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": _has_bias(header),
        "use_sliding_window": False,
        "rope_parameters": _rope(header),
    }


def _qwen3_moe(header: Header) -> Config:
    header.require("expert_weights_scale", 1.0)
    header.require("expert_shared_count", 0)
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": _has_bias(header),
        "use_sliding_window": False,
        "num_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # in llama.cpp's code
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": _rope(header),
    }


def _gemma2(header: Header) -> Config:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scalar(header, _LAYERS_OF_GEMMA_2_27B),
        "attn_logit_softcapping": header.number("attn_logit_softcapping"),
        "final_logit_softcapping": header.number("final_logit_softcapping"),
        "sliding_window": header.integer("attention.sliding_window"),
        "layer_types": _alternating(header),
        "rope_parameters": _rope(header),
    }


def _gemma3(header: Header) -> Config:
    header.require("attention.sliding_window_pattern", _GEMMA_3_FULL)
    softcap = "final_logit_softcapping"
    local = header.number("rope.freq_base_swa", 10_000.0)
    layers = range(1, header.integer("block_count") + 1)
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scalar(header, _LAYERS_OF_GEMMA_3_27B),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": header.number(softcap) if header.has(softcap) else None,
        "sliding_window": header.integer("attention.sliding_window"),
        "layer_types": [_kind(is_full=layer % _GEMMA_3_FULL == 0) for layer in layers],
        "rope_parameters": {
            "full_attention": _rope(header, base=1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(header: Header) -> Config:
    window = header.integer("attention.sliding_window", 0, least=0)
    original = "rope.scaling.original_context_length"
    head_dim = _head_dim(header)
    rotated = header.integer("rope.dimension_count", head_dim)
    rope: Config = {
        "rope_type": "default",
        "rope_theta": header.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotated / head_dim,
    }
    config: Config = {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": window or None,
        "original_max_position_embeddings": header.integer(
            original, header.integer("context_length")
        ),
        "rope_parameters": rope,
    }
    if _LONG in header.tensors or _SHORT in header.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": _factors(header, _LONG, rotated // 2),
            "short_factor": _factors(header, _SHORT, rotated // 2),
            "attention_factor": header.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": header.integer(original),
        }
        longest = header.integer("context_length")
        rope["factor"] = longest / rope["original_max_position_embeddings"]
        header.metadata.require(f"{header.architecture}.rope.scaling.type", "longrope")
    else:
        header.require("rope.scaling.attn_factor", 1.0)
    return config


def _gpt_oss(header: Header) -> Config:
    rope = _rope(header)
    if rope["rope_type"] == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False}
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": True,
        "intermediate_size": header.integer("expert_feed_forward_length"),
        "num_local_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "sliding_window": header.integer("attention.sliding_window"),
        "layer_types": _alternating(header),
        "rope_parameters": rope,
    }


def _glm4(header: Header) -> Config:
    head_dim = _head_dim(header)
    rotated = header.integer("rope.dimension_count", head_dim)
    rope = _rope(header, rotated=rotated)
    return {
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": _has_bias(header),
        "rope_parameters": rope | {"partial_rotary_factor": rotated / head_dim},
    }


def _granite(header: Header) -> Config:
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": _has_bias(header),
        "mlp_bias": False,
        "attention_multiplier": header.number("attention.scale"),
        "embedding_multiplier": header.number("embedding_scale"),
        "residual_multiplier": header.number("residual_scale"),
        "logits_scaling": header.number("logit_scale"),
        "rope_parameters": _rope(header),
    }


def _olmo2(header: Header) -> Config:
    return {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": _rope(header),
    }


def _smollm3(header: Header) -> Config:
    layers = range(1, header.integer("block_count") + 1)
    return {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": _has_bias(header),
        "mlp_bias": False,
        "use_sliding_window": False,
        "no_rope_layers": [int(layer % 4 != 0) for layer in layers],  # in llama.cpp's code
        "no_rope_layer_interval": 4,
        "rope_parameters": _rope(header),
    }


def _rope(header: Header, *, base: float = 10_000.0, rotated: int | None = None) -> Config:
    """The rope_parameters. rotated: of a head's dimensions, by default all."""
    rotated = _head_dim(header) if rotated is None else rotated
    header.require("rope.dimension_count", rotated)
    theta = header.number("rope.freq_base", base)
    factor = header.number("rope.scaling.factor", 0.0)
    kind = header.metadata.text(
        f"{header.architecture}.rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none"
    )
    # whether the model was trained so; it does not change how it computes
    header.metadata.ignore([f"{header.architecture}.rope.scaling.finetuned"])
    header.require("rope.scaling.attn_factor", 1.0)
    header.require("rope.scaling.yarn_ext_factor", 1.0)
    header.require("rope.scaling.yarn_attn_factor", 1.0)
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": header.integer(
                "rope.scaling.original_context_length"
            ),
        }
        for ours, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if header.has(f"rope.scaling.{key}"):
                rope[ours] = header.number(f"rope.scaling.{key}")
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise header.metadata.error(
            f"has positions scaled by {kind!r}; served are none, linear and yarn"
        )
    if kind != "none" and factor < 1:
        raise header.metadata.error(f"scales positions by {factor}; allowed: 1 or more")
    if kind == "linear":
        # of no effect on linear scaling
        key = f"{header.architecture}.rope.scaling.original_context_length"
        header.metadata.ignore([key])
    if _FREQS in header.tensors:
        if kind != "none":
            raise header.metadata.error(
                f"scales its positions twice: by {kind!r} and by {_FREQS!r}"
            )
        rope |= _llama3(header, theta, rotated)
    return rope


def _llama3(header: Header, theta: float, rotated: int) -> Config:
    """Llama 3.1's scaling, from the divisors of frequencies that the converter made of it."""
    divisors = np.array(_factors(header, _FREQS, rotated // 2), np.float32)
    factor = float(divisors[-1])
    steps = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    lengths = 2 * pi * np.power(theta, steps.astype(np.float64))
    smooth = (_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(lengths > _ORIGINAL / _LOW, factor, between)
    expected = np.where(lengths < _ORIGINAL / _HIGH, 1.0, expected)
    if factor < 1 or not np.allclose(divisors, expected, rtol=1e-4):
        raise header.metadata.error(
            f"divides the frequencies of positions by {_FREQS!r} otherwise than Llama 3.1 does, "
            "which is not served; --hf-config-path may say how it does"
        )
    if factor == 1:
        return {}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _factors(header: Header, name: str, count: int) -> list[float]:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.shape != (count,):
        raise header.metadata.error(f"has no tensor {name!r} of {count} values of type F32")
    found: list[float] = tensor.read().view("<f4").ravel().tolist()
    if not np.isfinite(found).all():
        raise header.metadata.error(f"has values in {name!r} that are no numbers")
    return found


def _head_dim(header: Header) -> int:
    whole = header.integer("embedding_length") // header.integer("attention.head_count")
    return header.integer("attention.key_length", whole)


def _has_bias(header: Header) -> bool:
    return "blk.0.attn_q.bias" in header.tensors


def _query_scalar(header: Header, layers_of_27b: int) -> float:
    """Gemma's query_pre_attn_scalar, which llama.cpp tells by the number of layers."""
    if header.integer("block_count") == layers_of_27b:
        return header.integer("embedding_length") / header.integer("attention.head_count")
    return _head_dim(header)


def _alternating(header: Header) -> list[str]:
    return [_kind(is_full=layer % 2 == 1) for layer in range(header.integer("block_count"))]


def _kind(*, is_full: bool) -> str:
    return "full_attention" if is_full else "sliding_attention"


ARCHITECTURES: dict[str, Callable[[Header], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "glm4": _glm4,
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
}
"""The served architectures by the names that files have for them."""
