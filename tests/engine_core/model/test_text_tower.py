"""Multimodal checkpoints: their language part is served, and what is beside it is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import load_model
from slipstream_core.sharding.rank import Rank
from slipstream_lab.models import tiny_models

TINY = next(each for each in tiny_models.ARCHITECTURES if each.name == "Qwen3-VL, as text")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    tiny_models.save(TINY, folder)
    return folder


def without(folder: Path, part: str, to: Path) -> Path:
    """A copy of a checkpoint without the tensors that have `part` in their names."""
    for file in folder.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_towers_are_removed_whether_the_checkpoint_has_them_or_not(
    saved: Path, tmp_path: Path
) -> None:
    whole = load_model(str(saved), device="cpu")
    alone = load_model(str(without(saved, "visual.", tmp_path)), device="cpu")
    for model in (whole, alone):
        names = [name for name, _ in model.module.named_parameters()]
        assert names
        assert not any("visual" in name for name in names)
    ours, theirs = whole.module.state_dict(), alone.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_of_the_language_part_are_missed(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="lacks 4 of the weights"):
        load_model(str(without(saved, "up_proj", tmp_path)), device="cpu")


def test_ranks_are_refused(saved: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"served as text.*set tensor_parallel_size to 1"):
        load_model(str(saved), device="cpu", rank=Rank(0, 2))


def test_a_type_that_writes_no_text_is_refused_in_our_words(tmp_path: Path) -> None:
    transformers.CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(tmp_path), device="cpu")
    assert "CLIPConfig" not in str(refused.value)
    assert "(clip) has no class in transformers that writes text" in str(refused.value)
