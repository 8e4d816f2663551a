"""Multimodal checkpoints: their language part is served, and what is beside it is removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.leftover_tensors import is_beside_text
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


NAMINGS = {
    "as it is": ("", ""),
    "as older ones": ("model.language_model.", "language_model.model."),
    "as text": ("model.language_model.", "model."),
}
# of which a part beside the language model has a name of its own
FURTHER = {"VideoLLaMA 3, as text", "MiniCPM-V 4.6, as text"}
ANY_CLASS = [
    each
    for each in (*tiny_models.ARCHITECTURES, *tiny_models.HYBRIDS)
    if each.name.endswith("as text") and "LLaVA" not in each.name
]
ANY_CLASS += [each for each in tiny_models.FURTHER if each.name in FURTHER]


@pytest.mark.parametrize("architecture", ANY_CLASS, ids=lambda each: each.name)
@pytest.mark.parametrize("config", ["whole", "text"])
def test_names_of_another_class_of_the_model_are_read(
    architecture: tiny_models.Architecture, config: str, tmp_path: Path
) -> None:
    """Of the whole model, of the language part alone, and as they were saved some years ago."""
    saved = tmp_path / "saved"
    tiny_models.save(architecture, saved)
    weights = load_file(saved / "model.safetensors")
    given = json.loads((saved / "config.json").read_text())
    expected = load_model(str(saved), device="cpu").module.get_decoder().state_dict()
    if config == "text":
        given["text_config"]["tie_word_embeddings"] = given.get("tie_word_embeddings", False)
        given = given["text_config"]
    for naming, (old, new) in NAMINGS.items():
        folder = tmp_path / naming
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(given))
        renamed = {name.replace(old, new): weight for name, weight in weights.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        module = load_model(str(folder), device="cpu").module
        found = module.get_decoder().state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        head = module.get_output_embeddings().weight
        assert torch.equal(head, weights[next(each for each in weights if "lm_head" in each)])
        assert not any(is_beside_text(name) for name, _ in module.named_parameters())


def test_of_a_model_of_several_the_one_that_writes_is_served(tmp_path: Path) -> None:
    """Qwen's Omni think, talk and make waves; the whole has no forward."""
    [thinker] = (each for each in tiny_models.FURTHER if each.name == "Qwen3-Omni, as text")
    saved = tmp_path / "saved"
    tiny_models.save(thinker, saved)
    part = load_model(str(saved), device="cpu").module
    weights = load_file(saved / "model.safetensors")
    omni = {f"thinker.{name}": weight for name, weight in weights.items()}
    for name in ("talker.model.embed_tokens.weight", "code2wav.decoder.0.weight"):
        omni[name] = torch.zeros(4, 4)
    whole = transformers.Qwen3OmniMoeConfig(thinker_config=thinker.config().to_dict())
    whole.save_pretrained(tmp_path)
    save_file(omni, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found, expected = load_model(str(tmp_path), device="cpu").module.state_dict(), part.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_two_language_models_in_a_checkpoint_are_not_guessed_at(
    saved: Path, tmp_path: Path
) -> None:
    weights = load_file(saved / "model.safetensors")
    twice = {
        name.replace("model.language_model", "one.model"): each for name, each in weights.items()
    }
    twice |= {name.replace("one.", "two."): each.clone() for name, each in twice.items()}
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    save_file(twice, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks \d+ of the weights"):
        load_model(str(tmp_path), device="cpu")


def test_ranks_are_refused(saved: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"served as text.*set tensor_parallel_size to 1"):
        load_model(str(saved), device="cpu", rank=Rank(0, 2))


def test_a_type_that_writes_no_text_is_refused_in_our_words(tmp_path: Path) -> None:
    transformers.CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as refused:
        load_model(str(tmp_path), device="cpu")
    assert "CLIPConfig" not in str(refused.value)
    assert "(clip) has no class in transformers that writes text" in str(refused.value)
