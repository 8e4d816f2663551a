"""Refuses models that cannot be served, as far as the configuration shows it, without weights.

Models that transformers would run here but that would compute something else are refused, with the
class, the reason and what would work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from slipstream_core.attention.chunked_layers import QueryScale
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.load_error import ModelLoadError, NoRoomError
from slipstream_core.sharding.rank import Rank

_by_config: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING

# kinds of layers whose attention is known; in the others nothing may attend
_CHUNKED = "chunked_attention"
_INDEXED = "indexed_attention"
_BLOCKS = "minimax_m3_sparse"  # an indexer selects blocks of tokens
_ATTENDING = {
    "full_attention",
    "sliding_attention",
    "hybrid",  # attends, and carries a state beside that
    "hybrid_sliding",
    _CHUNKED,
    _INDEXED,
    _BLOCKS,
}
_SERVED = (
    "supported are decoder-only models whose tokens interact in transformers' attention interface "
    "and in the states of its mixers alone, such as Llama, Qwen3, Gemma 3, GPT-OSS, DeepSeek V3, "
    "Qwen3-Next or LFM2"
)

# what torch says of such tensors; an operator of another library may lack a form there that needs
# no values
_NEEDS_VALUES = re.compile(
    r"called on meta tensors|repeat_interleave a meta tensor|copy out of meta tensor"
    r"|register_meta function|meta device type tensor"
    r"|^aten::\S+: attempted to run this operator with Meta tensors"
)


def refusal(name: str, config: PreTrainedConfig, problem: str) -> ModelLoadError:
    """The error for a whole architecture: its class, the problem, what is served."""
    return ModelLoadError(name, f"{class_name(config)} {problem}; {_SERVED}")


def needs_values(error: Exception) -> bool:
    """True if a forward on the meta device failed because its tensors have no values."""
    return _NEEDS_VALUES.search(str(error)) is not None


def class_name(config: PreTrainedConfig) -> str:
    if config.architectures:
        return str(config.architectures[0])
    if type(config) in _by_config:
        return str(_by_config[type(config)].__name__)
    return type(config).__name__.removesuffix("Config")


def refuse_kind(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise refusal(name, config, "has an encoder")


def refuse_states(
    name: str, config: PreTrainedConfig, device: torch.device, rank: Rank | None
) -> None:
    """Raise ModelLoadError for recurrent states where they are not served yet."""
    if rank is not None:
        raise ModelLoadError(
            name,
            f"{class_name(config)} carries recurrent states, and such models are not cut for "
            "several devices; set tensor_parallel_size to 1",
        )
    if device.type != "cpu":
        raise ModelLoadError(
            name,
            f"{class_name(config)} carries recurrent states, which are computed on CPUs alone so "
            "far; set device to cpu",
        )


def refuse_longrope(
    name: str, config: PreTrainedConfig, text: PreTrainedConfig, max_model_len: int
) -> None:
    """Raise ModelLoadError for longrope beyond its short frequencies.

    It has two sets of frequencies, and the longest row chooses one for the whole batch.
    """
    for rope in ropes(getattr(text, "rope_parameters", None)):
        if rope["rope_type"] != "longrope":
            continue
        short = rope.get("original_max_position_embeddings")
        if short is None or max_model_len > short:
            raise ModelLoadError(
                name,
                f"{class_name(config)} has the rope type 'longrope', whose results depend on the "
                f"other requests of a batch beyond {short} tokens; set max_model_len to at most "
                "that",
            )


def ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The rope settings: one dict for the model, or one per layer type."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters
    else:
        for nested in parameters.values():
            yield from ropes(nested)


def unknown_kinds(text: PreTrainedConfig, layers: Iterable[int] | None = None) -> str:
    """The types of layers, all or these, whose attention is not known; empty if all are."""
    kinds = getattr(text, "layer_types", None) or []
    chosen = kinds if layers is None else [kinds[at] for at in layers if at < len(kinds)]
    return ", ".join(sorted(set(chosen) - _ATTENDING))


def indexed_layers(text: PreTrainedConfig) -> set[int]:
    """The layers that attend to what an indexer selects."""
    kinds = getattr(text, "layer_types", None) or ()
    return {at for at, kind in enumerate(kinds) if kind in (_INDEXED, _BLOCKS)}


def chunked_layers(text: PreTrainedConfig) -> set[int]:
    """The layers that attend in chunks of `attention_chunk_size` positions."""
    kinds = getattr(text, "layer_types", None) or ()
    is_known = isinstance(getattr(text, "attention_chunk_size", None), int)
    return {at for at, kind in enumerate(kinds) if kind == _CHUNKED and is_known}


def refuse_chunks(
    name: str,
    config: PreTrainedConfig,
    text: PreTrainedConfig,
    max_model_len: int,
    device: torch.device,
) -> None:
    """Raise ModelLoadError for more tokens than a layer attends to that does so in chunks, on a
    card, or that an indexer selects.
    """
    kinds = getattr(text, "layer_types", None) or ()
    for kind, options in (
        (_CHUNKED, ("attention_chunk_size",)),
        (_INDEXED, ("index_topk",)),
        (_BLOCKS, ("index_topk_blocks", "index_block_size")),
    ):
        if kind == _CHUNKED and device.type == "cpu" and chunked_layers(text):
            continue
        numbers: list[Any] = [getattr(text, option, None) for option in options]
        most = None if None in numbers else math.prod(numbers)
        if kind in kinds and (most is None or max_model_len > most):
            said = " x ".join(options)
            raise refusal(
                name,
                config,
                f"has layers of type {kind}, which see {most} tokens at most ({said}), and "
                f"max_model_len is {max_model_len}; a max_model_len within that will do",
            )


def take_counted_scale(
    name: str,
    config: PreTrainedConfig,
    text: PreTrainedConfig,
    max_model_len: int,
    device: torch.device,
) -> QueryScale | None:
    """Turn off a scale of queries that is 1 before `floor_scale` tokens (Llama 4); returns it where
    rows may be longer.

    It counts from the first token of the forward, which is another request's. Raises ModelLoadError
    for a `max_model_len` beyond that on a card.
    """
    if not getattr(text, "attn_temperature_tuning", False):
        return None
    is_needed = max_model_len > text.floor_scale
    if is_needed and device.type != "cpu":
        raise refusal(
            name,
            config,
            f"scales queries from token {text.floor_scale} on by their place in the step, and "
            f"max_model_len is {max_model_len}; a max_model_len within that will do",
        )
    text.attn_temperature_tuning = False
    return QueryScale(text.floor_scale, text.attn_scale) if is_needed else None


def refuse_unseen_windows(
    name: str,
    config: PreTrainedConfig,
    text: PreTrainedConfig,
    geometry: Mapping[int, LayerGeometry],
    max_model_len: int,
) -> None:
    """Raise ModelLoadError if a layer's window differs from the configuration's.

    Some models apply their window only in the mask, without passing it to attention. Which layers
    have a window is determined as in transformers' own cache. geometry: by the layers that attend.
    """
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    for at, layer in geometry.items():
        kind = kinds[at] if kinds and at < len(kinds) else "sliding_attention"
        named = window if "sliding" in kind else None
        seen = [min(each or max_model_len, max_model_len) for each in (named, layer.window)]
        if seen[0] != seen[1]:
            raise refusal(
                name,
                config,
                f"names a window of {named} tokens in its configuration and "
                f"{layer.window} to its attention, so beyond the smaller of the two it would "
                "compute something else; a max_model_len of at most that will do",
            )


def refuse_larger(name: str, nbytes: int, device: torch.device) -> None:
    """Raise ModelLoadError if the card has no room for `nbytes` of weights."""
    free, total = torch.cuda.mem_get_info(device)
    if nbytes > free:
        gib = [f"{num / 2**30:.2f} GiB" for num in (nbytes, free, total)]
        raise NoRoomError(
            name,
            f"its weights take {gib[0]}, but {gib[1]} of the card's {gib[2]} are free; give a "
            "smaller model or dtype, or stop other processes on the card",
        )
