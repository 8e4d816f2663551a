"""Refuses models that cannot be served, as far as the configuration shows it, without weights.

Models that transformers would run here but that would compute something else are refused, with the
class, the reason and what would work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from slipstream_core.runner.attention.geometry import LayerGeometry
from slipstream_core.runner.load_error import ModelLoadError, NoRoomError

_by_config: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SERVED = (
    "supported are decoder-only models whose tokens interact in transformers' attention interface "
    "alone, such as Llama, Qwen3, Mistral, Gemma 3, GPT-OSS or DeepSeek V3"
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
    """Whether a forward on the meta device has failed as tensors have no values there."""
    return _NEEDS_VALUES.search(str(error)) is not None


def class_name(config: PreTrainedConfig) -> str:
    if config.architectures:
        return str(config.architectures[0])
    if type(config) in _by_config:
        return str(_by_config[type(config)].__name__)
    return type(config).__name__.removesuffix("Config")


def refuse_kind(name: str, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise refusal(name, config, "has an encoder")
    if unknown := set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES:
        raise refusal(
            name,
            config,
            f"has layers of type {', '.join(sorted(unknown))}, where only "
            f"{' and '.join(sorted(_KNOWN_LAYER_TYPES))} are known",
        )
    if any(r["rope_type"] == "dynamic" for r in ropes(getattr(text, "rope_parameters", None))):
        raise ModelLoadError(
            name,
            f"{class_name(config)} has the rope type 'dynamic', whose results depend on the other "
            "requests of a batch; supported are 'default', 'linear', 'llama3' and 'yarn'",
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


def refuse_unseen_windows(
    name: str,
    config: PreTrainedConfig,
    text: PreTrainedConfig,
    geometry: tuple[LayerGeometry, ...],
    max_model_len: int,
) -> None:
    """Raise ModelLoadError if a layer's window differs from the configuration's.

    Some models apply their window only in the mask, without passing it to attention. Which layers
    have a window is determined as in transformers' own cache.
    """
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(geometry)
    for layer, kind in zip(geometry, kinds, strict=False):
        named = window if kind == "sliding_attention" else None
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
