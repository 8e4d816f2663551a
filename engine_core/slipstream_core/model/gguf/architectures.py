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
_OF_YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
_LAYERS_OF_GEMMA_2_27B, _LAYERS_OF_GEMMA_3_27B = 46, 62
_GEMMA_3_FULL = 6  # every sixth layer attends to all
_HYBRIDS = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe")
_LATENT = ("deepseek2",)
_UNEVEN = ("gemma4",)  # which look themselves at what blocks have behind the first
_UNROTATED = np.float32(1e30)  # divides frequencies until nothing turns
_KINDS_OF_NEMOTRON = {
    "ssm_in": "linear_attention",
    "attn_q": "full_attention",
    "ffn_up_exps": "moe",
    "ffn_up": "mlp",
}
_DENSE_UP = ".ffn_up.weight"
_LAYER_NORMS = ("cohere2", "starcoder2", "nemotron_h", "nemotron_h_moe")  # by their epsilon's name
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_SOFTMAX, _SIGMOID = 1, 2  # of the scores by which experts are chosen
_WINDOW_OF_STARCODER_2 = 4096  # of those that are published; files do not say it
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

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false, of the architecture's keys."""
        return self.metadata.flag(f"{self.architecture}.{key}", default)

    def per_block(self, key: str, default: int | None = None) -> list[int]:
        """A whole number of each block, of a key that may say one for all."""
        return self.metadata.whole_numbers(f"{self.architecture}.{key}", self.num_blocks, default)

    @property
    def num_blocks(self) -> int:
        """Blocks that answer, without those behind them that draft."""
        drafting = self.integer("nextn_predict_layers", 0, least=0)
        count = self.integer("block_count")
        if drafting >= count:
            raise self.metadata.error(f"has {count} blocks, of which {drafting} draft tokens")
        return count - drafting

    def has(self, key: str) -> bool:
        """True if the architecture's key is there."""
        return self.metadata.has(f"{self.architecture}.{key}")

    def require(self, key: str, allowed: float | bool) -> None:
        """Take a key of the architecture's that may have this value alone."""
        self.metadata.require(f"{self.architecture}.{key}", allowed)

    def ignore(self, *keys: str) -> None:
        """Count keys of the architecture's as understood that change nothing here."""
        self.metadata.ignore(f"{self.architecture}.{key}" for key in keys)

    def has_bias(self, stem: str = "attn_q") -> bool:
        """True if the tensors of this name have biases."""
        return any(each.endswith(f".{stem}.bias") for each in self.tensors)

    def has_tensor(self, stem: str) -> bool:
        """True if blocks have a tensor of this name."""
        return any(f".{stem}." in each for each in self.tensors)


def read_config(model: GGUFModel) -> Config:
    """The config.json that the file stands for. Raises GGUFError."""
    metadata = Metadata(model)
    architecture = architecture_of(metadata)
    header = Header(architecture, metadata, model.tensors)
    config = _common(header) | _epsilon(header) | ARCHITECTURES[architecture](header)
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


def num_drafting_blocks(model: GGUFModel) -> int:
    """Blocks behind the others that draft tokens (MTP)."""
    metadata = Metadata(model)
    return metadata.integer(f"{architecture_of(metadata)}.nextn_predict_layers", 0)


