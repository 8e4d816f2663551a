"""What models are served for: by vLLM's words, and by what their files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.pooling.runner_choice import pooling_task


def config_of(folder: Path, architecture: str, **settings: Any) -> CoreConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return CoreConfig(model=str(folder), address="", **settings)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BertModel", "embed"),
        ("XLMRobertaModel", "embed"),
        ("ModernBertForMaskedLM", "embed"),
        ("BertForPreTraining", "embed"),
        ("BertForSequenceClassification", "classify"),
        ("Qwen3ForSequenceClassification", "classify"),
        ("Qwen3ForCausalLM", None),
        ("GPT2LMHeadModel", None),
        ("Gemma3ForConditionalGeneration", None),
        ("SomethingElse", None),
    ],
)
def test_a_class_tells(architecture: str, expected: str | None, tmp_path: Path) -> None:
    assert pooling_task(config_of(tmp_path, architecture)) == expected
    pooled = pooling_task(config_of(tmp_path, architecture, runner="pooling"))
    assert pooled == (expected or "embed")
    assert pooling_task(config_of(tmp_path, architecture, convert="embed")) == "embed"
    assert pooling_task(config_of(tmp_path, architecture, convert="classify")) == "classify"
    assert pooling_task(config_of(tmp_path, architecture, runner="generate")) is None


def test_modules_tell_before_the_class(tmp_path: Path) -> None:
    """But for a classifier's, which sentence-transformers saves with modules, too."""
    (tmp_path / "modules.json").write_text("[]")
    assert pooling_task(config_of(tmp_path, "Qwen3ForCausalLM")) == "embed"
    assert pooling_task(config_of(tmp_path, "BertForSequenceClassification")) == "classify"


def test_overrides_tell_before_the_files(tmp_path: Path) -> None:
    overrides = {"architectures": ["Qwen3ForSequenceClassification"]}
    config = config_of(tmp_path, "Qwen3ForCausalLM", hf_overrides=overrides)
    assert pooling_task(config) == "classify"


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("BertModel", {"tensor_parallel_size": 2}, "set tensor_parallel_size to 1"),
        (
            "BertForSequenceClassification",
            {"tensor_parallel_size": 2},
            "classes are computed by one process",
        ),
        ("BertModel", {"runner": "generate", "convert": "embed"}, "but runner is 'generate'"),
        ("BertModel", {"runner": "generate", "convert": "classify"}, "convert is 'classify', but"),
        ("BertModel", {"engine": "vllm", "runner": "pooling"}, "cannot be served for embeddings"),
        ("BertModel", {"engine": "vllm", "convert": "classify"}, "cannot be served for classes"),
    ],
)
def test_what_is_not_served(
    architecture: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=why):
        pooling_task(config_of(tmp_path, architecture, **settings))


@pytest.mark.parametrize("model", ["simulated:", "random:llama"])
def test_models_without_files_generate(model: str) -> None:
    assert pooling_task(CoreConfig(model=model, address="")) is None
    with pytest.raises(ModelLoadError, match="cannot be served for embeddings"):
        pooling_task(CoreConfig(model=model, address="", runner="pooling"))
