"""Models in slices: the same tokens as whole, chunked, preempted and one step ahead, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.lockstep_ranks import LockstepRanks, lockstep_ranks

from slipstream_core.forward.trace import TRIALS
from slipstream_core.model.loader import load_model
from slipstream_lab.models import tiny_models

pytestmark = pytest.mark.process

PLANLESS = ("GPT-2", "GPT-BigCode", "OPT")
SHARED_KEY_HEADS = ("Llama", "Qwen2", "Qwen3-MoE", "Gemma 2", "Cohere, normed heads")
# whose decode steps are one call, as those of the whole model are
ONE_CALL = (
    *("Llama", "Llama, llama3 rope", "Llama, tied embeddings", "Qwen2", "Qwen2, sliding window"),
    *("Qwen3", "Qwen3, YaRN rope", "Mistral, sliding window", "Ministral, sliding window"),
    *(
        "Arcee",
        "SmolLM3",
        "Seed-OSS",
        "Granite",
        "Qwen2-MoE",
        "Qwen3-MoE",
        "Mixtral",
        "GPT-OSS",
        "Granite-MoE",
    ),
    "GLM-4-MoE",
)
SERVED = [each for each in tiny_models.ARCHITECTURES if each.refused is None]
AS_TEXT = [
    each
    for each in SERVED
    if each.config().get_text_config().model_type != each.config().model_type
]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LockstepRanks]:
    with lockstep_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[LockstepRanks]:
    with lockstep_ranks(4) as ranks:
        yield ranks


def saved(architecture: Any, folder: Path) -> tuple[Path, list[list[int]], int, int]:
    """A checkpoint, its whole model's tokens, its bytes, and the bytes of a token in its cache."""
    torch.set_num_threads(1)
    tiny_models.save(architecture, folder)
    model = load_model(str(folder), device="cpu", dtype="float32")
    weights = sum(each.nbytes for each in model.module.parameters())
    cache = sum(each.bytes_per_token(model.dtype) for each in model.geometry)
    [served] = tiny_models.serve(model, tiny_models.CHUNKED)
    return folder, served.outputs, weights, cache


def check(said: list[dict[str, Any]], expected: list[list[int]]) -> None:
    for rank in said:
        assert "error" not in rank
        for variant in tiny_models.VARIANTS:
            assert rank[variant.name] == expected, variant.name


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, id=each.name)
        for each in SERVED
        if each.name not in PLANLESS and each not in AS_TEXT
    ],
)
def test_two_ranks_say_what_one_says(
    architecture: Any, two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    folder, expected, weights, cache = saved(architecture, tmp_path)
    said = two_ranks.serve(folder)
    check(said, expected)
    for rank in said:
        # every rank has the whole latents, of which each of its heads makes keys and values
        assert rank["cache"] == (cache if "(MLA)" in architecture.name else cache / 2)
        assert rank["weights"] < 0.6 * weights
        assert (rank["one_calls"] > len(TRIALS)) == (architecture.name in ONE_CALL)


@pytest.mark.parametrize("architecture", [pytest.param(each, id=each.name) for each in AS_TEXT])
def test_multimodal_models_are_not_cut(
    architecture: Any, two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    tiny_models.save(architecture, tmp_path)
    for rank in two_ranks.serve(tmp_path):
        assert "is served as text, and such models are not cut for several" in rank["error"]


@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_recorded_steps_of_two_ranks_say_what_one_says(
    name: str, two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    [architecture] = [each for each in SERVED if each.name == name]
    folder, expected, _, _ = saved(architecture, tmp_path)
    said = two_ranks.serve_recorded(folder)
    check(said, expected)
    lead, other = said
    # what the other one could not record is not used by either
    assert lead["recorded"] == other["recorded"] > 4
    assert lead["replays"] > other["replays"] > 0  # it samples, too


@pytest.mark.parametrize(("name", "launches"), [("Llama", 10), ("Qwen3-MoE", 15)])
def test_a_fused_layer_of_a_rank_is_that_of_a_whole_model_and_two_sums(
    name: str, launches: int, two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    [architecture] = [each for each in SERVED if each.name == name]
    tiny_models.save(architecture, tmp_path)
    assert [each["launches"] for each in two_ranks.launches(tmp_path)] == [launches + 2] * 2


@pytest.mark.parametrize("name", PLANLESS)
def test_an_architecture_without_a_plan_is_refused_by_name(
    name: str, two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    [architecture] = [each for each in SERVED if each.name == name]
    tiny_models.save(architecture, tmp_path)
    for rank in two_ranks.serve(tmp_path):
        assert "has no tensor parallel plan" in rank["error"]
        assert architecture.config_class.removesuffix("Config") in rank["error"]


def test_sparse_gates_are_chosen_among_those_of_all_ranks(
    two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    """As Gemma 3n's, by their mean and variance."""
    [gemma] = [each for each in SERVED if each.name == "Gemma 3"]
    options = {
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": tiny_models.VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    }
    gemma = replace(gemma, config_class="Gemma3nTextConfig", options=gemma.options | options)
    folder, expected, _, _ = saved(gemma, tmp_path)
    check(two_ranks.serve(folder), expected)


def test_an_embedding_that_the_plan_leaves_out_is_tied_to_a_cut_head(
    two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    [neox] = [each for each in SERVED if each.name == "GPT-NeoX"]
    tied = replace(neox, options=neox.options | {"tie_word_embeddings": True})
    folder, expected, weights, _ = saved(tied, tmp_path)
    said = two_ranks.serve(folder)
    check(said, expected)
    assert all(rank["weights"] < 0.55 * weights for rank in said)


@pytest.mark.parametrize("name", SHARED_KEY_HEADS)
def test_four_ranks_over_two_key_heads_say_what_one_says(
    name: str, four_ranks: LockstepRanks, tmp_path: Path
) -> None:
    [architecture] = [each for each in SERVED if each.name == name]
    folder, expected, _, cache = saved(architecture, tmp_path)
    said = four_ranks.serve(folder)
    check(said, expected)
    assert [rank["cache"] for rank in said] == [cache / 2] * 4


def test_a_rank_never_holds_more_than_its_slice(two_ranks: LockstepRanks, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    [llama] = [each for each in SERVED if each.name == "Llama"]
    tiny = tmp_path / "tiny"
    tiny_models.save(llama, tiny)
    two_ranks.load(tiny)  # whatever comes with the first model
    large = replace(llama, options=llama.options | sizes)
    tiny_models.save(large, tmp_path / "large")
    whole = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert whole > 200 << 20
    for rank in two_ranks.load(tmp_path / "large"):
        assert 0.45 * whole < rank["weights"] < 0.55 * whole
        # slices of columns are copies, those of rows stay mapped
        assert 0.1 * whole < rank["peak"] < 0.6 * whole