def _common(header: Header) -> Config:
    """The settings that all architectures have."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise header.metadata.error("lacks the tensor 'token_embd.weight'")
    vocab_size = embedding.shape[0]
    if header.integer("vocab_size", vocab_size) != vocab_size:
        raise header.metadata.error(f"embeds {vocab_size} tokens, and says that they are others")
    heads = header.integer("attention.head_count")
    kinds = [each.type.name for each in header.tensors.values() if len(each.shape) > 1]
    most = max(kinds, key=kinds.count)
    return {
        "vocab_size": vocab_size,
        "hidden_size": header.integer("embedding_length"),
        "intermediate_size": _one(
            header, "feed_forward_length", 0 if header.has("expert_feed_forward_length") else None
        ),
        "num_hidden_layers": header.num_blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(header, "attention.head_count_kv", heads),
        "max_position_embeddings": header.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _DTYPES.get(most, "bfloat16"),
        "use_cache": True,
        **{f"{each}_token_id": None for each in ("bos", "eos", "pad")},
    } | ({} if header.architecture in _LATENT else _whole_heads(header))


def _epsilon(header: Header) -> Config:
    """The epsilon of norms, under the names that configurations have for it."""
    rms, usual = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    if header.architecture in _LAYER_NORMS:
        header.ignore(rms)
        return dict.fromkeys(_EPSILONS, header.number(usual))
    return dict.fromkeys(_EPSILONS, header.number(rms))


def _one(header: Header, key: str, default: int | None) -> int:
    """The number that a key has for all blocks, or, in hybrids, for those with another than 0."""
    said = set(header.per_block(key, default))
    if header.architecture in _UNEVEN:
        return header.per_block(key, default)[0]
    if header.architecture in _HYBRIDS:
        said -= {0}
    if len(said) > 1:
        raise header.metadata.error(
            f"has blocks that differ in '{header.architecture}.{key}', which is not served"
        )
    return said.pop() if said else 0


def _whole_heads(header: Header) -> Config:
    head_dim = _head_dim(header)
    header.require("attention.value_length", head_dim)
    return {"head_dim": head_dim}


def _llama(header: Header) -> Config:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "mlp_bias": False,
        "rope_parameters": _rope(header),
    }
    window = header.integer("attention.sliding_window", 0, least=0) or None
    num_experts = header.integer("expert_count", 0, least=0)
    used = header.integer("expert_used_count", 0, least=0)
    if bool(used) != bool(num_experts) or bool(used) != header.has_tensor("ffn_gate_inp"):
        raise header.metadata.error(
            f"has {num_experts} experts in 'llama.expert_count' and {used} in "
            "'llama.expert_used_count', which do not go with its tensors"
        )
    if num_experts or window:
        # Mistral's first models; those after them are Llamas but for their name
        del config["attention_bias"], config["mlp_bias"]
        config |= {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    if num_experts:
        config |= {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": num_experts,
            "num_experts_per_tok": used,
        }
    return config


def _mistral3(header: Header) -> Config:
    rope = _rope(header)
    config = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": None,
        "rope_parameters": rope,
    }
    if rope["rope_type"] == "yarn":
        rope |= {
            "mscale": 1.0,  # in llama.cpp's code
            "mscale_all_dim": header.number("rope.scaling.yarn_log_multiplier"),
            "llama_4_scaling_beta": header.number("attention.temperature_scale"),
        }
        config |= {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    return config


def _qwen2(header: Header) -> Config:
    _ignore_images(header)
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(header),
    }


def _qwen3(header: Header) -> Config:
    _ignore_images(header)
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "use_sliding_window": False,
        "rope_parameters": _rope(header),
    }


def _qwen3_moe(header: Header) -> Config:
    _ignore_images(header)
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "use_sliding_window": False,
        **_experts(header, normed=True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": _rope(header),
    }


def _qwen2_moe(header: Header) -> Config:
    return {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_act": "silu",
        "qkv_bias": header.has_bias(),
        "use_sliding_window": False,
        **_experts(header, normed=False),
        **_shared_expert(header),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": _rope(header),
    }


def _qwen3_next(header: Header) -> Config:
    return {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_parameters": _partial_rope(header),
        **_delta_net(header),
        **_experts(header, normed=True),
        **_shared_expert(header),
    }


def _qwen3_5(header: Header) -> Config:
    sections = header.metadata.numbers(f"{header.architecture}.rope.dimension_sections") or []
    rope = {"mrope_section": [int(each) for each in sections[:3]], "mrope_interleaved": True}
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "rope_parameters": _partial_rope(header) | (rope if sections else {}),
        **_delta_net(header),
    }


def _qwen3_5_moe(header: Header) -> Config:
    return {
        **_qwen3_5(header),
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_experts(header, normed=True),
        **_shared_expert(header),
    }


def _delta_net(header: Header) -> Config:
    """Gated delta nets between layers that attend."""
    values = header.integer("ssm.time_step_rank")
    layers = range(1, header.num_blocks + 1)
    recurrent = header.metadata.flags(f"{header.architecture}.attention.recurrent_layers")
    interval = header.integer("full_attention_interval", 4)
    if recurrent is None:
        recurrent = [layer % interval != 0 for layer in layers]
    return {
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
        "linear_key_head_dim": header.integer("ssm.state_size"),
        "linear_value_head_dim": header.integer("ssm.inner_size") // values,
        "linear_num_key_heads": header.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "layer_types": [
            "linear_attention" if each else "full_attention"
            for each, _ in zip(recurrent, layers, strict=False)
        ],
    }


def _mamba(header: Header) -> dict[str, int]:
    """Sizes of Mamba 2, by one set of names."""
    heads, inner = header.integer("ssm.time_step_rank"), header.integer("ssm.inner_size")
    return {
        "heads": heads,
        "head_dim": inner // heads,
        "inner": inner,
        "groups": header.integer("ssm.group_count"),
        "state": header.integer("ssm.state_size"),
        "kernel": header.integer("ssm.conv_kernel"),
    }


def _mamba_prefixed(header: Header) -> Config:
    """Mamba 2 in configurations that name it."""
    sizes = _mamba(header)
    return {
        "mamba_n_heads": sizes["heads"],
        "mamba_d_head": sizes["head_dim"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state"],
        "mamba_d_conv": sizes["kernel"],
        "mamba_conv_bias": header.has_bias("ssm_conv1d"),
        "mamba_proj_bias": header.has_bias("ssm_in"),
    }


def _experts(
    header: Header, *, normed: bool, gating: int = _SOFTMAX, count: str = "num_experts"
) -> Config:
    """Experts whose scores llama.cpp's code treats so. count: how the configuration names it."""
    header.require("expert_weights_scale", 1.0)
    header.require("expert_weights_norm", normed)
    header.require("expert_gating_func", gating)
    header.ignore("expert_shared_count")  # as its tensors tell
    return {
        count: header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "norm_topk_prob": normed,
    }


