"""The parameters of transformers' classes that the tensors of a file make, and how.

llama.cpp's converter stores some of them otherwise than transformers has them: Llama's queries and
keys with the halves of rotated pairs side by side, Gemma's norms with 1 added, experts' gates apart
from their inputs. Each row of an output stays a row, so quantised ones keep their blocks.

The names are those of the package `gguf`, against which tests hold them; it is not needed here, and
does not know the names of experts that transformers has merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Layout = Literal["plain", "halves", "plus_one", "interleaved", "turned"]
"""How tensors make a parameter: as they are, or one below the other; rows of a head's rotated pairs
apart; less 1; rows in turns, then the last two dimensions exchanged; these exchanged.
"""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


def _without(names: dict[str, str], *left_out: str) -> dict[str, str]:
    return {ours: theirs for ours, theirs in names.items() if ours not in left_out}


_BLOCKS: dict[str, dict[str, str]] = {
    "llama": _BLOCK,
    "qwen2": _BLOCK,
    "qwen3": _BLOCK | _NORMS_OF_HEADS,
    "qwen3moe": _without(_BLOCK, *_DENSE)
    | _NORMS_OF_HEADS
    | _EXPERTS
    | {"ffn_gate_inp": "mlp.gate"},
    "gemma2": _BLOCK | _FOUR_NORMS,
    "gemma3": _BLOCK | _FOUR_NORMS | _NORMS_OF_HEADS,
    "phi3": _without(_BLOCK, "attn_q", "attn_k", "attn_v", "ffn_gate")
    | {"attn_qkv": "self_attn.qkv_proj"}
    | _FUSED_MLP,
    "gpt-oss": _without(_BLOCK, "ffn_norm", *_DENSE)
    | _EXPERTS
    | {
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
    },
    "glm4": _without(_BLOCK, "ffn_gate")
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
    | _FUSED_MLP,
    "granite": _BLOCK,
    "olmo2": _without(_BLOCK, "attn_norm", "ffn_norm")
    | _NORMS_OF_HEADS
    | _without(_FOUR_NORMS, "ffn_norm"),
    "smollm3": _BLOCK,
}
_HALVES = ("llama", "granite", "smollm3")  # in which rotated pairs are side by side
_PLUS_ONE = ("gemma2", "gemma3")
_TURNED = ("gpt-oss",)  # whose experts transformers has as [experts, inputs, outputs]
_BARE = ("self_attn.sinks", *_EXPERTS.values())  # parameters without .weight
# in the configuration: how positions are scaled
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NAME = re.compile(r"(?:blk\.(?P<block>\d{1,6})\.)?(?P<stem>[a-z_]+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, the tensors that it is made of, in their order, and how."""

    name: str
    tensors: tuple[str, ...]
    layout: Layout


class UnknownTensorError(ValueError):
    """A tensor has no place in its architecture."""


def parameters_of(
    architecture: str, tensors: Iterable[str], num_blocks: int
) -> Iterator[Parameter]:
    """The parameters that a file's tensors make. Raises UnknownTensorError for a tensor that
    belongs to none, or that another needs beside it.
    """
    present = set(tensors)
    for name in sorted(present):
        if name in _OF_CONFIG:
            continue
        found = _NAME.fullmatch(name)
        parameter = None if found is None else _parameter(architecture, name, found, num_blocks)
        if parameter is None:
            raise UnknownTensorError(f"tensor {name!r}, which is no part of {architecture!r}")
        if absent := [each for each in parameter.tensors if each not in present]:
            raise UnknownTensorError(f"tensor {name!r} without {absent[0]!r}")
        if name == parameter.tensors[0]:
            yield parameter


def _parameter(
    architecture: str, name: str, found: re.Match[str], num_blocks: int
) -> Parameter | None:
    block, stem, kind = found["block"], found["stem"], found["kind"]
    if block is None:
        theirs, prefix = _TOP.get(stem), ""
    else:
        theirs, prefix = _BLOCKS[architecture].get(stem), f"model.layers.{int(block)}."
        if int(block) >= num_blocks or str(int(block)) != block:
            return None
    if theirs is None:
        return None
    layout: Layout = "plain"
    parts: tuple[str, ...] = (name,)
    if theirs in _BARE:
        is_turned = architecture in _TURNED and theirs in _EXPERTS.values()
        layout = "turned" if is_turned else "plain"
        if theirs == _EXPERTS["ffn_gate_exps"]:
            parts = tuple(f"blk.{block}.{each}.{kind}" for each in ("ffn_gate_exps", "ffn_up_exps"))
            layout = "interleaved" if is_turned else "plain"
        suffix = "_bias" if kind == "bias" else ""
    else:
        suffix = f".{kind}"
    if stem in ("attn_q", "attn_k") and architecture in _HALVES:
        layout = "halves"
    elif stem.endswith("norm") and architecture in _PLUS_ONE:
        layout = "plus_one"
    return Parameter(f"{prefix}{theirs}{suffix}", parts, layout)
