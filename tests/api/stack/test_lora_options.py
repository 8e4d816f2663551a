"""Options of adapters, as vLLM has them, and what they become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.demo_model import MODEL_PATH
from slipstream.errors import BadRequestError
from slipstream.stack.plan.adapters import lora_options
from slipstream.stack.settings import settings_from

NAMES = ("base", "alias")


def options(model: str = str(MODEL_PATH), **given: Any) -> dict[str, Any] | None:
    return lora_options(settings_from(given), model, NAMES)


def test_without_the_option_there_are_no_adapters() -> None:
    assert options() is None
    assert options(max_lora_rank=64, max_loras=4) is None


@pytest.mark.parametrize(
    "given",
    [
        "a=/x/y",
        ["a=/x/y"],
        ["a=/x/y/../y"],
        ['{"name": "a", "path": "/x/y"}'],
        ['{"name": "a", "path": "/x/y", "base_model_name": "alias"}'],
    ],
)
def test_modules_are_names_and_folders(given: Any) -> None:
    assert options(enable_lora=True, lora_modules=given) == {
        "modules": [("a", "/x/y")],
        "max_rank": 16,
        "max_loras": 1,
    }


def test_paths_are_whole() -> None:
    found = options(enable_lora=True, lora_modules=["a=x=y", "b=~/z"], max_loras=5)
    assert found is not None
    home = os.path.expanduser("~")
    assert found["modules"] == [("a", os.path.abspath("x=y")), ("b", f"{home}/z")]
    assert found["max_loras"] == 5


def test_there_may_be_none_yet() -> None:
    assert options(enable_lora=True) == {"modules": [], "max_rank": 16, "max_loras": 1}


def test_those_that_may_be_loaded_later(tmp_path: Path) -> None:
    """Below the folders of those that are named, unless roots are given."""
    later = {"enable_lora": True, "allow_runtime_lora_updating": True}
    found = options(**later, lora_modules=["a=/x/y", "b=/z"])
    assert found is not None
    assert (found["is_updatable"], found["roots"], found["max_loras"]) == (True, ["/x/y", "/z"], 66)
    found = options(**later, lora_modules=["a=/x"], lora_root=str(tmp_path), max_loras=2)
    assert found is not None
    assert (found["roots"], found["max_loras"]) == ([str(tmp_path)], 2)
    found = options(**later, lora_root=[str(tmp_path), "/"], lora_gib=0.5)
    assert found is not None
    assert (found["roots"], found["gib"], found["max_loras"]) == ([str(tmp_path), "/"], 0.5, 65)


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"allow_runtime_lora_updating": True}, "allow_runtime_lora_updating", "enable_lora"),
        ({"lora_gib": 1.0}, "lora_gib", "none without enable_lora"),
        (
            {"enable_lora": True, "lora_root": "/"},
            "lora_root",
            "none without allow_runtime_lora_updating",
        ),
        (
            {"enable_lora": True, "allow_runtime_lora_updating": True},
            "lora_root",
            "a folder, as there are no lora_modules",
        ),
        (
            {"enable_lora": True, "allow_runtime_lora_updating": True, "lora_root": "/nowhere"},
            "lora_root",
            "got '/nowhere', allowed: a folder",
        ),
        ({"lora_modules": ["a=/x"]}, "lora_modules", "allowed: none without enable_lora"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "lora_modules", "allowed: NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["a="]}, "lora_modules", "a path behind the name"),
        ({"enable_lora": True, "lora_modules": ["a=/\udcff"]}, "lora_modules", "that is UTF-8"),
        ({"enable_lora": True, "lora_modules": ["=/x"]}, "lora_modules", "a name of 1 to 128"),
        ({"enable_lora": True, "lora_modules": ["a*=/x"]}, "lora_modules", "a name of 1 to 128"),
        ({"enable_lora": True, "lora_modules": ["a\n=/x"]}, "lora_modules", "a name of 1 to 128"),
        ({"enable_lora": True, "lora_modules": [f"{'a' * 129}=/"]}, "lora_modules", "1 to 128"),
        ({"enable_lora": True, "lora_modules": ["base=/x"]}, "lora_modules", "nothing else has"),
        ({"enable_lora": True, "lora_modules": ["a=/x", "a=/y"]}, "lora_modules", "nothing else"),
        ({"enable_lora": True, "lora_modules": ["{"]}, "lora_modules", "an object as"),
        ({"enable_lora": True, "lora_modules": ['{"name": "a"}']}, "lora_modules", "an object as"),
        (
            {
                "enable_lora": True,
                "lora_modules": ['{"name": "a", "path": "/x", "base_model_name": "other"}'],
            },
            "lora_modules",
            "got 'other', allowed: 'base' or 'alias' as base_model_name",
        ),
        (
            {"enable_lora": True, "lora_modules": ["a=/x", "b=/y"], "max_loras": 1},
            "max_loras",
            "got 1, allowed: at least 2, the adapters of lora_modules",
        ),
        ({"enable_lora": True, "max_lora_rank": 513}, "max_lora_rank", "got 513"),
        (
            {"enable_lora": True, "tensor_parallel_size": 2},
            "enable_lora",
            "false with tensor_parallel_size > 1",
        ),
        ({"enable_lora": True, "device": "cuda"}, "enable_lora", "false with device=cuda"),
        ({"enable_lora": True, "native": False}, "enable_lora", "false with native=false"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        options(**given)
    assert caught.value.field == field
    assert says in str(caught.value)


def test_simulated_models_have_none() -> None:
    with pytest.raises(BadRequestError, match="false with the model simulated:"):
        options("simulated:", enable_lora=True)