def _shared_expert(header: Header) -> Config:
    key = "expert_shared_feed_forward_length"
    return {"shared_expert_intermediate_size": header.integer(key)}


def _routed(header: Header) -> Config:
    """DeepSeek V3's experts."""
    header.require("expert_gating_func", _SIGMOID)
    return {
        "n_routed_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "n_shared_experts": header.integer("expert_shared_count"),
        "moe_intermediate_size": header.integer("expert_feed_forward_length"),
        "norm_topk_prob": header.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": header.number("expert_weights_scale", 1.0),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
    }


def _ignore_images(header: Header) -> None:
    """Parts of a vision model, which text does not need: there the three positions are one."""
    if header.architecture.startswith(("qwen2vl", "qwen3vl")):
        header.ignore("rope.dimension_sections", "n_deepstack_layers")


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


def _gemma4(header: Header) -> Config:
    head_dim, whole = header.integer("attention.key_length_swa"), _head_dim(header)
    header.require("attention.value_length_swa", head_dim)
    header.require("rope.dimension_count_swa", head_dim)
    header.require("rope.dimension_count", whole)
    windows, softcap = _windows(header), "final_logit_softcapping"
    kinds = windows["layer_types"]
    num_shared = header.integer("attention.shared_kv_layers", 0, least=0)
    own = header.num_blocks - num_shared  # blocks with keys and values of their own
    heads: dict[str, set[int]] = {kind: set() for kind in kinds}
    for kind, each in zip(kinds, header.per_block("attention.head_count_kv"), strict=True):
        heads[kind].add(each)
    without = {
        f"blk.{block}.attn_v.weight" not in header.tensors
        for block, kind in enumerate(kinds[:own])
        if kind == _kind(is_full=True)
    }
    width, *widths = header.per_block("feed_forward_length")
    is_wide = bool(num_shared) and widths[-1] != width
    expected = [width] * (own - 1) + [width * (1 + is_wide)] * num_shared
    differing = len(set().union(*heads.values())) > 1 and without != {True}
    if differing or len(without) > 1 or widths != expected or max(map(len, heads.values())) > 1:
        raise header.metadata.error("has blocks that differ otherwise than Gemma 4's do")
    num_experts = header.integer("expert_count", 0, least=0)
    return {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "head_dim": head_dim,
        "global_head_dim": whole,
        "attention_k_eq_v": without == {True},
        "num_global_key_value_heads": next(iter(heads.get(_kind(is_full=True), ())), None),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": header.integer(
            "embedding_length_per_layer_input", 0, least=0
        ),
        "vocab_size_per_layer_input": header.tensors["token_embd.weight"].shape[0],
        "final_logit_softcapping": header.number(softcap) if header.has(softcap) else None,
        "enable_moe_block": bool(num_experts),
        "num_experts": num_experts or None,
        "top_k_experts": header.integer("expert_used_count", 0, least=0) or None,
        "moe_intermediate_size": header.integer("expert_feed_forward_length", 0, least=0) or None,
        **windows,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": header.number("rope.freq_base"),
                "partial_rotary_factor": _rotated_part(header, whole),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": header.number("rope.freq_base_swa"),
            },
        },
    }


