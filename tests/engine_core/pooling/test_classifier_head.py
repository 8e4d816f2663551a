"""Classes of sequences beside others, against what transformers' own classes compute of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.helpers.embedders import (
    VOCAB_SIZE,
    VOCABULARY,
    reference_logits,
    save_classifier,
    save_decoder,
)
from transformers import AutoModelForCausalLM

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.pooling.flat_model import FlatModel, load_flat_model

LENS = 3, 7, 7, 20, 20, 41, 90, 2
LABELS = "no", "maybe", "yes"
CLASSES = [
    "BERT",
    "RoBERTa",
    "XLM-R",
    "ModernBERT",
    "DistilBERT",
    "ALBERT",
    "GTE",
    "Qwen3",
    "Llama",
]
NO_YES = {"classifier_from_token": ["cat", "dog"]}


def load(folder: Path, **settings: Any) -> FlatModel:
    config = CoreConfig(model=str(folder), address="", device="cpu", **settings)
    return load_flat_model(config, "classify")


def sequences_of() -> list[npt.NDArray[np.uint32]]:
    random = np.random.default_rng(1)
    return [random.integers(5, VOCAB_SIZE, length, dtype=np.uint32) for length in LENS]


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return torch.from_numpy(logits).softmax(-1).numpy()


@pytest.mark.parametrize("name", [*CLASSES, "Gemma 3, both ways"])
def test_logits_are_those_of_transformers_own_class(name: str, tmp_path: Path) -> None:
    """With tokens of two types, where the model tells them apart."""
    model = load(save_classifier(name, tmp_path, labels=LABELS))
    sequences, first_lens = sequences_of(), [length // 3 for length in LENS]
    types = [
        [0] * first + [1] * (length - first) for first, length in zip(first_lens, LENS, strict=True)
    ]
    given = [each.tolist() for each in sequences]
    expected = reference_logits(tmp_path, given, types)
    rows = model.embed(sequences, first_lens)
    assert rows.shape == (len(LENS), 3)
    assert np.abs(rows - expected).max() <= 1e-5 * np.abs(expected).max()
    alone = np.concatenate(
        [model.embed([each], [first]) for each, first in zip(sequences, first_lens, strict=True)]
    )
    assert np.abs(alone - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(model.finished(rows, 0, None) - softmax(expected)).max() <= 1e-5
    assert model.finished(rows, 0, False).tolist() == rows.tolist()
    assert model.head is not None
    assert (model.head.labels, model.dimensions, model.needs_template) == (LABELS, 3, False)
    assert expected.std(0).max() > 0.02  # or mixed up rows would not show


def test_types_matter(tmp_path: Path) -> None:
    model, [*_, sequence] = load(save_classifier("BERT", tmp_path)), sequences_of()
    found = [model.embed([sequence], [first])[0, 0] for first in (0, 1, 2, None)]
    assert len({round(float(each), 6) for each in found}) == 3  # 2: all tokens


def test_a_class_that_looks_at_the_mean(tmp_path: Path) -> None:
    save_classifier("ModernBERT", tmp_path, labels=LABELS, classifier_pooling="mean")
    model, sequences = load(tmp_path), sequences_of()
    expected = reference_logits(tmp_path, [each.tolist() for each in sequences])
    assert model.recipe.pooling == "mean"
    assert np.abs(model.embed(sequences) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["DeBERTa", "MPNet"])
def test_models_that_ignore_their_attention_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="ForSequenceClassification cannot be served for cla"):
        load(save_classifier(name, tmp_path))


@pytest.mark.parametrize(
    ("labels", "config", "modules", "expected"),
    [
        (("a",), {}, {}, torch.sigmoid),
        (LABELS, {}, {}, lambda x: x.softmax(-1)),
        (("a",), {"problem_type": "regression"}, {}, lambda x: x),
        (LABELS, {"problem_type": "multi_label_classification"}, {}, torch.sigmoid),
        (LABELS, {"problem_type": "single_label_classification"}, {}, lambda x: x.softmax(-1)),
        (
            ("a",),
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            {},
            lambda x: x,
        ),
        (
            ("a",),
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            {},
            torch.tanh,
        ),
        (("a",), {}, {"activation_fn": "torch.nn.modules.linear.Identity"}, lambda x: x),
    ],
)
def test_activations(
    labels: tuple[str, ...], config: Any, modules: Any, expected: Any, tmp_path: Path
) -> None:
    """As sentence-transformers' files say, else as config.json does."""
    save_classifier("BERT", tmp_path, labels=labels, **config)
    if modules:
        path = tmp_path / "config_sentence_transformers.json"
        path.write_text(json.dumps(modules))
    model, sequences = load(tmp_path), sequences_of()
    rows = model.embed(sequences)
    found = model.finished(rows, 0, None)
    assert np.abs(found - expected(torch.from_numpy(rows)).numpy()).max() <= 1e-6


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    save_classifier("BERT", tmp_path, sbert_ce_default_activation_function="my.Module")
    with pytest.raises(ModelLoadError, match=r'its activation is "my.Module", allowed: Identity'):
        load(tmp_path)


@pytest.mark.parametrize("method", [None, "from_2_way_softmax", "no_post_processing"])
def test_a_decoder_that_answers_with_a_word(method: str | None, tmp_path: Path) -> None:
    """As Qwen3-Reranker: a class is the probability of its token, among those named."""
    save_decoder("Qwen3", tmp_path)
    overrides: dict[str, Any] = {**NO_YES, "method": method}
    if method is None:  # as vLLM's users write it
        named = ["Qwen3ForSequenceClassification"]
        overrides = {**NO_YES, "architectures": named, "is_original_qwen3_reranker": True}
    model, sequences = load(tmp_path, hf_overrides=overrides), sequences_of()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = [VOCABULARY.index("cat"), VOCABULARY.index("dog")]
    with torch.inference_mode():
        last = [
            whole(input_ids=torch.from_numpy(each.astype(np.int64))[None]).logits[0, -1, ids]
            for each in sequences
        ]
    expected = torch.stack(last).softmax(-1).numpy()
    assert np.ptp(expected[:, 1]) > 0.1
    assert model.needs_template
    assert model.head is not None
    found = model.finished(model.embed(sequences), 0, None)
    if method == "no_post_processing":
        assert model.head.labels == ("cat", "dog")
        assert np.abs(found - expected).max() <= 1e-5
    else:
        assert model.head.labels == ("dog",)
        assert np.abs(found - expected[:, 1:]).max() <= 1e-5


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({}, r"Qwen3ForCausalLM has no head that classifies; .*classifier_from_token"),
        ({"classifier_from_token": "no"}, "allowed: a list of tokens"),
        ({"classifier_from_token": ["no"]}, "has 1 tokens, allowed with from_2_way_softmax: 2"),
        ({"classifier_from_token": ["cat", "nothing"]}, "'nothing', which is no token of the mod"),
        (
            {**NO_YES, "architectures": ["LlamaForSequenceClassification"]},
            r"allowed: \['Qwen3ForSequenceClassification'\]",
        ),
        ({**NO_YES, "method": "other"}, "method is 'other', allowed: from_2_way_softmax"),
    ],
)
def test_decoders_that_are_refused(overrides: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=why):
        load(save_decoder("Qwen3", tmp_path), hf_overrides=overrides)


def test_missing_weights_of_a_head_are_named(tmp_path: Path) -> None:
    folder = save_classifier("BERT", tmp_path)
    with pytest.raises(ModelLoadError, match=r"its weights lack \d+ tensors"):
        load(folder, hf_overrides={"num_hidden_layers": 4})
