"""Which models are served for embeddings, by vLLM's words and by what their files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.pooling.runner_choice import serves_pooling


def config_of(folder: Path, architecture: str, **settings: Any) -> CoreConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return CoreConfig(model=str(folder), address="", **settings)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BertModel", True),
        ("XLMRobertaModel", True),
        ("ModernBertForMaskedLM", True),
        ("BertForPreTraining", True),
        ("Qwen3ForCausalLM", False),
        ("GPT2LMHeadModel", False),
        ("Gemma3ForConditionalGeneration", False),
        ("SomethingElse", False),
    ],
)
def test_a_class_tells(architecture: str, expected: bool, tmp_path: Path) -> None:
    assert serves_pooling(config_of(tmp_path, architecture)) is expected
    assert serves_pooling(config_of(tmp_path, architecture, runner="pooling"))
    assert serves_pooling(config_of(tmp_path, architecture, convert="embed"))
    assert not serves_pooling(config_of(tmp_path, architecture, runner="generate"))


def test_modules_tell_before_the_class(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    assert serves_pooling(config_of(tmp_path, "Qwen3ForCausalLM"))


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("BertForSequenceClassification", {}, "classifies, which is not supported yet"),
        ("BertModel", {"tensor_parallel_size": 2}, "set tensor_parallel_size to 1"),
        ("BertModel", {"runner": "generate", "convert": "embed"}, "but runner is 'generate'"),
        ("BertModel", {"engine": "vllm", "runner": "pooling"}, "cannot be served"),
    ],
)
def test_what_is_not_served(
    architecture: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=why):
        serves_pooling(config_of(tmp_path, architecture, **settings))


@pytest.mark.parametrize("model", ["simulated:", "random:llama"])
def test_models_without_files_generate(model: str) -> None:
    assert not serves_pooling(CoreConfig(model=model, address=""))
    with pytest.raises(ModelLoadError, match="cannot be served for embeddings"):
        serves_pooling(CoreConfig(model=model, address="", runner="pooling"))
