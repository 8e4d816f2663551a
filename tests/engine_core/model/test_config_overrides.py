"""Parts of a configuration that are replaced, and how far rope scaling carries a model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from slipstream_core.model.config_overrides import overridden
from slipstream_core.model.rope import carried_len

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
THETA = {"rope_theta": 5e5}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 5}}, {"a": 1, "b": {"c": 5, "d": 3}}),
        ({"a": 1}, {"a": {"b": 2}, "n": None}, {"a": {"b": 2}, "n": None}),
        (THETA, {"rope_scaling": {**YARN}}, THETA | {"rope_parameters": THETA | YARN}),
        (
            {"rope_parameters": THETA | {"rope_type": "default"}},
            {"rope_scaling": {"type": "yarn", "factor": 2}},
            {"rope_parameters": THETA | {"rope_type": "yarn", "factor": 2}},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, **THETA},
            {"rope_parameters": YARN},
            THETA | {"rope_parameters": THETA | YARN},
        ),
    ],
)
def test_values_are_replaced_and_objects_merged(
    config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert overridden(config, overrides) == expected


@pytest.mark.parametrize("name", ["architectures", "auto_map", "model_type"])
def test_what_says_which_class_is_loaded_stays(name: str) -> None:
    for overrides in ({name: "x"}, {"text_config": {name: "x"}}):
        with pytest.raises(ValueError, match=name):
            overridden({"text_config": {}}, overrides)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "default"}, 0),
        (YARN, 2048),
        (YARN | {"original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
    ],
)
def test_how_far_a_model_is_carried(rope: dict[str, Any], most: int) -> None:
    config = LlamaConfig(max_position_embeddings=512, rope_parameters=rope | THETA)
    assert carried_len(config, 512) == most


def test_a_model_with_layers_that_are_not_scaled_is_carried_no_further() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, **THETA},
        "sliding_attention": {"rope_type": "default", **THETA},
    }
    config = Gemma3TextConfig(max_position_embeddings=512, rope_parameters=rope)
    assert carried_len(config, 512) == 0
