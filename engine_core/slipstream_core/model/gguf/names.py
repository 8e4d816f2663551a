"""The parameters of transformers' classes that the tensors of a file make, and how.

llama.cpp's converter stores some of them otherwise than transformers has them: Llama's queries and
keys with the halves of rotated pairs side by side, norms with 1 added, experts' gates apart from
their inputs, the logarithm of a decay as the decay, the heads of Qwen3.5's values in another order.
Each row of an output stays a row, so quantised ones keep their blocks; but for the inputs of
Qwen3.5's `out_proj`.

The names are those of the package `gguf`, against which tests hold them; it is not needed here, and
does not know the names of experts that transformers has merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

Layout = Literal[
    "plain",
    "flat",
    "halves",
    "plus_one",
    "decay",
    "interleaved",
    "turned",
    "by_key_head",
    "value_heads",
    "value_heads_behind",
    "value_heads_decay",
    "inputs_of_value_heads",
    "keys_and_values",
]
"""How tensors make a parameter: as they are, or one below the other (plain, and flat, which has
fewer dimensions); rows of a head's rotated pairs apart; less 1; the logarithm of the negative; rows
in turns, then the last two dimensions exchanged; these exchanged. Of gated delta nets: rows of
queries, keys, values and gates by key head; rows of value heads by key head, all, behind queries
and keys, as a decay; columns so. Of latent attention: a head's keys, transposed, then its values.
"""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_BLOCK = _NORMS | _ATTENTION | _MLP
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_OF_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS = _NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}
_SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}


def _experts(within: str = "mlp", router: str = "gate") -> dict[str, str]:
    """Gates and inputs of experts are one parameter, whether a file has them apart or together."""
    return {
        "ffn_gate_inp": f"{within}.{router}",
        "ffn_gate_exps+ffn_up_exps": f"{within}.experts.gate_up_proj",
        "ffn_gate_up_exps": f"{within}.experts.gate_up_proj",
        "ffn_down_exps": f"{within}.experts.down_proj",
    }


def _shared(within: str) -> dict[str, str]:
    return {
        "ffn_gate_shexp": f"mlp.{within}.gate_proj",
        "ffn_up_shexp": f"mlp.{within}.up_proj",
        "ffn_down_shexp": f"mlp.{within}.down_proj",
    }


def _scores(theirs: str) -> dict[str, str]:
    """The bias of the scores by which experts are chosen; older files have no suffix to it."""
    return {"exp_probs_b.bias": theirs, "exp_probs_b": theirs}


def _without(names: Mapping[str, str], *left_out: str) -> dict[str, str]:
    return {ours: theirs for ours, theirs in names.items() if ours not in left_out}


_MOE = _NORMS | _ATTENTION | _experts()
_SHARED_EXPERT = _shared("shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_DELTA_NET = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET_OF_QWEN_3_5 = _DELTA_NET | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_QWEN_3_5 = _ATTENTION | _NORMS_OF_HEADS | _SECOND_NORM | {"attn_norm": "input_layernorm"}
_SHORT_CONV = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **_without(_ATTENTION, "attn_output"),
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b+attn_v_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}


def _mamba(within: str) -> dict[str, str]:
    """Mamba 2."""
    return {
        "ssm_in": f"{within}.in_proj",
        "ssm_conv1d": f"{within}.conv1d",
        "ssm_dt.bias": f"{within}.dt_bias",
        "ssm_a": f"{within}.A_log",
        "ssm_d": f"{within}.D",
        "ssm_norm": f"{within}.norm",
        "ssm_out": f"{within}.out_proj",
    }


_MAMBA: dict[str, Layout] = {"ssm_a": "decay", "ssm_norm": "flat"}
_HALVES: dict[str, Layout] = {"attn_q": "halves", "attn_k": "halves"}


@dataclass(frozen=True, slots=True)
class Names:
    """An architecture's names in files, and transformers' for them: of what is in a block, below
    `model.layers.N.`, and of what is not. `a+b` are tensors that make one parameter together; a
    name with its `.bias` stands for a parameter without. layouts: by names in files; plain is none.
    """

    block: Mapping[str, str]
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def _plus_one(block: Mapping[str, str]) -> dict[str, Layout]:
    """The norms, but for those of a gated delta net."""
    names = (*block, *_TOP)
    return {each: "plus_one" for each in names if each.endswith("norm") and each != "ssm_norm"}


def _qwen_3_5(mlp: dict[str, str]) -> Names:
    block = _QWEN_3_5 | _DELTA_NET_OF_QWEN_3_5 | mlp
    layouts: dict[str, Layout] = {
        "attn_qkv": "value_heads_behind",
        "attn_gate": "value_heads",
        "ssm_beta": "value_heads",
        "ssm_alpha": "value_heads",
        "ssm_conv1d": "value_heads_behind",
        "ssm_dt.bias": "value_heads",
        "ssm_a": "value_heads_decay",
        "ssm_out": "inputs_of_value_heads",
    }
    return Names(block, layouts=_plus_one(block) | layouts)


_GEMMA_2 = _BLOCK | _FOUR_NORMS
_GEMMA_3 = _GEMMA_2 | _NORMS_OF_HEADS
_QWEN_3_NEXT = (
    _QWEN_3_5
    | _DELTA_NET
    | {
        "attn_qkv+attn_gate": "linear_attn.in_proj_qkvz",
        "ssm_in": "linear_attn.in_proj_qkvz",  # in older files, as transformers has it
        "ssm_ba": "linear_attn.in_proj_ba",
    }
    | _experts()
    | _SHARED_EXPERT
)
_GRANITE_MOE = (
    _NORMS
    | _ATTENTION
    | _experts("block_sparse_moe", "router")
    | {
        "ffn_gate_shexp+ffn_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
)
_NEMOTRON_H = Names(
    {
        "attn_norm": "norm",
        **{ours: theirs.replace("self_attn", "mixer") for ours, theirs in _ATTENTION.items()},
        **_mamba("mixer"),
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.up_proj",
        "ffn_down_exps": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        **_scores("mixer.gate.e_score_correction_bias"),
    },
    {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
    _HALVES | _MAMBA,  # positions do not count, so halves do not either
)
_LFM_2_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # is behind the last block
    "output_norm": "model.embedding_norm",
    "output": "lm_head",
}
_ARCHITECTURES: dict[str, Names] = {
    "llama": Names(_BLOCK | _experts(), layouts=_HALVES),
    "mistral3": Names(_BLOCK, layouts=_HALVES),
    "qwen2": Names(_BLOCK),
    "qwen2vl": Names(_BLOCK),
    "qwen2moe": Names(_MOE | _SHARED_EXPERT),
    "qwen3": Names(_BLOCK | _NORMS_OF_HEADS),
    "qwen3vl": Names(_BLOCK | _NORMS_OF_HEADS),
    "qwen3moe": Names(_MOE | _NORMS_OF_HEADS),
    "qwen3vlmoe": Names(_MOE | _NORMS_OF_HEADS),
    "qwen3next": Names(
        _QWEN_3_NEXT,
        layouts=_plus_one(_QWEN_3_NEXT) | {"attn_qkv+attn_gate": "by_key_head", "ssm_a": "decay"},
    ),
    "qwen35": _qwen_3_5(_MLP),
    "qwen35moe": _qwen_3_5(_experts() | _SHARED_EXPERT),
    "gemma2": Names(_GEMMA_2, layouts=_plus_one(_GEMMA_2)),
    "gemma3": Names(_GEMMA_3, layouts=_plus_one(_GEMMA_3)),
    "gemma4": Names(
        _GEMMA_3
        | {
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_exps+ffn_up_exps": "experts.gate_up_proj",
            "ffn_gate_up_exps": "experts.gate_up_proj",
            "ffn_down_exps": "experts.down_proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale.weight": "layer_scalar",
        },
        _TOP
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
    "phi3": Names(_NORMS | {"attn_qkv": "self_attn.qkv_proj"} | _ATTENTION | _FUSED_MLP),
    "gpt-oss": Names(
        _MOE | _SECOND_NORM | {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
        layouts={"ffn_gate_exps+ffn_up_exps": "interleaved", "ffn_down_exps": "turned"},
    ),
    "glm4": Names(
        _NORMS
        | _ATTENTION
        | _FUSED_MLP
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    ),
    "glm4moe": Names(
        _BLOCK
        | _experts()
        | _SECOND_NORM
        | _NORMS_OF_HEADS
        | _shared("shared_experts")
        | _scores("mlp.gate.e_score_correction_bias")
    ),
    "deepseek2": Names(
        _NORMS
        | _LATENT
        | _MLP
        | _experts()
        | _shared("shared_experts")
        | _scores("mlp.gate.e_score_correction_bias"),
        layouts={"attn_k_b+attn_v_b": "keys_and_values"},
    ),
    "granite": Names(_BLOCK, layouts=_HALVES),
    "granitemoe": Names(_GRANITE_MOE, layouts=_HALVES),
    "granitehybrid": Names(
        _GRANITE_MOE
        | _mamba("mamba")
        | {
            "ffn_gate+ffn_up": "shared_mlp.input_linear",
            "ffn_down": "shared_mlp.output_linear",
        },
        layouts=_HALVES | _MAMBA,
    ),
    "falcon-h1": Names(
        _without(_BLOCK, "ffn_norm", *_MLP)
        | _mamba("mamba")
        | {"ffn_norm": "pre_ff_layernorm.weight"}  # it has no suffix
        | {ours: theirs.replace("mlp", "feed_forward") for ours, theirs in _MLP.items()},
        _TOP | {"output_norm": "model.final_layernorm"},
        _MAMBA,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": Names(_SHORT_CONV, _LFM_2_TOP),
    "lfm2moe": Names(
        _SHORT_CONV | _experts("feed_forward") | _scores("feed_forward.expert_bias"), _LFM_2_TOP
    ),
    "olmo2": Names(_ATTENTION | _MLP | _NORMS_OF_HEADS | _NORMS_BEHIND),
    "smollm3": Names(_BLOCK, layouts=_HALVES),
    "seed_oss": Names(_without(_BLOCK, "ffn_norm") | _SECOND_NORM),
    "exaone4": Names(_ATTENTION | _MLP | _NORMS_OF_HEADS | _NORMS_BEHIND),
    "cohere2": Names(_without(_BLOCK, "ffn_norm")),
    "starcoder2": Names(_NORMS | _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "ernie4_5": Names(_BLOCK),
    "ernie4_5-moe": Names(
        _BLOCK
        | _experts()
        | _shared("shared_experts")
        | _scores("mlp.gate.moe_statics.e_score_correction_bias")
    ),
    "hunyuan-dense": Names(_BLOCK | _NORMS_OF_HUNYUAN),
    "hunyuan-moe": Names(
        _MOE | _NORMS_OF_HUNYUAN | _shared("shared_mlp") | {"ffn_gate_inp": "mlp.gate.wg"}
    ),
    "minimax-m2": Names(_MOE | _NORMS_OF_HEADS | _scores("mlp.e_score_correction_bias")),
}
_BARE = ("sinks", "A_log", "D")  # parameters without .weight, as all of experts are
_WITHOUT_KIND = (  # as files have them
    *("ssm_a", "ssm_d", "exp_probs_b", "ffn_norm"),
    *("ffn_gate_inp.scale", "ffn_down_exps.scale"),
)
# in the configuration: how positions are scaled
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NAME = re.compile(
    r"(?:blk\.(?P<block>\d{1,6})\.)?(?P<stem>[a-z0-9_]+?(?:\.[a-z_]+?)??)"
    r"(?:\.(?P<kind>weight|bias))?"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, the tensors that it is made of, in their order, and how."""

    name: str
    tensors: tuple[str, ...]
    layout: Layout


