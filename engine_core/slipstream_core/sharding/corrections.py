"""Corrections of transformers' plans, which leave attention or experts of some models whole, and
cut what Gemma 3n needs whole.

A correction is a set of styles for a model type, and what has to divide for it. Besides
transformers' own styles there are these, whose parts transformers loads in another one:

- `norm_over_ranks`: a norm over all heads, of which each rank has some;
- `norm_of_heads`: a norm with a weight for each head;
- `fused_heads`: a projection to queries, keys and values side by side, loaded whole and cut;
- `lead_alone`: a bias behind a sum over ranks, which only the first one adds.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

NORM_OVER_RANKS, NORM_OF_HEADS = "norm_over_ranks", "norm_of_heads"
FUSED_HEADS, LEAD_ALONE = "fused_heads", "lead_alone"


class Divides(Enum):
    """The quantity that the number of ranks has to divide for a correction."""

    NOTHING = "slices may differ in width"
    HEADS = "query heads, and key heads unless ranks share them"
    ALL_HEADS = "query heads and key heads"
    WIDTH = "what a layer's hidden part is wide"


class Correction(NamedTuple):
    """styles: by the names of a layer's modules and parameters."""

    divides: Divides
    styles: dict[str, str]


_QUERIES_KEYS_VALUES = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
}
_ATTENTION = Correction(Divides.HEADS, {**_QUERIES_KEYS_VALUES, "self_attn.o_proj": "rowwise"})
_NORMED_ATTENTION = Correction(
    Divides.ALL_HEADS,
    {
        **_ATTENTION.styles,
        "self_attn.q_norm": NORM_OVER_RANKS,
        "self_attn.k_norm": NORM_OVER_RANKS,
    },
)
_FUSED_ATTENTION = Correction(
    Divides.HEADS, {"self_attn.qkv_proj": FUSED_HEADS, "self_attn.o_proj": "rowwise"}
)
_LATENT_ATTENTION = Correction(
    Divides.ALL_HEADS,
    {
        "self_attn.q_proj": "colwise",
        "self_attn.q_b_proj": "colwise",
        "self_attn.kv_b_proj": "colwise",
        "self_attn.o_proj": "rowwise",
    },
)
_FUSED_MLP = Correction(
    Divides.WIDTH, {"mlp.gate_up_proj": "packed_colwise", "mlp.down_proj": "rowwise"}
)


def _mlp(name: str) -> Correction:
    return Correction(
        Divides.WIDTH,
        {
            f"{name}.gate_proj": "colwise",
            f"{name}.up_proj": "colwise",
            f"{name}.down_proj": "rowwise",
        },
    )


CORRECTIONS: dict[str, tuple[Correction, ...]] = {
    "cohere": (
        Correction(
            Divides.HEADS,
            {"self_attn.q_norm": NORM_OF_HEADS, "self_attn.k_norm": NORM_OF_HEADS},
        ),
    ),
    "deepseek_v3": (_LATENT_ATTENTION,),
    "gemma3n_text": (
        Correction(
            Divides.NOTHING,
            {
                # what is set to zero depends on a whole row of gates
                "mlp.gate_proj": "colwise_gather_output",
                "mlp.up_proj": "colwise_gather_output",
                "mlp.down_proj": "rowwise_split_input",
            },
        ),
    ),
    "glm": (_FUSED_MLP,),
    "glm4": (_FUSED_MLP,),
    "gpt_oss": (
        Correction(_ATTENTION.divides, {**_ATTENTION.styles, "self_attn.sinks": "colwise"}),
        Correction(
            Divides.WIDTH,
            {
                # gates and ups take turns, so a slice of whole pairs has both
                "mlp.experts.gate_up_proj": "rowwise",
                "mlp.experts.gate_up_proj_bias": "rowwise",
                "mlp.experts.down_proj": "colwise",
                "mlp.experts.down_proj_bias": LEAD_ALONE,
                "mlp.experts": "moe_tp_experts",
            },
        ),
    ),
    "granitemoe": (_ATTENTION,),
    "hunyuan_v1_dense": (_ATTENTION, _mlp("mlp")),
    "minimax_m2": (_NORMED_ATTENTION,),
    "olmo2": (_NORMED_ATTENTION,),
    "olmo3": (_NORMED_ATTENTION,),
    "olmoe": (_NORMED_ATTENTION,),
    "phi3": (_FUSED_ATTENTION, _FUSED_MLP),
    "phimoe": (_ATTENTION,),
    "qwen2_moe": (_mlp("mlp.shared_expert"),),
}


def widths(config: Any) -> list[int]:
    """The widths of the hidden part of layers and experts."""
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    found = (getattr(config, name, None) for name in names)
    return [width for width in found if isinstance(width, int)]
