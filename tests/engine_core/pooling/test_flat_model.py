"""Vectors of sequences beside others, against what transformers computes of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.helpers.embedders import (
    CONFIGS,
    VOCAB_SIZE,
    WIDTH,
    WRONG,
    reference_vectors,
    save_embedder,
)

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.pooling.flat_model import FlatModel, finished, load_flat_model

LENS = 1, 3, 7, 7, 20, 20, 20, 41, 90, 2


def load(folder: Path, **settings: Any) -> FlatModel:
    return load_flat_model(CoreConfig(model=str(folder), address="", device="cpu", **settings))


def sequences_of(lens: tuple[int, ...] = LENS) -> list[npt.NDArray[np.uint32]]:
    random = np.random.default_rng(1)
    return [random.integers(5, VOCAB_SIZE, length, dtype=np.uint32) for length in lens]


def embed(model: FlatModel, sequences: list[npt.NDArray[np.uint32]]) -> npt.NDArray[np.float32]:
    return finished(model.embed(sequences), model.dimensions, normalizes=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_are_transformers_own(name: str, tmp_path: Path) -> None:
    pooling = "lasttoken" if name in ("Qwen3", "Llama", "Mistral") else "mean"
    model = load(save_embedder(name, tmp_path, pooling=pooling))
    sequences = sequences_of()
    expected = reference_vectors(tmp_path, [each.tolist() for each in sequences], pooling)
    together = embed(model, sequences)
    assert together.shape == (len(LENS), WIDTH)
    assert (together * expected).sum(1).min() >= 0.99999
    assert np.abs(together - expected).max() <= 1e-5
    alone = np.concatenate([embed(model, [each]) for each in sequences])
    assert np.abs(alone - expected).max() <= 1e-5
    # of different sequences, so that they show whether rows are mixed up
    assert (expected @ expected.T - np.eye(len(LENS))).max() < 0.9999


@pytest.mark.parametrize("name", WRONG)
def test_models_that_ignore_their_attention_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"(MPNetModel|DebertaV2Model) cannot be served"):
        load(save_embedder(name, tmp_path))


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("name", ["BERT", "Qwen3"])
def test_poolings(name: str, pooling: str, tmp_path: Path) -> None:
    model = load(save_embedder(name, tmp_path, pooling=pooling))
    sequences = sequences_of()
    expected = reference_vectors(tmp_path, [each.tolist() for each in sequences], pooling)
    assert np.abs(embed(model, sequences) - expected).max() <= 1e-5


def test_a_dense_layer_behind_the_pooling(tmp_path: Path) -> None:
    folder = save_embedder("BERT", tmp_path, modules=("Dense", "Normalize"))
    model, sequences = load(folder), sequences_of()
    assert model.dimensions == WIDTH // 2
    expected = reference_vectors(folder, [each.tolist() for each in sequences], dense=True)
    assert np.abs(embed(model, sequences) - expected).max() <= 1e-5


@pytest.mark.parametrize(("name", "pooling"), [("BERT", "cls"), ("Qwen3", "lasttoken")])
def test_without_modules_it_is_pooled_as_vllm_does(name: str, pooling: str, tmp_path: Path) -> None:
    model, sequences = load(save_embedder(name, tmp_path, pooling=None)), sequences_of()
    expected = reference_vectors(tmp_path, [each.tolist() for each in sequences], pooling)
    assert np.abs(embed(model, sequences) - expected).max() <= 1e-5
    assert model.recipe.normalizes


def test_vectors_are_cut_before_they_are_normalised() -> None:
    vectors = np.array([[3.0, 4.0, 12.0]], np.float32)
    assert finished(vectors, 3, normalizes=False).tolist() == vectors.tolist()
    assert finished(vectors, 2, normalizes=False).tolist() == [[3.0, 4.0]]
    assert finished(vectors, 2, normalizes=True) == pytest.approx(np.array([[0.6, 0.8]]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [16, 8]}, (8, 16))],
)
def test_lengths_that_vectors_may_have(given: Any, expected: Any, tmp_path: Path) -> None:
    assert load(save_embedder("BERT", tmp_path), hf_overrides=given).matryoshka == expected


def test_wrong_lengths_are_refused(tmp_path: Path) -> None:
    folder = save_embedder("BERT", tmp_path)
    with pytest.raises(ModelLoadError, match="allowed: integers from 1 to 32"):
        load(folder, hf_overrides={"matryoshka_dimensions": [64]})


def test_the_longest_sequence(tmp_path: Path) -> None:
    """RoBERTa has no positions up to its padding id."""
    folder = save_embedder("RoBERTa", tmp_path)
    assert load(folder).max_model_len == 126
    assert load(folder, max_model_len=20).max_model_len == 20
    with pytest.raises(ModelLoadError, match="max_model_len is 127, allowed: at most 126"):
        load(folder, max_model_len=127)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 50}')
    model = load(folder)
    assert model.max_model_len == 50
    longest = sequences_of((50,))
    assert (
        np.abs(embed(model, longest) - reference_vectors(folder, [longest[0].tolist()])).max()
        <= 1e-5
    )


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = save_embedder("BERT", tmp_path)
    settings = {"num_hidden_layers": 4}
    with pytest.raises(
        ModelLoadError, match=r"its weights lack \d+ tensors, such as encoder.layer.3"
    ):
        load(folder, hf_overrides=settings)
