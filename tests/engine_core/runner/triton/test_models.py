"""Whole tiny models with Triton's kernels: token for token what transformers' generate says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs a model on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from slipstream_bench.models import tiny_models
from slipstream_core.runner.attention.triton_backend import TritonContext
from slipstream_core.runner.model.loader import load_model

NAMES = ("Gemma 2", "GPT-OSS", "DeepSeek V3 (MLA)")  # window and softcap; sinks; Dk and Dv


@pytest.mark.parametrize("name", NAMES)
def test_equals_generate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    monkeypatch.setattr(tiny_models, "NUM_OUTPUTS", 8)
    calls = []
    attend = TritonContext.attend
    monkeypatch.setattr(
        TritonContext, "attend", lambda self, *args: (calls.append(1), attend(self, *args))[1]
    )
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == name)
    tiny_models.save(architecture, tmp_path)
    expected = tiny_models.generate(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    (served,) = tiny_models.serve(model, tiny_models.CHUNKED)
    assert served.outputs == expected
    assert len(calls) > 4 * 8, "Triton's kernels attended"