def _rotated_part(header: Header, head_dim: int) -> float:
    """The part of a head that positions turn, whose frequencies the converter divides by 1."""
    divisors = np.array(_factors(header, _FREQS, head_dim // 2), np.float32)
    turned = int((divisors == 1).sum())
    if (divisors[:turned] != 1).any() or (divisors[turned:] != _UNROTATED).any():
        raise header.metadata.error(
            f"divides the frequencies of positions by {_FREQS!r} otherwise than Gemma 4 does"
        )
    return turned / len(divisors)


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
    return {
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "rope_parameters": _partial_rope(header),
    }


def _glm4_moe(header: Header) -> Config:
    header.ignore("rope.dimension_sections")  # of images
    return {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "use_qk_norm": header.has_tensor("attn_q_norm"),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0, least=0),
        "rope_parameters": _partial_rope(header),
        **_routed(header),
    }


def _deepseek2(header: Header) -> Config:
    """DeepSeek V3 and those like it, among them GLM-4.7-Flash."""
    rotated = header.integer("rope.dimension_count")
    latent = header.integer("attention.kv_lora_rank")
    split = header.has("attention.key_length_mla")  # in older files keys and values are whole
    key, value = ("key_length_mla", "value_length_mla") if split else ("key_length", "value_length")
    if split:
        header.require("attention.key_length", latent + rotated)
        header.require("attention.value_length", latent)
    rope = _rope(header, rotated=rotated)
    if rope["rope_type"] == "yarn":
        # a tenth, as llama.cpp's converter writes it
        scale = header.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope |= {"mscale": scale or 1.0, "mscale_all_dim": scale}
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "num_key_value_heads": header.integer("attention.head_count"),
        "q_lora_rank": (
            header.integer("attention.q_lora_rank") if header.has("attention.q_lora_rank") else None
        ),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": header.integer(f"attention.{key}") - rotated,
        "v_head_dim": header.integer(f"attention.{value}"),
        "first_k_dense_replace": header.integer("leading_dense_block_count", 0, least=0),
        "rope_parameters": rope,
        **_routed(header),
    }


def _granite(header: Header) -> Config:
    header.require("rope.scaling.finetuned", True)  # here it says whether positions count
    header.require("expert_count", 0)
    header.require("expert_used_count", 0)
    # those of Granite 4 that only attend are made by a converter of hybrids
    header.require("expert_shared_feed_forward_length", header.integer("feed_forward_length"))
    header.metadata.ignore_prefix("granite.ssm.")
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "mlp_bias": False,
        **_multipliers(header),
        "rope_parameters": _rope(header),
    }


def _granite_moe(header: Header) -> Config:
    header.require("rope.scaling.finetuned", True)
    header.metadata.ignore_prefix("granitemoe.ssm.")
    shared = header.integer("expert_shared_feed_forward_length", 0, least=0)
    kind = "Shared" if shared else ""
    return {
        "model_type": f"granitemoe{kind.lower()}",
        "architectures": [f"GraniteMoe{kind}ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "num_local_experts": header.integer("expert_count"),
        "num_experts_per_tok": header.integer("expert_used_count"),
        "shared_intermediate_size": shared,
        **_multipliers(header),
        "rope_parameters": _rope(header),
    }


def _granite_hybrid(header: Header) -> Config:
    inner, hidden = header.integer("ssm.inner_size"), header.integer("embedding_length")
    if inner % hidden:
        raise header.metadata.error(f"has mixers of {inner} channels over {hidden}")
    has_positions = header.flag("rope.scaling.finetuned", default=True)
    kv = header.per_block("attention.head_count_kv")
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "layer_types": ["full_attention" if each else "linear_attention" for each in kv],
        "num_local_experts": header.integer("expert_count", 0, least=0),
        "num_experts_per_tok": header.integer("expert_used_count", 0, least=0),
        "shared_intermediate_size": header.integer(
            "expert_shared_feed_forward_length", _one(header, "feed_forward_length", 0)
        ),
        "mamba_expand": inner // hidden,
        "position_embedding_type": "rope" if has_positions else "nope",
        **_mamba_prefixed(header),
        **_multipliers(header),
        "rope_parameters": _rope(header),
    }


