"""Tiny random models of many architectures, and their comparison with transformers. The list says
what is served token for token as `generate` would, what is refused, and why; the tests and the
table of architectures both read it here.

A model is built from a configuration of a few kilobytes, saved, loaded like any checkpoint, and run
by the engine's own scheduler, one step ahead. Weights are random but wide, so that greedy outputs
wander over the vocabulary instead of repeating one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from slipstream_core.model.loader import LoadedModel
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_lab.common.bare_loop import LoopRequest, drive

VOCAB_SIZE = 199
MAX_MODEL_LEN = 128  # tokens
BLOCK_SIZE = 4  # tokens
NUM_OUTPUTS = 24  # tokens of each request
PROMPT_LENS = (5, 23, 1, 41, 12)  # on both sides of the sliding windows and of a step's budget
WINDOW = 8  # tokens


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    name: str
    config_class: str  # transformers' class name
    options: dict[str, Any]  # its arguments
    refused: str | None = None  # part of the error text, if it is refused

    def config(self) -> transformers.PreTrainedConfig:
        """A fresh configuration."""
        config: transformers.PreTrainedConfig = getattr(transformers, self.config_class)(
            **self.options
        )
        return config


@dataclass(frozen=True, slots=True)
class ServingVariant:
    """A way of serving the same requests, which must not change their outputs."""

    name: str
    together: bool  # all requests at once, rather than one after another
    num_blocks: int
    max_num_batched_tokens: int
    is_cached: bool = False  # each request twice, with the prefix cache


ALONE = ServingVariant("alone", False, 200, 512)
CHUNKED = ServingVariant("chunked", True, 200, 16)  # no prompt but the shortest fits one step
# 5 requests of up to 65 tokens need 62 blocks: some are preempted
PREEMPTED = ServingVariant("preempted", True, 34, 20)
PACKED = ServingVariant("packed", True, 200, 512)  # all prompts in one step
CACHED = ServingVariant("cached", True, 200, 16, is_cached=True)
VARIANTS = (ALONE, CHUNKED, PREEMPTED)


def save(architecture: Architecture, folder: Path) -> None:
    """Save a checkpoint with random weights; for refused architectures only the configuration."""
    if architecture.refused is not None:
        architecture.config().save_pretrained(folder)
        return
    torch.manual_seed(0)
    model = _auto(architecture.config()).from_config(architecture.config(), dtype=torch.float32)
    with torch.no_grad():  # biases, sinks and norms are initialised to constants
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.min() == parameter.max():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)


def _auto(config: Any) -> Any:
    """The class of a configuration: a multimodal one has its own, which answers text, too."""
    is_plain = config.get_text_config() is config
    return AutoModelForCausalLM if is_plain else transformers.AutoModelForMultimodalLM


def prompts() -> list[list[int]]:
    """The prompts that every model answers."""
    rng = random.Random(1)  # noqa: S311  (test data)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENS]


def generate(folder: Path, **options: Any) -> list[list[int]]:
    """The output of transformers' `generate`, one prompt at a time.

    options: of `from_pretrained`.
    """
    auto = _auto(transformers.AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, attn_implementation="eager", **options).eval()
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_OUTPUTS,
            min_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """The engine's output."""

    outputs: list[list[int]]
    num_preemptions: int
    num_cached: int = 0  # tokens of prompts


def serve(
    model: LoadedModel,
    *variants: ServingVariant,
    make: Callable[..., TorchRunner] = TorchRunner,
    **options: Any,
) -> list[Served]:
    """Run the prompts with the engine's scheduler and runner, one step ahead.

    One runner, made with `options`, serves all variants: preparing the model takes as long as
    everything after it. make: its class, or what takes the same arguments.
    """
    options = {"kernel_config": KernelConfig(threads=1)} | options
    if model.states:
        options = {"num_snapshots": 4 * len(PROMPT_LENS)} | options
    runner = make(
        model,
        num_blocks=max(variant.num_blocks for variant in variants),
        block_size=BLOCK_SIZE,
        max_num_seqs=len(PROMPT_LENS),
        **options,
    )
    try:
        return [_serve_variant(runner, variant) for variant in variants]
    finally:
        runner.close()


