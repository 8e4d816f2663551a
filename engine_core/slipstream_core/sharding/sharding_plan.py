"""The parts of a model that each rank holds: transformers' plan, corrected where it leaves much
whole.

- Query heads are dealt out evenly. Key heads are as well, or, where there are more ranks than key
  heads, several ranks hold the same one: those projections are loaded whole and cut afterwards.
- A model whose heads divide neither way is refused with the numbers of ranks that would do, and
  one without a plan by its name. A correction whose parts do not divide is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.load_error import ModelLoadError
from slipstream_core.sharding.corrections import (
    CORRECTIONS,
    FUSED_HEADS,
    LEAD_ALONE,
    NORM_OF_HEADS,
    NORM_OVER_RANKS,
    Correction,
    Divides,
    widths,
)
from slipstream_core.sharding.rank import Rank

_MOST_RANKS = 64  # that a message proposes
_QUERIES = re.compile(r"\.(q_proj|q_b_proj|qkv_proj|query_key_value)$")
_KEYS = re.compile(r"\.(k_proj|v_proj)$")
_OF_KEY_HEADS = re.compile(r"\.(k_proj|v_proj|k_norm)$")
_LAYERS = ("model.layers.*", "model.language_model.layers.*")
_LAYER = re.compile(r"\.\d+(?=\.|$)")
_LOADED_WHOLE = (FUSED_HEADS, LEAD_ALONE)
_BY_HEADS = ("colwise", NORM_OF_HEADS)
_GATHERED = ("colwise_gather_output", "colwise_rep")


def part_of(name: str) -> str:
    """The name of a module or parameter as plans have it: `*` for the number of a layer."""
    return _LAYER.sub(".*", name)


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The division of a model among ranks.

    styles: ways to cut, by the names of modules and parameters (`part_of`): transformers' and those
    of `corrections`. shared_key_heads: the model's key heads, where several ranks hold the same
    one; None where each has its own.
    """

    styles: Mapping[str, str]
    shared_key_heads: int | None = None

    def for_transformers(self) -> dict[str, str]:
        """The styles with which transformers loads."""
        styles: dict[str, str] = {}
        for part, style in self.styles.items():
            if style in _LOADED_WHOLE or self._is_shared(part, style):
                styles[part] = "replicate"
            elif style in (NORM_OVER_RANKS, NORM_OF_HEADS):
                styles[f"{part}.weight"] = "colwise"
            else:
                styles[part] = style
        return styles

    def _is_shared(self, part: str, style: str | None) -> bool:
        is_of_keys = style in _BY_HEADS and _OF_KEY_HEADS.search(part) is not None
        return is_of_keys and self.shared_key_heads is not None

    def keeps_one_head(self, name: str) -> bool:
        """True if the module of this name is loaded whole, to be cut to one key head."""
        part = part_of(name)
        return self._is_shared(part, self.styles.get(part))


def plan_for(
    name: str, shell: Any, geometry: tuple[LayerGeometry, ...], rank: Rank
) -> ShardingPlan:
    """The plan of a model. shell: it on the meta device. Raises ModelLoadError."""
    heads = {layer.num_heads for layer in geometry}
    # each head has keys of its own, which are made of a latent that every rank holds
    key_heads = {each.num_heads if each.is_latent else each.num_kv_heads for each in geometry}
    styles = dict(shell.tp_plan or {})
    if not styles:
        raise ModelLoadError(
            name,
            f"{type(shell).__name__} has no tensor parallel plan in transformers, so it cannot be "
            f"cut for {rank.size} devices; set tensor_parallel_size to 1",
        )
    config = shell.config.get_text_config()
    for each in CORRECTIONS.get(config.model_type, ()):
        if _applies(each, heads, key_heads, widths(config), rank.size):
            styles |= _styles_of(each, shell)
    styles |= _embedding_of_a_cut_head(shell, styles)
    if not any(_cuts_heads(part, style) for part, style in styles.items()):
        return ShardingPlan(styles)  # every rank attends with all heads
    may_share = any(_KEYS.search(part) for part in styles) or FUSED_HEADS in styles.values()
    if not _divide(heads, key_heads, rank.size, may_share=may_share):
        sizes = [
            str(size)
            for size in range(1, _MOST_RANKS + 1)
            if _divide(heads, key_heads, size, may_share=may_share)
        ]
        raise ModelLoadError(
            name,
            f"its {_listed(heads)} query heads and {_listed(key_heads)} key heads cannot be dealt "
            f"out to {rank.size} devices; tensor_parallel_size may be {', '.join(sizes)}",
        )
    if all(num % rank.size == 0 for num in key_heads):
        return ShardingPlan(styles)
    return ShardingPlan(styles, shared_key_heads=min(key_heads))


def _applies(
    correction: Correction, heads: set[int], key_heads: set[int], wide: list[int], size: int
) -> bool:
    if correction.divides is Divides.NOTHING:
        return True
    if correction.divides is Divides.WIDTH:
        return all(width % size == 0 for width in wide)
    return _divide(heads, key_heads, size, may_share=correction.divides is Divides.HEADS)


def _styles_of(correction: Correction, shell: Any) -> dict[str, str]:
    """The styles of a correction by full names, of parts that the model has."""
    parts = {part_of(name) for name, _ in (*shell.named_modules(), *shell.named_parameters())}
    named = {
        f"{layers}.{part}": style for layers in _LAYERS for part, style in correction.styles.items()
    }
    return {part: style for part, style in named.items() if part in parts}


def _embedding_of_a_cut_head(shell: Any, styles: Mapping[str, str]) -> dict[str, str]:
    """The style of an embedding that a plan leaves out though it cuts the head, which may be tied
    to it.
    """
    names = {id(module): name for name, module in shell.named_modules()}
    embedding = names.get(id(shell.get_input_embeddings()))
    head = names.get(id(shell.get_output_embeddings()))
    if embedding is None or embedding in styles or styles.get(str(head)) not in _GATHERED:
        return {}
    return {embedding: "embedding_rowwise"}


def _cuts_heads(part: str, style: str) -> bool:
    return style == FUSED_HEADS or (style == "colwise" and _QUERIES.search(part) is not None)


def _divide(heads: set[int], key_heads: set[int], size: int, *, may_share: bool) -> bool:
    """True if the heads can be divided among `size` ranks. may_share: several ranks may hold one
    key head.
    """
    if any(num % size for num in heads):
        return False
    if all(num % size == 0 for num in key_heads):
        return True
    return may_share and len(key_heads) == 1 and size % min(key_heads) == 0


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
