"""The drafts that a user asks for, in vLLM's words, as the core takes them."""

from __future__ import annotations

from typing import Any

from slipstream.errors import wrong_option
from slipstream.spelling import did_you_mean
from slipstream.stack.plan.models.model_options import json_object
from slipstream.stack.plan.models.model_source import RANDOM, folder_or_hub_id, is_gguf
from slipstream.stack.settings import StackSettings
from slipstream_ipc.validation.simulated_model import SIMULATED

_OPTION = "speculative_config"
_BY_MODEL = "draft_model"
_METHODS = ("ngram", "suffix", _BY_MODEL)
_DRAFTS, _MOST_DRAFTS = {"ngram": 8, "suffix": 16, _BY_MODEL: 8}, 16
_LOOKUP_MIN, _LOOKUP_MAX, _MOST_LOOKED_UP = 2, 4, 32  # tokens
_BOUNDS = {
    "num_speculative_tokens": _MOST_DRAFTS,
    "prompt_lookup_min": _MOST_LOOKED_UP,
    "prompt_lookup_max": _MOST_LOOKED_UP,
    "suffix_cache_mib": 65536,
}
_FIELDS = ("method", "model", *_BOUNDS, "draft_tensor_parallel_size")
_OF_TEXT = ("prompt_lookup_min", "prompt_lookup_max")
_OWN_NOISE = "nothing: drafts are verified by the stream's own noise"
_BY_SHARE = "nothing: lengths follow what was right, and suffix_cache_mib bounds what is kept"
_NOT_NEEDED = {
    "draft_sample_method": _OWN_NOISE,
    "rejection_sample_method": _OWN_NOISE,
    "use_heterogeneous_vocab": _OWN_NOISE,
    "suffix_decoding_max_cached_requests": _BY_SHARE,
    "suffix_decoding_max_spec_factor": _BY_SHARE,
    "suffix_decoding_max_tree_depth": _BY_SHARE,
    "suffix_decoding_min_token_prob": _BY_SHARE,
}


def speculative_options(settings: StackSettings) -> dict[str, Any] | None:
    """The core's `speculative_config`; None where nothing is drafted. Raises: BadRequestError."""
    if settings.speculative_config is None:
        return None
    given = json_object(_OPTION, settings.speculative_config)
    for name, value in given.items():
        if name in _NOT_NEEDED:
            raise wrong_option(f"{_OPTION}.{name}", value, _NOT_NEEDED[name])
        if name not in _FIELDS:
            allowed = f"{', '.join(_FIELDS)}{did_you_mean(name, _FIELDS)}"
            raise wrong_option(_OPTION, name, allowed)
    given = {name: value for name, value in given.items() if value is not None}
    if (size := given.pop("draft_tensor_parallel_size", 1)) != 1:
        raise wrong_option(f"{_OPTION}.draft_tensor_parallel_size", size, "1")
    if "model" in given:  # as in vLLM, which a model alone tells the method
        given.setdefault("method", _BY_MODEL)
    if given.get("method") not in _METHODS:
        raise wrong_option(f"{_OPTION}.method", given.get("method"), ", ".join(_METHODS))
    if given["method"] == _BY_MODEL:
        return _by_model(settings, given)
    if "model" in given:
        allowed = f'nothing without "method": "{_BY_MODEL}"'
        raise wrong_option(f"{_OPTION}.model", given["model"], allowed)
    if given["method"] != "suffix" and given.get("suffix_cache_mib") is not None:
        allowed = 'nothing without "method": "suffix"'
        raise wrong_option(f"{_OPTION}.suffix_cache_mib", given["suffix_cache_mib"], allowed)
    found = dict(given)
    _check_bounds(found)
    longest = found.setdefault(
        "prompt_lookup_max", max(_LOOKUP_MAX, found.get("prompt_lookup_min", 0))
    )
    shortest = found.setdefault("prompt_lookup_min", min(_LOOKUP_MIN, longest))
    if shortest > longest:
        raise wrong_option(
            f"{_OPTION}.prompt_lookup_min", shortest, f"at most prompt_lookup_max, {longest}"
        )
    return {"num_speculative_tokens": _DRAFTS[given["method"]]} | found


def _check_bounds(given: dict[str, Any]) -> None:
    for name, most in _BOUNDS.items():
        value = given.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise wrong_option(f"{_OPTION}.{name}", value, f"1 to {most}")


def _by_model(settings: StackSettings, given: dict[str, Any]) -> dict[str, Any]:
    """The options of drafts from a draft model. Raises: BadRequestError."""
    name, model = f"{_OPTION}.model", given.get("model")
    allowed = "a folder or a hub id of a smaller model with the same tokenizer"
    if not isinstance(model, str) or model.startswith(SIMULATED) or not model:
        raise wrong_option(name, model, allowed)
    for lookup in (*_OF_TEXT, "suffix_cache_mib"):
        if lookup in given:
            nothing = f'nothing with "method": "{_BY_MODEL}"'
            raise wrong_option(f"{_OPTION}.{lookup}", given[lookup], nothing)
    if settings.tensor_parallel_size > 1 or settings.device == "cuda":
        where = f"device={settings.device}, tensor_parallel_size={settings.tensor_parallel_size}"
        raise wrong_option(name, model, f"nothing with {where}: drafts need a CPU, in one process")
    if settings.model is not None and settings.model.startswith(SIMULATED):
        why = "its synthetic_acceptance_length drafts"
        raise wrong_option(name, model, f"nothing with a simulated model: {why}")
    found = model if model.startswith(RANDOM) else folder_or_hub_id(name, model)
    if is_gguf(found):
        raise wrong_option(name, model, f"{allowed}, but no GGUF file")
    _check_bounds(given)
    return {"num_speculative_tokens": _DRAFTS[_BY_MODEL]} | given | {"model": found}