def _serve_variant(runner: TorchRunner, variant: ServingVariant) -> Served:
    if variant.is_cached:
        twice = _serve_together(runner, variant, 2 * prompts())
        first, second = twice.outputs[: len(PROMPT_LENS)], twice.outputs[len(PROMPT_LENS) :]
        # what differs is shown as wrong
        same = [
            one if one == two else [-1] * len(one) for one, two in zip(first, second, strict=True)
        ]
        return Served(same, twice.num_preemptions, twice.num_cached)
    if variant.together:
        return _serve_together(runner, variant, prompts())
    alone = [_serve_together(runner, variant, [prompt]) for prompt in prompts()]
    return Served([served.outputs[0] for served in alone], 0)


def _serve_together(runner: TorchRunner, variant: ServingVariant, some: list[list[int]]) -> Served:
    requests = [LoopRequest(np.array(prompt, np.uint32), NUM_OUTPUTS) for prompt in some]
    driven = drive(
        runner,
        requests,
        budget=variant.max_num_batched_tokens,
        num_blocks=variant.num_blocks,
        is_cached=variant.is_cached,
    )
    outputs = [output.token_ids for output in driven.outputs]
    return Served(outputs, driven.num_preemptions, driven.num_cached)


def num_equal(outputs: list[list[int]], expected: list[list[int]]) -> int:
    """The number of equal tokens, position by position."""
    pairs = zip(outputs, expected, strict=True)
    return sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # with tied embeddings a wide random model repeats its input
}


def _served(name: str, config_class: str, **options: Any) -> Architecture:
    return Architecture(name, config_class, _BASE | options)


def _refused(name: str, config_class: str, reason: str, **options: Any) -> Architecture:
    return Architecture(name, config_class, {"vocab_size": VOCAB_SIZE} | options, refused=reason)


_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TWO_BY_TWO: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_PARTLY_ROTARY: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_DEEPSEEK = {
    **_MOE,
    **_LATENT,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_INDEXER = {"index_topk": MAX_MODEL_LEN, "index_n_heads": 2, "index_head_dim": 16}
_INDEXED: dict[str, Any] = {
    **_MOE,
    **_LATENT,
    **_INDEXER,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
_NOT_REPLACEABLE = "does not allow its attention to be replaced"


def _rope(rope_type: str, **options: float) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0} | options


_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 1,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": 190,
    "video_token_id": 191,
    "vision_start_token_id": 192,
    "vision_end_token_id": 193,
}


def _tower(
    name: str,
    config_class: str,
    *vision: str,
    text: dict[str, Any] | None = None,
    **options: Any,
) -> Architecture:
    """A multimodal model, served as text. vision: the numbers that its tower's class takes."""
    tower = {each: _VISION[each] for each in vision}
    given = {"text_config": _BASE | (text or {}), "vision_config": tower, **options}
    return Architecture(name, config_class, given | {"tie_word_embeddings": False})


_SIGLIP = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "patch_size",
    "image_size",
)
_QWEN_VISION = (
    "hidden_size",
    "intermediate_size",
    "depth",
    "num_heads",
    "patch_size",
    "out_hidden_size",
)
_DOTS_VISION = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "patch_size",
)
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