def _multipliers(header: Header) -> Config:
    head_dim = _head_dim(header)
    return {
        "attention_multiplier": header.number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": header.number("embedding_scale", 1.0),
        "residual_multiplier": header.number("residual_scale", 1.0),
        "logits_scaling": header.number("logit_scale", 1.0),
    }


def _falcon_h1(header: Header) -> Config:
    """Its multipliers are in the weights."""
    if "output.weight" not in header.tensors:
        raise header.metadata.error(
            "has no head of its own, and its embeddings are multiplied, so logits would be too"
        )
    return {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "mlp_bias": header.has_bias("ffn_up"),
        "projectors_bias": header.has_bias("ssm_out"),
        "mamba_d_ssm": header.integer("ssm.inner_size"),
        "mamba_rms_norm": header.has_tensor("ssm_norm"),
        "mamba_norm_before_gate": False,  # in llama.cpp's code
        "rope_parameters": _rope(header),
        **_mamba_prefixed(header),
    }


def _nemotron_h(header: Header) -> Config:
    """Blocks are what their tensors are: converters have said of dense ones that they are none."""
    kinds = [_kind_of_block(header, block) for block in range(header.num_blocks)]
    inner = [each.shape[0] for name, each in header.tensors.items() if name.endswith(_DENSE_UP)]
    # positions do not count, whatever the converter says of them
    header.metadata.ignore_prefix(f"{header.architecture}.rope.")
    sizes = _mamba(header)
    config: Config = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "mlp_bias": header.has_bias("ffn_up"),
        "use_bias": header.has_bias("ssm_in"),
        "use_conv_bias": header.has_bias("ssm_conv1d"),
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["head_dim"],
        "n_groups": sizes["groups"],
        "ssm_state_size": sizes["state"],
        "conv_kernel": sizes["kernel"],
    } | ({"intermediate_size": inner[0]} if inner else {})
    if "moe" not in kinds:
        header.metadata.ignore_prefix(f"{header.architecture}.expert_")
    else:
        config |= _routed(header)
        key = "expert_shared_feed_forward_length"
        config["moe_shared_expert_intermediate_size"] = header.integer(key)
        config["moe_latent_size"] = header.integer("moe_latent_size", 0, least=0) or None
    return config


def _kind_of_block(header: Header, block: int) -> str:
    for stem, kind in _KINDS_OF_NEMOTRON.items():
        if f"blk.{block}.{stem}.weight" in header.tensors:
            return kind
    raise header.metadata.error(f"has no mixer in block {block}")


def _lfm2(header: Header) -> Config:
    kv = header.per_block("attention.head_count_kv")
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if each else "conv" for each in kv],
        "conv_L_cache": header.integer("shortconv.l_cache"),
        "conv_bias": header.has_bias("shortconv.conv"),
        "block_auto_adjust_ff_dim": False,  # the file has the width that it comes to
        "rope_parameters": _rope(header),
    }


def _lfm2_moe(header: Header) -> Config:
    return {
        **_lfm2(header),
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": header.integer("leading_dense_block_count", 0, least=0),
        "use_expert_bias": any("exp_probs_b" in each for each in header.tensors),
        "routed_scaling_factor": 1.0,
        **_experts(header, normed=True, gating=_SIGMOID),
    }


