"""Architectures, as tiny random models: token for token what generate says, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream_core.attention import interface
from slipstream_core.attention.chunked_layers import QueryScale
from slipstream_core.kernels.codes.coded_parameter import coded_parameters
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model import loader
from slipstream_core.model.loader import load_model
from slipstream_core.model.unsupported import refuse_chunks, take_counted_scale
from slipstream_lab.models import tiny_models

SERVED = [each for each in tiny_models.ARCHITECTURES if each.refused is None]
SERVED += tiny_models.WITHIN_LIMITS + tiny_models.FURTHER
QUICK = {"Qwen3.5", "LFM2", "Bamba", "Mamba 2"}  # a kind of mixer each
HYBRIDS = [
    pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.long])
    for each in tiny_models.HYBRIDS
]
REFUSED = [each for each in tiny_models.ARCHITECTURES if each.refused is not None]


@pytest.mark.quick
@pytest.mark.parametrize(
    "architecture",
    [*(pytest.param(each, id=each.name) for each in SERVED), *HYBRIDS],
)
def test_equals_generate(architecture: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    tiny_models.save(architecture, tmp_path)
    expected = tiny_models.generate(tmp_path)
    # a model that says one thing for ever would hide every mistake
    assert len({token for output in expected for token in output}) >= 8
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    variants = tiny_models.VARIANTS
    if model.states:
        variants = (*variants, tiny_models.CACHED)
    all_served = tiny_models.serve(model, *variants)
    for variant, served in zip(variants, all_served, strict=True):
        assert served.outputs == expected, variant.name
        assert (served.num_cached > 0) == variant.is_cached
        assert (served.num_preemptions > 0) == (variant is tiny_models.PREEMPTED)


def test_latents_of_a_16_bit_checkpoint_equal_generate(tmp_path: Path) -> None:
    """Latent attention reads the numbers of a matrix, which a coded one does not have."""
    torch.set_num_threads(1)
    [mla] = (each for each in SERVED if each.name.startswith("MiniCPM3"))
    tiny_models.save(mla, tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    model.config.dtype = torch.float32
    model.float().save_pretrained(tmp_path / "wide")
    loaded = load_model(str(tmp_path / "narrow"), device="cpu", dtype="float32")
    assert list(coded_parameters(loaded.module))
    [served] = tiny_models.serve(loaded, tiny_models.PACKED)
    assert served.outputs == tiny_models.generate(tmp_path / "wide")


@pytest.mark.parametrize("width", [36, 35])
def test_experts_of_any_width_are_served(width: int, tmp_path: Path) -> None:
    """Though torch's product of groups takes rows of whole 16 bytes alone."""
    torch.set_num_threads(1)
    [moe] = (each for each in SERVED if each.name == "Qwen3-MoE")
    odd = replace(moe, options=moe.options | {"moe_intermediate_size": width})
    tiny_models.save(odd, tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    [packed] = tiny_models.serve(model, tiny_models.PACKED)
    assert packed.outputs == tiny_models.generate(tmp_path, experts_implementation="eager")


def test_queries_are_not_scaled_by_their_place_in_a_step(tmp_path: Path) -> None:
    """Llama 4 counts a forward's tokens, whosever they are."""
    torch.set_num_threads(1)
    [llama] = (each for each in tiny_models.WITHIN_LIMITS if "Llama" in each.name)
    assert sum(tiny_models.PROMPT_LENS) > llama.options["floor_scale"]
    tiny_models.save(llama, tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    [packed] = tiny_models.serve(model, tiny_models.PACKED)
    assert packed.outputs == tiny_models.generate(tmp_path)


@pytest.mark.parametrize("part", ["chunk_of", "scaled_query"])
def test_chunks_and_scales_that_are_ignored_are_seen(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    [llama] = (each for each in SERVED if each.name == "Llama 4")
    tiny_models.save(llama, tmp_path)
    ignored = {"chunk_of": lambda _: None, "scaled_query": lambda _, query, __: query}
    monkeypatch.setattr(interface, part, ignored[part])
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    [packed] = tiny_models.serve(model, tiny_models.PACKED)
    assert packed.outputs != tiny_models.generate(tmp_path)


def test_a_scale_of_queries_of_unknown_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [qwen] = (each for each in SERVED if each.name == "Qwen2")
    tiny_models.save(qwen, tmp_path)
    monkeypatch.setattr(loader, "take_counted_scale", lambda *_: QueryScale(11, 9.0))
    with pytest.raises(ModelLoadError, match="scales queries by position in an unknown way"):
        load_model(str(tmp_path), device="cpu")


def test_chunks_and_scales_beyond_them_are_refused_on_cards() -> None:
    [llama] = (each for each in SERVED if each.name == "Llama 4")
    config, card = llama.config(), torch.device("cuda")
    for check, why in (
        (refuse_chunks, r"chunked_attention, which see 8 .* max_model_len is 12"),
        (take_counted_scale, r"from token 11 on .* max_model_len is 12"),
    ):
        with pytest.raises(ModelLoadError, match=why):
            check("m", config, config, 12, card)
        check("m", config, config, 8, card)


def test_rows_are_no_longer_than_what_an_indexer_selects(tmp_path: Path) -> None:
    [model] = (each for each in tiny_models.WITHIN_LIMITS if "DeepSeek" in each.name)
    tiny_models.save(model, tmp_path)
    overrides = {"index_topk": 64}
    with pytest.raises(ModelLoadError, match=r"see 64 tokens at most .* max_model_len is 128"):
        load_model(str(tmp_path), device="cpu", hf_overrides=overrides)
    load_model(str(tmp_path), device="cpu", hf_overrides=overrides, max_model_len=64)


@pytest.mark.parametrize("architecture", REFUSED, ids=[each.name for each in REFUSED])
def test_refused_with_the_reason(architecture: Any, tmp_path: Path) -> None:
    tiny_models.save(architecture, tmp_path)
    with pytest.raises(ModelLoadError) as error:
        load_model(str(tmp_path), device="cpu")
    said = str(error.value)
    assert architecture.refused in said
    assert architecture.config_class.removesuffix("Config").removesuffix("Text")[:4] in said
    assert "supported" in said  # and what is allowed


def test_windows_are_shorter_than_what_is_served() -> None:
    """Else a window that is ignored would not show."""
    longest = max(tiny_models.PROMPT_LENS) + tiny_models.NUM_OUTPUTS
    assert min(tiny_models.NUM_OUTPUTS, longest // 2) > tiny_models.WINDOW
    assert longest <= tiny_models.MAX_MODEL_LEN
