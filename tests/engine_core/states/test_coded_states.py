"""Hybrid models whose matrices are codes say what the dequantised model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream_core.kernels.codes.coded_parameter import coded_parameters, dequantise_parameters
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_lab.models import tiny_models

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")
SERVED = [each for each in tiny_models.HYBRIDS if each.refused is None]
VARIANTS = (tiny_models.PREEMPTED, tiny_models.CACHED)


def load(folder: Path, quantization: str | None = None) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype="float32", quantization=quantization)


@pytest.mark.parametrize("hybrid", SERVED, ids=lambda each: each.name)
def test_codes_say_what_the_dequantised_model_says(
    hybrid: tiny_models.Architecture, tmp_path: Path
) -> None:
    tiny_models.save(hybrid, tmp_path)
    coded, plain = load(tmp_path, "q8_0"), load(tmp_path, "q8_0")
    codes = list(coded_parameters(coded.module))
    assert len(codes) > hybrid.config().get_text_config().num_hidden_layers
    dequantise_parameters(plain.module)
    one, other = (tiny_models.serve(each, *VARIANTS) for each in (coded, plain))
    assert [each.outputs for each in one] == [each.outputs for each in other]
    assert one[1].num_cached == other[1].num_cached


@pytest.mark.parametrize("name", ["LFM2", "Qwen3.5", "Mamba 2"])
def test_16_bits_stay_so(name: str, tmp_path: Path) -> None:
    hybrid = next(each for each in SERVED if each.name == name)
    tiny_models.save(hybrid, tmp_path / "wide")
    narrow = load(tmp_path / "wide").module.to(torch.bfloat16)
    narrow.config.dtype = torch.bfloat16
    narrow.save_pretrained(tmp_path / "narrow")
    narrow.float().save_pretrained(tmp_path / "wide")
    coded, plain = load(tmp_path / "narrow"), load(tmp_path / "wide")
    assert list(coded_parameters(coded.module))
    assert not list(coded_parameters(plain.module))
    one, other = (tiny_models.serve(each, *VARIANTS) for each in (coded, plain))
    assert [each.outputs for each in one] == [each.outputs for each in other]