def _olmo2(header: Header) -> Config:
    rope = _rope(header)
    config: Config = {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": rope,
    }
    if header.has("attention.sliding_window"):
        local = header.number("rope.freq_base_swa", rope["rope_theta"])
        config |= {
            "model_type": "olmo3",
            "architectures": ["Olmo3ForCausalLM"],
            **_windows(header),
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
    return config


def _seed_oss(header: Header) -> Config:
    return {
        "model_type": "seed_oss",
        "architectures": ["SeedOssForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "attention_out_bias": header.has_bias("attn_output"),
        "mlp_bias": header.has_bias("ffn_up"),
        "rope_parameters": _rope(header),
    }


def _exaone4(header: Header) -> Config:
    config = {
        "model_type": "exaone4",
        "architectures": ["Exaone4ForCausalLM"],
        "hidden_act": "silu",
        "rope_parameters": _rope(header),
    }
    if header.has("attention.sliding_window"):
        return config | _windows(header)
    layers = ["full_attention"] * header.num_blocks
    return config | {"sliding_window": None, "layer_types": layers}


def _cohere2(header: Header) -> Config:
    return {
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "logit_scale": header.number("logit_scale"),
        **_windows(header),
        "rope_parameters": _rope(header),
    }


def _starcoder2(header: Header) -> Config:
    return {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": header.has_bias(),
        "sliding_window": _WINDOW_OF_STARCODER_2,
        "rope_parameters": _rope(header),
    }


def _ernie4_5(header: Header) -> Config:
    return {
        "model_type": "ernie4_5",
        "architectures": ["Ernie4_5ForCausalLM"],
        "hidden_act": "silu",
        "use_bias": header.has_bias(),
        "rope_parameters": _rope(header),
    }


def _ernie4_5_moe(header: Header) -> Config:
    experts = _experts(header, normed=True, count="moe_num_experts")
    shared = header.integer("expert_shared_count", 0, least=0)
    width = experts["moe_intermediate_size"] * shared
    header.require("expert_shared_feed_forward_length", width)
    return {
        **_ernie4_5(header),
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        **experts,
        "moe_k": experts["num_experts_per_tok"],
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": header.integer("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": header.integer("interleave_moe_layer_step"),
    }


def _hunyuan(header: Header) -> Config:
    """Its base is scaled by the converter."""
    return {
        "model_type": "hunyuan_v1_dense",
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "rope_parameters": _rope(header),
    }


def _hunyuan_moe(header: Header) -> Config:
    width = header.integer("feed_forward_length")
    header.require("expert_feed_forward_length", width)
    header.require("expert_shared_feed_forward_length", width)
    header.require("expert_shared_count", 1)
    experts = _experts(header, normed=True)
    return {
        **_hunyuan(header),
        "model_type": "hunyuan_v1_moe",
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        **experts,
        "moe_topk": experts["num_experts_per_tok"],
    }


def _minimax_m2(header: Header) -> Config:
    header.require("expert_feed_forward_length", header.integer("feed_forward_length"))
    return {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "hidden_act": "silu",
        **_experts(header, normed=True, gating=_SIGMOID, count="num_local_experts"),
        "rope_parameters": _partial_rope(header),
    }


def _smollm3(header: Header) -> Config:
    layers = range(1, header.integer("block_count") + 1)
    return {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": header.has_bias(),
        "mlp_bias": False,
        "use_sliding_window": False,
        "no_rope_layers": [int(layer % 4 != 0) for layer in layers],  # in llama.cpp's code
        "no_rope_layer_interval": 4,
        "rope_parameters": _rope(header),
    }


def _windows(header: Header, every: int = 4) -> Config:
    """Sliding windows, but in every so manieth layer where the file does not name them."""
    named = header.metadata.flags(f"{header.architecture}.attention.sliding_window_pattern")
    layers = range(1, header.num_blocks + 1)
    slides = named or [layer % every != 0 for layer in layers]
    return {
        "sliding_window": header.integer("attention.sliding_window"),
        "layer_types": [_kind(is_full=not each) for each, _ in zip(slides, layers, strict=False)],
    }


def _partial_rope(header: Header) -> Config:
    """The rope_parameters where a part of each head is rotated."""
    head_dim = _head_dim(header)
    rotated = header.integer("rope.dimension_count", head_dim)
    return _rope(header, rotated=rotated) | {"partial_rotary_factor": rotated / head_dim}


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
    header.ignore("rope.scaling.finetuned")
    header.require("rope.scaling.attn_factor", 1.0)
    header.require("rope.scaling.yarn_ext_factor", 1.0)
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    if kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": header.integer(
                "rope.scaling.original_context_length"
            ),
        }
        for ours, key in _OF_YARN.items():
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
    if kind != "yarn":  # of no effect on others
        header.ignore("rope.scaling.original_context_length")
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
    "mistral3": _mistral3,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3vl": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3vlmoe": _qwen3_moe,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "ernie4_5": _ernie4_5,
    "ernie4_5-moe": _ernie4_5_moe,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax_m2,
}
"""The served architectures by the names that files have for them."""
