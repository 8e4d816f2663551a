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
HEADS_OF_GEMMA = {
    "query_pre_attn_scalar": 32,
    "sliding_window": 9,
    "tie_word_embeddings": False,  # tied ones of random weights repeat the last token
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
}
"""By a name for tests: the architecture, transformers' configuration, and what differs in it."""

QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "IQ4_NL")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
TYPES = ("F32", "F16", "BF16", *QUANTISED, *K_QUANTS)
_RANDOM = (*K_QUANTS, "IQ4_NL")  # which the package cannot make, only read
# where their half-precision scales and offsets are, and how large: values around 0, as weights are
_HALVES_AT = {
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
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


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
        for name, parameter in model.named_parameters():
            arrays, back = _converted(model.config, architecture, name, parameter.numpy())
            meant: Arrays = {}
            for own, array in arrays.items():
                base, _, suffix = own.rpartition(".")
                found = names.get_name(base)
                assert found is not None, own
                meant[own] = _write(writer, f"{found}.{suffix}", array, kind, random)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(back(meant))))
    for name, values in _rope_tensors(model.config, architecture).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def _converted(
    config: PreTrainedConfig, architecture: str, name: str, array: np.ndarray
) -> tuple[Arrays, Callable[[Arrays], np.ndarray]]:
    """A parameter's tensors by names of the checkpoint, and the way back."""
    if architecture in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        shape = array.shape
        paired = array.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)

        def unpaired(meant: Arrays) -> np.ndarray:
            return meant[name].reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)

        return {name: paired}, unpaired
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return {name: array + np.float32(1)}, lambda meant: meant[name] - np.float32(1)
    if name.endswith("sinks"):
        return {f"{name}.weight": array}, lambda meant: meant[f"{name}.weight"]
    if ".experts." not in name:
        return {name: array}, lambda meant: meant[name]
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


def _write_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in ("llama", "granite", "smollm3"):
        writer.add_vocab_size(config.vocab_size)
    whole = config.rope_parameters
    rope = whole.get("full_attention", whole)
    writer.add_rope_freq_base(rope["rope_theta"])
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if architecture in ("llama", "granite", "smollm3", "phi3", "glm4"):
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
    elif (window := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("qwen3moe", "gpt-oss"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        writer.add_expert_feed_forward_length(width)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _rope_tensors(config: Any, architecture: str) -> Arrays:
    rope = config.rope_parameters
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
