"""Replaces parts of a model's configuration, as `--hf-overrides` does in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# what decides which class is loaded, and whose code runs
_FIXED = ("architectures", "auto_map", "model_type")
_ROPE, _FORMER_ROPE = "rope_parameters", "rope_scaling"


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as config.json has it, with some values replaced; objects are merged.

    Rope settings may be given under their name in either generation of configurations. Raises
    ValueError for what may not be replaced.
    """
    found = dict(config)
    for name, value in overrides.items():
        if name in _FIXED:
            raise ValueError(f"hf_overrides may not have {name!r}, which says what is loaded")
        if name in (_ROPE, _FORMER_ROPE) and isinstance(value, Mapping):
            old = _rope(dict(found.pop(_FORMER_ROPE, None) or {}))
            kept = {**old, **(found.get(_ROPE) or {})}
            if "rope_theta" in found:
                kept.setdefault("rope_theta", found["rope_theta"])
            found[_ROPE] = overridden(kept, _rope(dict(value)))
        elif isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = overridden(found[name], value)
        else:
            found[name] = value
    return found


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    return rope
