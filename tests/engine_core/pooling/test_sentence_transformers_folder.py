"""How a folder says that tokens become a vector, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream_core.model.hub import Source
from slipstream_core.pooling.sentence_transformers_folder import DenseLayer, Recipe, read_recipe

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def save(folder: Path, files: dict[str, Any]) -> Source:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return Source(str(folder), True)


def test_a_whole_folder(tmp_path: Path) -> None:
    source = save(
        tmp_path,
        {
            "modules.json": [TRANSFORMER, POOLING, DENSE, NORMALIZE],
            "1_Pooling/config.json": MEAN,
            "2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "passage": ""},
                "default_prompt_name": "passage",
            },
            "sentence_bert_config.json": {"max_seq_length": 77, "do_lower_case": False},
        },
    )
    dense = (DenseLayer("2_Dense", "Tanh"),)
    prompts = {"query": "query: ", "passage": ""}
    assert read_recipe(source, is_causal=False) == Recipe(
        "mean", dense, True, prompts, "passage", 77
    )


def test_names_of_sentence_transformers_6(tmp_path: Path) -> None:
    modules = [
        TRANSFORMER | {"type": "sentence_transformers.base.modules.transformer.Transformer"},
        POOLING | {"type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"},
    ]
    pooling = {"pooling_mode": "lasttoken"}
    source = save(tmp_path, {"modules.json": modules, "1_Pooling/config.json": pooling})
    assert read_recipe(source, is_causal=True) == Recipe("lasttoken", normalizes=False, prompts={})


@pytest.mark.parametrize(("is_causal", "pooling"), [(False, "cls"), (True, "lasttoken")])
def test_a_folder_without_modules(is_causal: bool, pooling: Any, tmp_path: Path) -> None:
    assert read_recipe(Source(str(tmp_path), True), is_causal=is_causal) == Recipe(pooling)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"modules.json": {}}, "no list|not a list"),
        ({"modules.json": [POOLING]}, "does not begin with Transformer and Pooling"),
        (
            {"modules.json": [TRANSFORMER | {"path": "0_Transformer"}, POOLING]},
            "in a folder of its own, '0_Transformer'",
        ),
        (
            {"1_Pooling/config.json": {"pooling_mode_weightedmean_tokens": True}},
            "its pooling is pooling_mode_weightedmean_tokens, allowed",
        ),
        (
            {"1_Pooling/config.json": MEAN | {"pooling_mode_cls_token": True}},
            "its pooling is cls, mean, allowed",
        ),
        ({"modules.json": [TRANSFORMER, POOLING, NORMALIZE, DENSE]}, "has the module Dense"),
        (
            {"modules.json": [TRANSFORMER, POOLING, {"type": "x.LSTM", "path": "2"}]},
            "has the module LSTM, allowed behind the pooling: Dense and Normalize",
        ),
        (
            {
                "1_Pooling/config.json": MEAN | {"include_prompt": False},
                "config_sentence_transformers.json": {"prompts": {"q": "Instruct: "}},
            },
            "not to be pooled",
        ),
        (
            {"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "q"}},
            "has no prompt 'q'",
        ),
        ({"config_sentence_transformers.json": {"prompts": {"q": 1}}}, "no short texts"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case"),
    ],
)
def test_folders_that_are_refused(files: dict[str, Any], why: str, tmp_path: Path) -> None:
    usual = {"modules.json": [TRANSFORMER, POOLING], "1_Pooling/config.json": MEAN}
    source = save(tmp_path, usual | files)
    with pytest.raises(ValueError, match=why):
        read_recipe(source, is_causal=False)