class UnknownTensorError(ValueError):
    """A tensor has no place in its architecture."""


def parameters_of(
    architecture: str, tensors: Iterable[str], num_blocks: int, num_drafting: int = 0
) -> Iterator[Parameter]:
    """The parameters that a file's tensors make. num_drafting: blocks behind them that draft
    tokens, of which nothing is needed to answer. Raises UnknownTensorError for a tensor that
    belongs to none, or that another needs beside it.
    """
    present = set(tensors)
    drafting = {str(block) for block in range(num_blocks, num_blocks + num_drafting)}
    for name in sorted(present):
        found = _NAME.fullmatch(name)
        if name in _OF_CONFIG or (found is not None and found["block"] in drafting):
            continue
        parameter = None if found is None else _parameter(architecture, name, found, num_blocks)
        if parameter is None:
            raise UnknownTensorError(f"tensor {name!r}, which is no part of {architecture!r}")
        if absent := [each for each in parameter.tensors if each not in present]:
            raise UnknownTensorError(f"tensor {name!r} without {absent[0]!r}")
        if name == parameter.tensors[0]:
            yield parameter


@cache
def _by_stem(architecture: str, *, in_block: bool) -> dict[str, tuple[str, str]]:
    """By the stem of each tensor transformers' name and the key of both tables."""
    names = _ARCHITECTURES[architecture]
    return {
        stem: (theirs, key)
        for key, theirs in (names.block if in_block else names.top).items()
        for stem in key.split("+")
    }


def _parameter(
    architecture: str, name: str, found: re.Match[str], num_blocks: int
) -> Parameter | None:
    block, stem, kind = found["block"], found["stem"], found["kind"]
    prefix, before = "", ""
    if block is not None:
        prefix, before = f"model.layers.{int(block)}.", f"blk.{block}."
        if int(block) >= num_blocks or str(int(block)) != block:
            return None
    known = _by_stem(architecture, in_block=block is not None)
    with_kind = stem if kind is None else f"{stem}.{kind}"
    suffix = ""
    if with_kind in known and (kind is not None or stem in _WITHOUT_KIND):
        theirs, key = known[with_kind]
        parts: tuple[str, ...] = (name,)
    elif stem in known and kind is not None:
        theirs, key = known[stem]
        parts = tuple(f"{before}{each}.{kind}" for each in key.split("+"))
        is_bare = ".experts." in f".{theirs}" or theirs.rpartition(".")[2] in _BARE
        suffix = f".{kind}" if not is_bare else "_bias" if kind == "bias" else ""
    else:
        return None
    layout = _ARCHITECTURES[architecture].layouts.get(key, "plain")
    return Parameter(f"{prefix}{theirs}{suffix}", parts, layout)
