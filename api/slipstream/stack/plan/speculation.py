"""The drafts that a user asks for, in vLLM's words, as the core takes them."""

from __future__ import annotations

from typing import Any

from slipstream.errors import wrong_option
from slipstream.spelling import did_you_mean
from slipstream.stack.plan.models.model_options import json_object
from slipstream.stack.settings import StackSettings

_OPTION = "speculative_config"
_METHODS = ("ngram", "suffix")
_DRAFTS, _MOST_DRAFTS = {"ngram": 8, "suffix": 16}, 16
_LOOKUP_MIN, _LOOKUP_MAX, _MOST_LOOKED_UP = 2, 4, 32  # tokens
_BOUNDS = {
    "num_speculative_tokens": _MOST_DRAFTS,
    "prompt_lookup_min": _MOST_LOOKED_UP,
    "prompt_lookup_max": _MOST_LOOKED_UP,
    "suffix_cache_mib": 65536,
}
_FIELDS = ("method", *_BOUNDS)
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
    if given.get("method") not in _METHODS:
        raise wrong_option(f"{_OPTION}.method", given.get("method"), ", ".join(_METHODS))
    if given["method"] != "suffix" and given.get("suffix_cache_mib") is not None:
        allowed = 'nothing without "method": "suffix"'
        raise wrong_option(f"{_OPTION}.suffix_cache_mib", given["suffix_cache_mib"], allowed)
    found = {name: value for name, value in given.items() if value is not None}
    for name, most in _BOUNDS.items():
        value = found.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise wrong_option(f"{_OPTION}.{name}", value, f"1 to {most}")
    longest = found.setdefault(
        "prompt_lookup_max", max(_LOOKUP_MAX, found.get("prompt_lookup_min", 0))
    )
    shortest = found.setdefault("prompt_lookup_min", min(_LOOKUP_MIN, longest))
    if shortest > longest:
        raise wrong_option(
            f"{_OPTION}.prompt_lookup_min", shortest, f"at most prompt_lookup_max, {longest}"
        )
    return {"num_speculative_tokens": _DRAFTS[given["method"]]} | found
