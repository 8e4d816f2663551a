"""Writes GGUF files of tiny random models, as llama.cpp's converter would.

Names are those of the package `gguf`, and so are quantisation and its inverse. The model is left
with the weights that the file means, so `generate` of transformers is the oracle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import slipstream.demo_model

Arrays = dict[str, np.ndarray]

SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Sizes that blocks of 256 divide."""
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "norm_topk_prob": True}
NO_HEAD_DIM = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + 0.1 * at for at in range(12)],
    "long_factor": [2 + 0.5 * at for at in range(12)],
    "original_max_position_embeddings": 256,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
OF_EXPERTS = {**EXPERTS, "moe_intermediate_size": 64}
ROUTED = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
SHARED = {"shared_expert_intermediate_size": 48}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
TWO_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
NEMOTRON = {
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-6,
}
SCALED = {
    "mlp_multipliers": [0.8, 0.6],
    "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "attention_in_multiplier": 1.1,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 1.5,
}
CONVOLVED = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-6,
    **NO_HEAD_DIM,
}
HEADS_OF_GEMMA = {
    "query_pre_attn_scalar": 32,
    "sliding_window": 9,
    "tie_word_embeddings": False,  # tied ones of random weights repeat the last token
}
GEMMA_4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "head_dim": 16,
    "global_head_dim": 32,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {}),
    "llama with biases": ("llama", "LlamaConfig", {"attention_bias": True}),
    "llama 3.1": (
        "llama",
        "LlamaConfig",
        {"rope_parameters": LLAMA_3, "tie_word_embeddings": True},
    ),
    "llama linear": (
        "llama",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "mistral": ("llama", "MistralConfig", {"sliding_window": 7}),
    "qwen2": ("qwen2", "Qwen2Config", {**NO_HEAD_DIM, "tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", "Qwen2Config", {**NO_HEAD_DIM, "rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3Config", {}),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        {
            **HEADS_OF_GEMMA,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {
            **HEADS_OF_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma4": (
        "gemma4",
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 331,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4 with experts": (
        "gemma4",
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3": ("phi3", "Phi3Config", {**NO_HEAD_DIM, "sliding_window": 11}),
    "phi3 longrope": (
        "phi3",
        "Phi3Config",
        {
            **NO_HEAD_DIM,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
        },
    ),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", {**EXPERTS, "moe_intermediate_size": 64}),
    "gpt-oss": (
        "gpt-oss",
        "GptOssConfig",
        {
            "sliding_window": 11,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                **YARN,
                "rope_theta": 150_000.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "glm4": ("glm4", "Glm4Config", {}),
    "granite": (
        "granite",
        "GraniteConfig",
        {
            **NO_HEAD_DIM,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("olmo2", "Olmo2Config", NO_HEAD_DIM),
    "smollm3": ("smollm3", "SmolLM3Config", {**NO_HEAD_DIM, "num_hidden_layers": 4}),
    "mixtral": ("llama", "MixtralConfig", {**TWO_EXPERTS, "sliding_window": None}),
    "ministral": (
        "mistral3",
        "Ministral3Config",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral 3.1": ("mistral3", "MistralConfig", {"sliding_window": None}),
    "qwen2vl": ("qwen2vl", "Qwen2Config", NO_HEAD_DIM),
    "qwen3vl": ("qwen3vl", "Qwen3Config", {}),
    "qwen2moe": ("qwen2moe", "Qwen2MoeConfig", {**OF_EXPERTS, **SHARED, "norm_topk_prob": False}),
    "qwen3next": ("qwen3next", "Qwen3NextConfig", {**OF_EXPERTS, **SHARED, **DELTA_NET}),
    "qwen35": (
        "qwen35",
        "Qwen3_5TextConfig",
        {
            **DELTA_NET,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen35moe": ("qwen35moe", "Qwen3_5MoeTextConfig", {**OF_EXPERTS, **SHARED, **DELTA_NET}),
    "glm4moe": (
        "glm4moe",
        "Glm4MoeConfig",
        {**ROUTED, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek2": (
        "deepseek2",
        "DeepseekV3Config",
        {
            **ROUTED,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "granitemoe": (
        "granitemoe",
        "GraniteMoeSharedConfig",
        {**NO_HEAD_DIM, **MULTIPLIERS, **TWO_EXPERTS, "shared_intermediate_size": 48},
    ),
    "granitehybrid": (
        "granitehybrid",
        "GraniteMoeHybridConfig",
        {
            **NO_HEAD_DIM,
            **MULTIPLIERS,
            **MAMBA,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "nope",
        },
    ),
    "granitehybrid with experts": (
        "granitehybrid",
        "GraniteMoeHybridConfig",
        {
            **NO_HEAD_DIM,
            **MULTIPLIERS,
            **MAMBA,
            **TWO_EXPERTS,
            "shared_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1": (
        "falcon-h1",
        "FalconH1Config",
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHConfig",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "NemotronHConfig",
        {
            **NEMOTRON,
            **ROUTED,
            "moe_shared_expert_intermediate_size": 48,
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
        },
    ),
    "lfm2": ("lfm2", "Lfm2Config", {**CONVOLVED, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": (
        "lfm2moe",
        "Lfm2MoeConfig",
        {
            **CONVOLVED,
            **OF_EXPERTS,
            "num_dense_layers": 1,
            "use_expert_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "olmo3": (
        "olmo2",
        "Olmo3Config",
        {
            **NO_HEAD_DIM,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "seed_oss": ("seed_oss", "SeedOssConfig", {"attention_bias": True}),
    "exaone4": (
        "exaone4",
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4 with windows": (
        "exaone4",
        "Exaone4Config",
        {"sliding_window": 9, "num_hidden_layers": 4, "rope_parameters": LLAMA_3},
    ),
    "cohere2": (
        "cohere2",
        "Cohere2Config",
        {
            **NO_HEAD_DIM,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "logit_scale": 0.3,
            "layer_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2Config",
        {
            **NO_HEAD_DIM,
            "norm_epsilon": 1e-6,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": ("ernie4_5", "Ernie4_5Config", {}),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "Ernie4_5_MoeConfig",
        {
            "num_hidden_layers": 3,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan-dense": ("hunyuan-dense", "HunYuanDenseV1Config", {}),
    "hunyuan-moe": ("hunyuan-moe", "HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2}),
    "minimax-m2": (
        "minimax-m2",
        "MiniMaxM2Config",
        {
            **TWO_EXPERTS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}
"""By a name for tests: the architecture, transformers' configuration, and what differs in it."""

QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "IQ4_NL")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Of 256 values, whose factors or codes take more bits in memory than in a file."""
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Whose codes stand for several values."""
TYPES = ("F32", "F16", "BF16", *QUANTISED, *K_QUANTS, *GRIDS)
_RANDOM = (*K_QUANTS, *GRIDS, "IQ4_NL")  # which the package cannot make, only read
# where their half-precision scales and offsets are, and how large: values around 0, as weights are
_HALVES_AT = {
    "Q2_K": {80: 8e-3, 82: 1.5 * 8e-3},
    "Q3_K": {108: 8e-4},
    "IQ4_XS": {0: 5e-5},
    **{kind: {0: 3e-3} for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S")},
    "IQ3_XXS": {0: 1e-3},
    "IQ3_S": {0: 1e-3},
    "Q4_K": {0: 8e-4, 2: 7.5 * 8e-4},
    "Q5_K": {0: 4e-4, 2: 15.5 * 4e-4},
    "Q6_K": {208: 1e-4},
    "IQ4_NL": {0: 2e-3},
}


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of a family."""
    _, name, differing = FAMILIES[family]
    made: PreTrainedConfig = getattr(transformers, name)(**{**SMALL, **differing, **changes})
    return made


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of random weights; norms differ from 1, so that a wrong one is seen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in weights_of(model).items():
            if name.endswith("A_log"):
                weight.uniform_(-2, 2)
            elif weight.ndim == 1 or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
            elif not weight.any():  # a router's
                weight.normal_(0, 0.15)
    return model.eval()


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint has of a model: tied ones once, and buffers that it keeps."""
    kept = model.state_dict().keys()
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    return dict(model.named_parameters()) | buffers


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Write a model whose matrices are of type `kind`, and give it the weights that it then has.

    extra: writes more metadata, by default a small byte-level tokenizer.
    """
    architecture = FAMILIES[family][0]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    _write_settings(writer, model.config, architecture)
    (extra or write_tokenizer)(writer)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        model.config.num_hidden_layers,
    )
    random = np.random.default_rng(5)
    with torch.no_grad():
        for name, parameter in weights_of(model).items():
            arrays, back = _converted(model.config, architecture, name, parameter.numpy())
            meant: Arrays = {}
            for own, array in arrays.items():
                full = in_file(names, architecture, own)
                meant[own] = _write(writer, full, array, kind, random)
            value = np.ascontiguousarray(back(meant)).reshape(parameter.shape)
            parameter.copy_(torch.from_numpy(value))
    for name, values in _rope_tensors(model.config, architecture).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_file(names: gguf.TensorNameMap, architecture: str, own: str) -> str:
    """The name of a tensor in a file, by the package, which knows those of checkpoints."""
    for theirs, of_checkpoints in _SPELLED.items():
        own = own.replace(theirs, of_checkpoints)
    if architecture.startswith("nemotron") and ".experts." not in own:
        own = own.replace("model.layers.", "backbone.layers.")
    base, _, suffix = own.rpartition(".")
    found = names.get_name(base)
    if found is None:
        found = names.get_name(own)  # without a suffix in files, too
        assert found is not None, own
        return str(found)
    return f"{found}.{suffix}"


_SPELLED = {
    "layer_scalar": "layer_scalar.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "router.weight": "router.layer.weight",
    "mlp.router.layer.weight": "mlp.router.weight",  # GPT-OSS's
    "mlp.gate.moe_statics": "mlp.moe_statics",
    "dt_bias": "dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "mlp.e_score_correction.bias": "block_sparse_moe.e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
}


def _write(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str, random: np.random.Generator
) -> np.ndarray:
    """Write a tensor; returns its values as the file has them."""
    qtype = gguf.GGMLQuantizationType[kind]
    is_plain = array.ndim < 2 or kind == "F32" or name.endswith("bias")
    if is_plain or array.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0]:
        array = np.ascontiguousarray(array, np.float32)
        writer.add_tensor(name, array)
        return array
    raw = random_blocks(kind, array, random) if kind in _RANDOM else _quantised(array, qtype)
    writer.add_tensor(name, raw, raw_dtype=qtype)
    return dequantised(raw, qtype).reshape(array.shape)


def _quantised(array: np.ndarray, qtype: gguf.GGMLQuantizationType) -> np.ndarray:
    if qtype == gguf.GGMLQuantizationType.F16:
        return array.astype(np.float16)
    rows = np.ascontiguousarray(array.reshape(-1, array.shape[-1]))
    raw = gguf.quants.quantize(rows, qtype)
    return raw.reshape(*array.shape[:-1], -1)


def dequantised(raw: np.ndarray, qtype: gguf.GGMLQuantizationType) -> np.ndarray:
    """What blocks mean, by the package."""
    if qtype == gguf.GGMLQuantizationType.F16:
        return raw.astype(np.float32)
    return gguf.quants.dequantize(raw.reshape(-1, raw.shape[-1]), qtype)


def random_blocks(kind: str, like: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Blocks of random bits for a matrix of that shape, whose scales are small."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = (*like.shape[:-1], like.shape[-1] // block)
    raw = random.integers(0, 256, (*shape, block_bytes), dtype=np.uint8)
    for at, size in _HALVES_AT[kind].items():
        scales = random.uniform(0.9, 1.1, shape) * size
        raw[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(*like.shape[:-1], -1)


_HALVED = ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3")
_HALVED += ("nemotron_h", "nemotron_h_moe")
_PLUS_ONE = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")


def _converted(
    config: PreTrainedConfig, architecture: str, name: str, array: np.ndarray
) -> tuple[Arrays, Callable[[Arrays], np.ndarray]]:
    """A parameter's tensors by names of the checkpoint, and the way back."""
    shape, last = array.shape, name.rpartition("model.layers.")[2].partition(".")[2]
    if architecture in _HALVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        paired = array.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)

        def unpaired(meant: Arrays) -> np.ndarray:
            return meant[name].reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)

        return {name: paired}, unpaired
    if architecture in _PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: array + np.float32(1)}, lambda meant: meant[name] - np.float32(1)
    if name.endswith("sinks"):
        return {f"{name}.weight": array}, lambda meant: meant[f"{name}.weight"]
    if last.startswith("linear_attn.") and "norm" not in name:
        return _of_delta_net(config, architecture, name, array)
    if name.endswith("A_log"):
        return {name: -np.exp(array)[:, None]}, lambda meant: _logarithm(meant[name])
    if name.endswith((".D", "conv1d.weight", "conv.conv.weight")):
        squeezed = array[:, None] if array.ndim == 1 else array.squeeze(1)
        return {name: squeezed}, lambda meant: meant[name]
    if last in ("mamba.norm.weight", "mixer.norm.weight"):
        return {name: array.reshape(2, -1)}, lambda meant: meant[name]
    if "shared_expert_gate" in name and architecture != "qwen2moe":
        return {name: array[0]}, lambda meant: meant[name]  # as quantised files have it
    if "kv_b_proj" in name:
        heads = array.reshape(config.num_attention_heads, -1, shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        k, v = (name.replace("kv_b_proj", each) for each in ("k_b_proj", "v_b_proj"))
        return {k: keys.swapaxes(1, 2), v: values}, lambda meant: np.concatenate(
            [meant[k].swapaxes(1, 2), meant[v]], axis=1
        )
    if "shared_mlp.input_linear" in name or "shared_mlp.output_linear" in name:
        return _of_granite(config, architecture, name, array)
    if ".experts." not in name:
        return {name: array}, lambda meant: meant[name]
    if architecture == "gemma4":
        return {f"{name}.weight": array}, lambda meant: meant[f"{name}.weight"]
    block = name.partition(".layers.")[2].partition(".")[0]
    name = f"model.layers.{block}.mlp.experts.{name.rpartition('.experts.')[2]}"
    if ".up_proj" in name or (architecture.startswith("nemotron") and "down_proj" in name):
        return {f"{name}.weight": array}, lambda meant: meant[f"{name}.weight"]
    base = name.replace("gate_up_proj", "{}").replace("down_proj", "{}").replace("_bias", "")
    suffix = "bias" if name.endswith("_bias") else "weight"
    gate, up, down = (
        f"{base.format(each)}.{suffix}" for each in ("gate_proj", "up_proj", "down_proj")
    )
    turn = (
        (lambda each: each.swapaxes(1, 2) if each.ndim == 3 else each)
        if architecture == "gpt-oss"
        else (lambda each: each)
    )
    array = turn(array)
    if "down_proj" in name:
        return {down: array}, lambda meant: turn(meant[down])
    if architecture == "gpt-oss":

        def woven(meant: Arrays) -> np.ndarray:
            both = np.empty_like(array)
            both[:, ::2], both[:, 1::2] = meant[gate], meant[up]
            return turn(both)

        return {gate: array[:, ::2], up: array[:, 1::2]}, woven
    half = array.shape[1] // 2
    parts = {gate: array[:, :half], up: array[:, half:]}
    return parts, lambda meant: np.concatenate([meant[gate], meant[up]], axis=1)


def _logarithm(decay: np.ndarray) -> np.ndarray:
    return np.log(-decay.astype(np.float64)).astype(np.float32)


def _of_delta_net(
    config: PreTrainedConfig, architecture: str, name: str, array: np.ndarray
) -> tuple[Arrays, Callable[[Arrays], np.ndarray]]:
    """Qwen3-Next's and Qwen3.5's, of which the latter has value heads in another order."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width = keys * config.linear_key_head_dim
    if "in_proj_qkvz" in name:
        own, size = config.linear_key_head_dim, len(array) // keys
        of_values = (size - 2 * own) // 2
        ends = [own, 2 * own, 2 * own + of_values]
        parts = np.split(array.reshape(keys, size, -1), ends, axis=1)
        q, k, v, z = (each.reshape(-1, array.shape[1]) for each in parts)
        qkv, gate = (name.replace("qkvz", each) for each in ("qkv", "z"))

        def woven(meant: Arrays) -> np.ndarray:
            three = np.split(meant[qkv], [width, 2 * width])
            all_four = [each.reshape(keys, -1, array.shape[1]) for each in (*three, meant[gate])]
            return np.concatenate(all_four, axis=1)

        return {qkv: np.concatenate([q, k, v]), gate: z}, woven
    array = array.squeeze(1) if "conv1d" in name else array
    axis = 1 if "out_proj" in name else 0
    behind = 2 * width if "in_proj_qkv" in name or "conv1d" in name else 0
    heads = (keys, values // keys) if architecture != "qwen3next" else (1, 1)

    def turn(each: np.ndarray) -> np.ndarray:
        return _regrouped(each, axis, behind, heads)

    def back(each: np.ndarray) -> np.ndarray:
        return _regrouped(each, axis, behind, heads[::-1])

    if name.endswith("A_log"):
        return {name: turn(-np.exp(array))}, lambda meant: back(_logarithm(meant[name]))
    return {name: turn(array)}, lambda meant: back(meant[name])


def _regrouped(array: np.ndarray, axis: int, behind: int, heads: tuple[int, int]) -> np.ndarray:
    """Heads [a, b] as [b, a] along an axis, but for what is before them."""
    moved = np.moveaxis(array, axis, 0)
    rest = moved[behind:]
    turned = rest.reshape(*heads, -1, *rest.shape[1:]).swapaxes(0, 1).reshape(rest.shape)
    return np.moveaxis(np.concatenate([moved[:behind], turned]), 0, axis)


def _of_granite(
    config: PreTrainedConfig, architecture: str, name: str, array: np.ndarray
) -> tuple[Arrays, Callable[[Arrays], np.ndarray]]:
    """The expert that all tokens share, or, where there are no others, the whole MLP."""
    if config.num_local_experts and "output_linear" in name:
        return {name: array}, lambda meant: meant[name]
    within = "mlp.shared_experts" if config.num_local_experts else "mlp"
    block = name.partition(".layers.")[2].partition(".")[0]
    gate, up, down = (
        f"model.layers.{block}.{within}.{each}_proj.weight" for each in ("gate", "up", "down")
    )
    if "output_linear" in name:
        return {down: array}, lambda meant: meant[down]
    halves = np.split(array, 2)
    return dict(zip((gate, up), halves, strict=True)), lambda meant: np.concatenate(
        [meant[gate], meant[up]]
    )


def _write_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if architecture == "gemma4":
        _write_gemma_4(writer, config)
    elif architecture.startswith("nemotron"):
        kinds = config.layers_block_type
        writer.add_feed_forward_length(
            [config.intermediate_size * (each in ("mlp", "moe")) for each in kinds]
        )
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe"):
        writer.add_head_count_kv(
            [config.num_key_value_heads * (each == "full_attention") for each in kinds]
        )
    elif architecture != "gemma4":
        heads = 1 if architecture == "deepseek2" else config.num_key_value_heads
        writer.add_head_count_kv(heads)
    if architecture in ("cohere2", "starcoder2"):
        writer.add_layer_norm_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture.startswith("nemotron"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    first = config.per_layer_config[0] if architecture == "gemma4" else config
    head_dim = getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture == "deepseek2":
        _write_latent_settings(writer, config)
    elif architecture != "gemma4" and head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in _HALVED:
        writer.add_vocab_size(config.vocab_size)
    whole = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    rope = whole.get("full_attention", whole)
    writer.add_rope_freq_base(rope["rope_theta"])
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if architecture in _HALVED or (architecture != "gemma4" and "partial_rotary_factor" in rope):
        writer.add_rope_dimension_count(rotated)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if (factor := rope.get("attention_factor")) is not None:
            writer.add_rope_scaling_yarn_attn_factor(factor)
    elif rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original))
        writer.add_rope_scaling_attn_factors(factor)
        writer.add_rope_scaling_orig_ctx_len(original)
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        if rope["rope_type"] == "default":
            writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    elif architecture != "starcoder2" and (window := getattr(config, "sliding_window", None)):
        writer.add_sliding_window(window)
        if architecture in ("olmo2", "exaone4", "gemma4"):
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in kinds])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if (count := _num_experts(config)) is not None and architecture != "nemotron_h":
        writer.add_expert_count(count)
        writer.add_expert_used_count(
            config.top_k_experts if architecture == "gemma4" else config.num_experts_per_tok
        )
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        if not architecture.startswith(("llama", "granite")):
            writer.add_expert_feed_forward_length(width)
    _write_more_settings(writer, config, architecture)
    if architecture.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _num_experts(config: Any) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next(
        (found for each in names if (found := getattr(config, each, None)) is not None), None
    )


def _write_gemma_4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Whose blocks differ in heads, keys and widths."""
    kinds, shared = config.layer_types, config.num_kv_shared_layers
    first = len(kinds) - shared
    wide = 1 + config.use_double_wide_mlp
    writer.add_feed_forward_length(
        [config.intermediate_size * (wide if at >= first else 1) for at in range(len(kinds))]
    )
    each = [config.per_layer_config[at] for at in range(len(kinds))]
    writer.add_head_count_kv([one.num_key_value_heads for one in each])
    whole = each[kinds.index("full_attention")].head_dim
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(whole)
    for add in (
        writer.add_key_length_swa,
        writer.add_value_length_swa,
        writer.add_rope_dimension_count_swa,
    ):
        add(each[0].head_dim)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    writer.add_rope_freq_base_swa(local)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_latent_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of latent attention, as one head for all."""
    rotated, latent = config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_rope_dimension_count(rotated)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _write_more_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """What few architectures have."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture.startswith(("qwen2vl", "qwen3vl")):
        writer.add_rope_dimension_sections([8, 4, 4, 0])
    if architecture == "qwen3vl":
        writer.add_num_deepstack_layers(3)
    if (width := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(width)
    if architecture in ("glm4moe", "deepseek2", "nemotron_h_moe"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if architecture in ("glm4moe", "deepseek2"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "nemotron_h_moe":
        width = config.moe_shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(width)
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        width = config.moe_intermediate_size * config.moe_num_shared_experts
        writer.add_expert_shared_feed_forward_length(width)
    if architecture == "hunyuan-moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)
    if architecture.startswith(("granitemoe", "granitehybrid")):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if architecture == "granitehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if architecture == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        inner = config.linear_value_head_dim * config.linear_num_value_heads
        writer.add_ssm_inner_size(inner)
        writer.add_full_attention_interval(4)
        if architecture != "qwen3next":
            sections = rope.get("mrope_section", [11, 11, 10])
            writer.add_rope_dimension_sections([*sections, 0])
    if architecture.startswith("nemotron"):
        _write_mamba(writer, config.conv_kernel, config.ssm_state_size, config.n_groups)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    elif architecture in ("granitehybrid", "falcon-h1"):
        _write_mamba(writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)


def _write_mamba(writer: gguf.GGUFWriter, kernel: int, state: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)


def _rope_tensors(config: Any, architecture: str) -> Arrays:
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture == "gemma4":
        return {"rope_freqs.weight": np.array([1] * 4 + [1e30] * 12, np.float32)}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{each}.weight": np.array(rope[f"{each}_factor"], np.float32)
            for each in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.head_dim
    divisors = []
    for freq in 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        length = 2 * math.pi / freq
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        if length < original / high:
            divisors.append(1.0)
        elif length > original / low:
            divisors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            divisors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def byte_tokens() -> list[str]:
    """The 256 tokens of single bytes, as byte-level vocabularies spell them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level tokenizer of 331 tokens, those of single bytes among them."""
    tokens = byte_tokens()
    merges = [f"{a} {b}" for a in "abcde" for b in "fghij"]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<|{at}|>" for at in range(SMALL["vocab_size"] - len(tokens))]
    types = [1 if not token.startswith("<|") else 3 for token in tokens]
    add_tokenizer(writer, "gpt2", "qwen2", tokens, types, merges=merges)
    writer.add_eos_token_id(len(tokens) - 1)


def add_tokenizer(
    writer: gguf.GGUFWriter,
    model: str,
    pre: str,
    tokens: Iterable[str],
    types: Iterable[int],
    *,
    merges: Iterable[str] | None = None,
    scores: Iterable[float] | None = None,
) -> None:
    """Write a vocabulary."""
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))


def demo_gguf(path: Path, kind: str = "BF16") -> Path:
    """The bundled demo model with its tokenizer and template."""
    folder = Path(slipstream.demo_model.MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    told = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(told["model"]["vocab"], key=told["model"]["vocab"].get)
    special = {each["id"] for each in told["added_tokens"]}
    types = [3 if token_id in special else 1 for token_id in range(len(tokens))]
    merges = [" ".join(merge) for merge in told["model"]["merges"]]

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, "gpt2", "gpt-2", tokens, types, merges=merges)
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(0)
        writer.add_pad_token_id(0)
        writer.add_chat_template((folder / "chat_template.jinja").read_text())

    return write_gguf(path, "llama", model, kind, extra=tokenizer)
