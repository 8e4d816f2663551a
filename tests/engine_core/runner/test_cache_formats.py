"""Caches of 8 bits: the same tokens alone, in a batch, in chunks and after a preemption, and those
of a model whose keys and values torch rounds the same way; refused where they cannot be served.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.helpers.rounded_caches import RoundedHistory

from slipstream_core.attention.cache_formats import CACHE_FORMATS, CacheFormat
from slipstream_core.config import CoreConfig
from slipstream_core.forward.trace import eager
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.fingerprint import fingerprint_of
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.kv_cache_size import block_bytes
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_lab.models import tiny_models

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")

FORMS: tuple[CacheFormat, ...] = ("fp8_e4m3", "int8_per_token_head")
QUICK = {"Llama", "GPT-OSS"}
SERVED = {*QUICK, "Qwen3-MoE", "Gemma 2", "Mistral, sliding window", "DeepSeek V3 (MLA)", "OPT"}
ARCHITECTURES = [
    pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.long])
    for each in tiny_models.ARCHITECTURES
    if each.name in SERVED
]


def load(architecture: Any, folder: Path) -> LoadedModel:
    torch.set_num_threads(1)
    tiny_models.save(architecture, folder)
    return load_model(str(folder), device="cpu", dtype="float32")


def continued(model: LoadedModel, form: CacheFormat) -> list[list[int]]:
    """Greedy outputs of the module itself, which attends to rounded keys and values."""
    forward = eager(model.module)
    outputs = []
    for prompt in tiny_models.prompts():
        history, output, new = RoundedHistory(form), [], prompt
        start = 0
        for _ in range(tiny_models.NUM_OUTPUTS):
            ids = torch.tensor([new])
            positions = torch.arange(start, start + len(new))[None]
            with torch.inference_mode():
                logits = forward(ids, positions, torch.tensor([len(new) - 1]), history)
            start += len(new)
            new = [int(logits[0, -1].argmax())]
            output += new
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_says_what_a_model_with_a_rounded_cache_says(
    architecture: Any, form: CacheFormat, tmp_path: Path
) -> None:
    model = load(architecture, tmp_path)
    expected = continued(model, form)
    model = replace(model, cache_format=form)
    variants = (*tiny_models.VARIANTS, tiny_models.PACKED, tiny_models.CACHED)
    for variant, served in zip(variants, tiny_models.serve(model, *variants), strict=True):
        assert served.outputs == expected, variant.name
        assert (served.num_preemptions > 0) == (variant is tiny_models.PREEMPTED)


def test_blocks_take_the_bytes_of_their_codes(tmp_path: Path) -> None:
    [llama] = (each for each in tiny_models.ARCHITECTURES if each.name == "Llama")
    model = load(llama, tmp_path)
    wide = block_bytes(model, 16)
    [layer, *_] = model.geometry
    heads = len(model.geometry) * layer.num_kv_heads * 16 * 2
    fp8, int8 = (block_bytes(replace(model, cache_format=form), 16) for form in FORMS)
    assert wide == 4 * fp8
    assert int8 == fp8 + 4 * heads
    for form, size in zip(FORMS, (fp8, int8), strict=True):
        runner = TorchRunner(
            replace(model, cache_format=form), num_blocks=9, block_size=16, max_num_seqs=2
        )
        assert runner.info.block_bytes == size
        memory = sum(each.nbytes for layer in runner._layers for each in layer.blocks)
        assert memory == 9 * size
        runner.close()


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_the_name_reaches_the_runner_and_the_fingerprint(name: Any, tmp_path: Path) -> None:
    [llama] = (each for each in tiny_models.ARCHITECTURES if each.name == "Llama")
    load(llama, tmp_path)
    config = CoreConfig(
        model=str(tmp_path), address="", device="cpu", num_blocks=20, kv_cache_dtype=name
    )
    runner = load_runner(config)
    assert {layer.format for layer in runner._layers} == {CACHE_FORMATS[name]}
    own = fingerprint_of(config, runner.info)
    same = {
        other
        for other in CACHE_FORMATS
        if fingerprint_of(structs.replace(config, kv_cache_dtype=other), runner.info) == own
    }
    assert same == {each for each in CACHE_FORMATS if CACHE_FORMATS[each] == CACHE_FORMATS[name]}
    runner.close()


def test_refused_where_nothing_reads_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [llama] = (each for each in tiny_models.ARCHITECTURES if each.name == "Llama")
    model = replace(load(llama, tmp_path), cache_format="fp8_e4m3")

    def made(model: LoadedModel, **options: Any) -> None:
        TorchRunner(model, num_blocks=9, block_size=16, max_num_seqs=2, **options)

    said = "kv_cache_dtype is 'fp8_e4m3', but "
    for config in (KernelConfig(native=False), KernelConfig(attention_backend="torch")):
        with pytest.raises(ModelLoadError, match=f"{said}native is false or attention_backend"):
            made(model, kernel_config=config)
    half = load_model(str(tmp_path), device="cpu", dtype="bfloat16")
    with pytest.raises(ModelLoadError, match=f"{said}the model computes in bfloat16"):
        made(replace(half, cache_format="fp8_e4m3"))
    monkeypatch.setattr("slipstream_core.runner.torch_runner.kernels", lambda: None)
    with pytest.raises(ModelLoadError, match=f"{said}the C kernels, which read them"):
        made(model)