ARCHITECTURES: tuple[Architecture, ...] = (
    _served("Llama", "LlamaConfig"),
    _served(
        "Llama, llama3 rope",
        "LlamaConfig",
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    _served("Llama, tied embeddings", "LlamaConfig", tie_word_embeddings=True),
    _served("Qwen2", "Qwen2Config"),
    _served(
        "Qwen2, sliding window",
        "Qwen2Config",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    _served("Qwen2-MoE", "Qwen2MoeConfig", **_MOE, num_experts=4),
    _served("Qwen3", "Qwen3Config", head_dim=32),
    _served(
        "Qwen3, YaRN rope",
        "Qwen3Config",
        head_dim=16,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    _served("Qwen3-MoE", "Qwen3MoeConfig", **_MOE, head_dim=16, num_experts=8),
    _served("Mistral, sliding window", "MistralConfig", sliding_window=WINDOW),
    _served("Ministral, sliding window", "MinistralConfig", head_dim=16, sliding_window=WINDOW),
    _served("Mixtral", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    _served("Gemma", "GemmaConfig", head_dim=16),
    _served(
        "Gemma 2",
        "Gemma2Config",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
    ),
    _served(
        "Gemma 3",
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        **_TWO_BY_TWO,
    ),
    _served("Phi", "PhiConfig", **_PARTLY_ROTARY),
    _served("Phi-3", "Phi3Config", sliding_window=WINDOW),
    _served("Phi-3.5-MoE", "PhimoeConfig", num_local_experts=4, num_experts_per_tok=2),
    _served("GPT-2", "GPT2Config", n_positions=MAX_MODEL_LEN, initializer_range=0.4),
    _served("GPT-BigCode", "GPTBigCodeConfig", n_positions=MAX_MODEL_LEN, initializer_range=0.4),
    _served("GPT-NeoX", "GPTNeoXConfig"),
    _served(
        "GPT-OSS",
        "GptOssConfig",
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_rope("default"),
    ),
    _served("OPT", "OPTConfig", ffn_dim=128, word_embed_proj_dim=64, init_std=0.4),
    _served("StarCoder2, sliding window", "Starcoder2Config", sliding_window=WINDOW),
    _served("Granite", "GraniteConfig", attention_multiplier=0.2),
    _served("Granite-MoE", "GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    _served("Cohere", "CohereConfig"),
    _served("Cohere, normed heads", "CohereConfig", use_qk_norm=True),
    _served("Cohere 2", "Cohere2Config", sliding_window=WINDOW),
    _served("OLMo", "OlmoConfig"),
    _served("OLMo 2", "Olmo2Config"),
    _served("OLMo 3", "Olmo3Config", sliding_window=WINDOW),
    _served("OLMoE", "OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    _served("DeepSeek V2 (MLA)", "DeepseekV2Config", **_DEEPSEEK),
    _served("DeepSeek V3 (MLA)", "DeepseekV3Config", **_DEEPSEEK),
    _served("MiniCPM3 (MLA)", "MiniCPM3Config", **_LATENT),
    _served("GLM", "GlmConfig", head_dim=16),
    _served("GLM-4", "Glm4Config", head_dim=16),
    _served(
        "GLM-4-MoE",
        "Glm4MoeConfig",
        **_MOE,
        head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    _served("GLM-4.7-Flash (MLA)", "Glm4MoeLiteConfig", **_DEEPSEEK),
    _served("SmolLM3", "SmolLM3Config"),
    _served("ERNIE 4.5", "Ernie4_5Config", head_dim=16),
    _served("EXAONE 4, sliding window", "Exaone4Config", sliding_window=WINDOW),
    _served("Seed-OSS", "SeedOssConfig", head_dim=16),
    _served(
        "Llama 4",
        "Llama4TextConfig",
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=4,
        attention_chunk_size=WINDOW,
        floor_scale=11,
        attn_scale=9.0,
        no_rope_layers=[0, 1, 0, 1],  # a scaled query reaches later keys
    ),
    _served("Hunyuan", "HunYuanDenseV1Config", head_dim=16),
    _served(
        "MiniMax-M2", "MiniMaxM2Config", head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    _served("Arcee", "ArceeConfig"),
    _served("Apertus", "ApertusConfig"),
    _served("Helium", "HeliumConfig", head_dim=16),
    _tower(
        "Gemma 3, as text",
        "Gemma3Config",
        *_SIGLIP,
        text={"head_dim": 16, "sliding_window": WINDOW, **_TWO_BY_TWO},
        image_token_index=190,
        boi_token_index=191,
        eoi_token_index=192,
        mm_tokens_per_image=4,
    ),
    _tower(
        "Gemma 4, as text",
        "Gemma4Config",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "patch_size",
        text={
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        audio_config=None,
        image_token_id=190,
    ),
    _tower(
        "Mistral 3, as text",
        "Mistral3Config",
        *_SIGLIP,
        text={"model_type": "mistral", "head_dim": 16},
        image_token_index=190,
    ),
    _tower(
        "Qwen2-VL, as text",
        "Qwen2VLConfig",
        "depth",
        "num_heads",
        "patch_size",
        text={"rope_parameters": _MROPE},
        **_QWEN_TOKENS,
    ),
    _tower(
        "Qwen2.5-VL, as text",
        "Qwen2_5_VLConfig",
        *_QWEN_VISION,
        text={"rope_parameters": _MROPE},
        **_QWEN_TOKENS,
    ),
    _tower(
        "Qwen3-VL, as text",
        "Qwen3VLConfig",
        *_QWEN_VISION,
        "num_position_embeddings",
        "deepstack_visual_indexes",
        text={"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}},
        **_QWEN_TOKENS,
    ),
    _tower(
        "Qwen3-VL-MoE, as text",
        "Qwen3VLMoeConfig",
        *_QWEN_VISION,
        "num_position_embeddings",
        "deepstack_visual_indexes",
        text={
            **_MOE,
            "head_dim": 16,
            "num_experts": 8,
            "rope_parameters": _MROPE | {"mrope_interleaved": True},
        },
        **_QWEN_TOKENS,
    ),
    _tower(
        "LLaVA, as text",
        "LlavaConfig",
        *_SIGLIP,
        text={"model_type": "llama"},
        image_token_index=190,
    ),
    _refused("BLOOM", "BloomConfig", _NOT_REPLACEABLE, hidden_size=32, n_layer=2, n_head=4),
    _refused(
        "Falcon, ALiBi",
        "FalconConfig",
        _NOT_REPLACEABLE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
    ),
    _refused(
        "GPT-Neo",
        "GPTNeoConfig",
        _NOT_REPLACEABLE,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    ),
    _refused("MPT", "MptConfig", _NOT_REPLACEABLE, d_model=32, n_heads=4, n_layers=2),
    _refused(
        "DeepSeek V3.2",
        "DeepseekV32Config",
        "layers of type indexed_attention, which see 2048 tokens at most",
        **_MOE,
        **_LATENT,
    ),
    _refused("BERT", "BertConfig", "its attention is not causal", hidden_size=48),
    _refused("T5", "T5Config", "has an encoder"),
    _refused(
        "Phi-3.5-MoE, sliding window",
        "PhimoeConfig",
        "names a window of 8 tokens in its configuration and None to its attention",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        sliding_window=WINDOW,
    ),
)

# served as long as no request is longer than what the runner does not see
WITHIN_LIMITS: tuple[Architecture, ...] = (
    _served(
        "Llama 4, within its attention_chunk_size",
        "Llama4TextConfig",
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=4,
        max_position_embeddings=max(PROMPT_LENS) + NUM_OUTPUTS + 1,
        attention_chunk_size=MAX_MODEL_LEN,
        floor_scale=max(PROMPT_LENS) + NUM_OUTPUTS + 1,
        attn_scale=9.0,
        no_rope_layers=[0, 1, 0, 1],  # a scaled query reaches later keys
    ),
    _served(
        "DeepSeek V3.2, within its index_topk",
        "DeepseekV32Config",
        **_DEEPSEEK,
        **_INDEXER,
    ),
    _served(
        "GLM-5, within its index_topk",
        "GlmMoeDsaConfig",
        **_DEEPSEEK,
        **_INDEXER,
        indexer_types=["full", "shared"] * 2,
    ),
    _served(
        "A.X K2, within its index_topk",
        "AXK2Config",
        **_INDEXED,
        head_dim=8,
        gated_norm_rank=4,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
    ),
    _served(
        "MiniMax-M3, within its blocks",
        "MiniMaxM3VLTextConfig",
        head_dim=16,
        rotary_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        moe_layer_freq=[0, 1, 1, 1],
        sparse_attention_config={
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_block_size": 8,
            "sparse_topk_blocks": MAX_MODEL_LEN // 8,
            "sparse_attention_freq": [0, 1, 1, 1],
        },
    ),
    _served(
        "HY V4, within its index_topk",
        "HYV4Config",
        **_INDEXED,
        indexer_types=["full", "shared"] * 2,
    ),
    Architecture(
        "Dots 3, as text, within its index_topk",
        "Dots3NoteConfig",
        {
            "text_config": _BASE
            | _INDEXED
            | {
                "head_dim": 24,
                "shared_experts_intermediate_size": 32,
                "sliding_window": WINDOW,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 4,
                "swa_q_lora_rank": 32,
                "swa_kv_lora_rank": 16,
                "swa_head_dim": 24,
                "swa_qk_nope_head_dim": 16,
                "swa_v_head_dim": 12,
            },
            "vision_config": {each: _VISION[each] for each in _DOTS_VISION}
            | {
                "moe_intermediate_size": 16,
                "num_local_experts": 2,
                "mlp_layer_types": ["dense"],
                "adapter_in_dim": 32,
                "adapter_out_dim": 64,
            },
            "audio_config": {each: _VISION[each] for each in _DOTS_VISION[:4]}
            | {"adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 8},
            "image_token_id": 190,
            "video_token_id": 191,
            "audio_token_id": 192,
            "tie_word_embeddings": False,
        },
    ),
    _tower(
        "Mistral Large 4, as text, within its index_topk",
        "MistralLarge4Config",
        *_SIGLIP,
        text=_INDEXED | {"indexer_types": ["full", "shared"] * 2},
        image_token_index=190,
    ),
)

_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": _LINEAR,
}
_SHARED_MOE = _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 32}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_MAMBA_1: dict[str, Any] = {"state_size": 16, "time_step_rank": 8, "use_mambapy": False}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 16,
    "chunk_size": 16,
}
_SHORT_CONV: dict[str, Any] = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_PARTS_OF_MROPE = {
    "rope_parameters": _MROPE
    | {"mrope_interleaved": True, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
}

# Models of which some layers carry recurrent states. Many run as transformers has them, so they are
# slower to check.
HYBRIDS: tuple[Architecture, ...] = (
    _served("Qwen3-Next", "Qwen3NextConfig", **_GATED_DELTA, **_SHARED_MOE),
    _served("Qwen3.5", "Qwen3_5TextConfig", **_GATED_DELTA),
    _served("Qwen3.5-MoE", "Qwen3_5MoeTextConfig", **_GATED_DELTA, **_SHARED_MOE),
    _served("OLMo Hybrid", "OlmoHybridConfig", **_GATED_DELTA),
    _served(
        "Kimi Linear (MLA)",
        "KimiLinearConfig",
        **_MOE,
        **_LATENT | {"q_lora_rank": None},
        layer_types=_LINEAR,
        linear_num_heads=2,
        linear_head_dim=16,
        n_routed_experts=8,
        num_experts=8,
    ),
    _served("LFM2", "Lfm2Config", **_SHORT_CONV, block_multiple_of=32),
    _served("LFM2-MoE", "Lfm2MoeConfig", **_MOE, **_SHORT_CONV, num_experts=4),
    _served("LFM3", "Lfm3Config"),
    _served("Bamba", "BambaConfig", **_MAMBA_2, attn_layer_indices=[1, 3]),
    _served(
        "Granite 4-H",
        "GraniteMoeHybridConfig",
        **_MAMBA_2,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        position_embedding_type="nope",
    ),
    _served("Falcon-H1", "FalconH1Config", **_MAMBA_2, mamba_d_ssm=128),
    _served(
        "Nemotron-H",
        "NemotronHConfig",
        **_NEMOTRON,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
    ),
    _served(  # about half of the time steps are below the least one
        "Nemotron-H, limited",
        "NemotronHConfig",
        **_NEMOTRON,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        time_step_min=1.3,
    ),
    _served(
        "Nemotron-H, experts",
        "NemotronHConfig",
        **_NEMOTRON,
        **_MOE,
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
    ),
    _served("Mamba", "MambaConfig", **_MAMBA_1),
    _served("Falcon-Mamba", "FalconMambaConfig", **_MAMBA_1),
    _served(
        "Mamba 2",
        "Mamba2Config",
        num_heads=8,
        head_dim=16,
        n_groups=1,
        state_size=16,
        chunk_size=16,
    ),
    _served(
        "Jamba",
        "JambaConfig",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=16,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    _served(
        "Ling 2.5 (bailing_hybrid)",
        "BailingHybridConfig",
        **_DEEPSEEK,
        layer_types=_LINEAR,
        num_experts=4,
        head_dim=16,
    ),
    _tower(
        "Qwen3.5, as text",
        "Qwen3_5Config",
        *_QWEN_VISION,
        "num_position_embeddings",
        text=_GATED_DELTA | _PARTS_OF_MROPE,
        **_QWEN_TOKENS,
    ),
    _tower(
        "Qwen3.5-MoE, as text",
        "Qwen3_5MoeConfig",
        *_QWEN_VISION,
        "num_position_embeddings",
        text=_GATED_DELTA | _SHARED_MOE | _PARTS_OF_MROPE,
        **_QWEN_TOKENS,
    ),
    _tower(
        "LFM2-VL, as text",
        "Lfm2VlConfig",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "patch_size",
        text={"model_type": "lfm2", **_SHORT_CONV, "block_multiple_of": 32},
        image_token_id=190,
    ),
)

_GLM_VISION = ("depth", "hidden_size", "num_heads", "image_size", "patch_size", "intermediate_size")
_COMPASS_VISION = (*_QWEN_VISION, "num_position_embeddings", "deepstack_visual_indexes")
_SOUND: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": 64,
    "n_window": 4,
}
_OWN_KEYS: dict[str, Any] = {"num_key_value_heads": None, "intermediate_size": None}


def _glm_v(name: str, config_class: str, **text: Any) -> Architecture:
    """A GLM for images, served as text."""
    tower = {each: _VISION[each] for each in _GLM_VISION} | {"out_hidden_size": 128}
    rope = _MROPE | {"partial_rotary_factor": 0.5}
    tokens = dict.fromkeys(("video_start_token_id", "video_end_token_id"), 194)
    return Architecture(
        name,
        config_class,
        {
            "text_config": _BASE | {"hidden_size": 128, "rope_parameters": rope} | text,
            "vision_config": tower,
            "image_token_id": 190,
            "video_token_id": 191,
            "image_start_token_id": 192,
            "image_end_token_id": 193,
            "tie_word_embeddings": False,
            **tokens,
        },
    )


# Like others but for what a trial without weights has to know of ropes, experts, heads, states and
# calls of attention; they are compared with `generate` alone.
FURTHER: tuple[Architecture, ...] = (
    _served(
        "Llama, dynamic rope",
        "LlamaConfig",
        rope_parameters=_rope("dynamic", factor=2.0),
        max_position_embeddings=max(PROMPT_LENS) + NUM_OUTPUTS,  # changes beyond that
    ),
    _served(
        "Hunyuan, alpha rope",
        "HunYuanDenseV1Config",
        head_dim=16,
        rope_parameters=_rope("dynamic", factor=1.0, alpha=1000.0),
    ),
    Architecture(
        "DBRX",
        "DbrxConfig",
        {
            **dict.fromkeys(("num_key_value_heads", "eos_token_id"), None),
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": MAX_MODEL_LEN,
            "initializer_range": 0.15,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    _served(
        "LongCat-Flash (MLA)",
        "LongcatFlashConfig",
        **_LATENT,
        num_layers=2,  # each attends twice
        head_dim=8,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    _tower(
        "VideoLLaMA 3, as text",
        "VideoLlama3Config",
        *_SIGLIP[:-1],
        text={"model_type": "qwen2"},
        image_token_id=190,
        video_token_id=191,
    ),
    Architecture(
        "Step 3.7, as text",
        "Step3p7Config",
        {
            "text_config": _BASE
            | {
                "head_dim": 16,
                "sliding_window": WINDOW,
                "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
                "moe_layers_enum": "1,2,3",
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_intermediate_size": 32,
                "share_expert_dim": 32,
            },
            "vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 16}
            | {"patch_size": 4},
            "image_token_id": 190,
            "tie_word_embeddings": False,
        },
    ),
    _tower(
        "MiniCPM-V 4.6, as text",
        "MiniCPMV4_6Config",
        *_SIGLIP,
        text={"model_type": "qwen3_5_text"} | _GATED_DELTA | _PARTS_OF_MROPE,
        image_token_id=190,
        video_token_id=191,
    ),
    _served("StableLM", "StableLmConfig", **_PARTLY_ROTARY, use_qkv_bias=True),
    _served("StableLM, parallel", "StableLmConfig", qk_layernorm=True, use_parallel_residual=True),
    _served("Nemotron", "NemotronConfig", head_dim=16),
    Architecture(
        "GPT-J",
        "GPTJConfig",
        _BASE | _OWN_KEYS | {"n_positions": MAX_MODEL_LEN, "rotary_dim": 8},
    ),
    Architecture(
        "CodeGen",
        "CodeGenConfig",
        _BASE | _OWN_KEYS | {"n_positions": MAX_MODEL_LEN, "rotary_dim": 8},
    ),
    Architecture("Falcon", "FalconConfig", _BASE | _OWN_KEYS),
    Architecture(
        "Falcon, groups of heads",
        "FalconConfig",
        _BASE | _OWN_KEYS | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    _served("BioGPT", "BioGptConfig"),
    _served("DiffLlama", "DiffLlamaConfig"),  # a layer attends twice
    _served("HRM Text", "HrmTextConfig", head_dim=16, num_hidden_layers=2),  # 8 times
    _served("Hunyuan-MoE", "HunYuanMoEV1Config", head_dim=16, num_experts=4, moe_topk=2),
    _served(
        "Zaya",
        "ZayaConfig",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        router_hidden_size=16,
        initializer_range=0.4,
        sliding_window=WINDOW,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
    ),
    _served(
        "Zamba 2",
        "Zamba2Config",
        num_key_value_heads=4,
        attention_head_dim=32,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_mem_blocks=1,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        mamba_d_state=16,
    ),
    _glm_v("GLM-4.1V, as text", "Glm4vConfig"),
    _glm_v("GLM-4.6V, as text", "Glm46VConfig", model_type="glm4v_text"),
    _glm_v(
        "GLM-4.5V, as text",
        "Glm4vMoeConfig",
        **_MOE,
        head_dim=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    Architecture(
        "Hunyuan-VL, as text",
        "HunYuanVLConfig",
        {
            "text_config": _BASE
            | {
                "head_dim": 16,
                "rope_parameters": _rope("dynamic", factor=1.0, alpha=1000.0)
                | {"mrope_section": [2, 2, 2, 2]},
            },
            "vision_config": {each: _VISION[each] for each in _DOTS_VISION}
            | {"out_hidden_size": 64, "text_hidden_size": 64, "max_image_size": 16},
            "image_token_id": 190,
            "im_start_id": 191,
            "im_end_id": 192,
            "im_newline_id": 193,
            "tie_word_embeddings": False,
        },
    ),
    _tower(
        "Cohere Compass, as text",
        "CohereCompassConfig",
        *_COMPASS_VISION,
        text={
            **_TWO_BY_TWO,
            "sliding_window": WINDOW,
            "rope_parameters": dict.fromkeys(_TWO_BY_TWO["layer_types"], _MROPE),
        },
        **_QWEN_TOKENS,
    ),
    _tower(
        "Qwen2.5-Omni, as text",
        "Qwen2_5OmniThinkerConfig",
        *_QWEN_VISION,
        text={"rope_parameters": _MROPE},
        audio_config=_SOUND,
        image_token_index=190,
        video_token_index=191,
        audio_token_index=192,
        vision_start_token_id=193,
        audio_start_token_id=194,
    ),
    _tower(
        "Qwen3-Omni, as text",
        "Qwen3OmniMoeThinkerConfig",
        *_COMPASS_VISION,
        text={
            **_MOE,
            "head_dim": 16,
            "num_experts": 4,
            "rope_parameters": _MROPE | {"mrope_interleaved": True},
        },
        audio_config=_SOUND | {"downsample_hidden_size": 8},
        image_token_id=190,
        video_token_id=191,
        audio_token_id=192,
        vision_start_token_id=193,
        audio_start_token_id=194,
    ),
)
