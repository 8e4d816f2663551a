"""Whole tiny models with Triton's kernels: token for token what transformers' generate says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs a model on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from slipstream_core.attention.triton_backend import TritonContext
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.model.loader import load_model
from slipstream_core.runner import torch_runner
from slipstream_lab.models import tiny_models

# window and softcap; norms of queries and keys; sinks; latents. In float32 torch records no
# grouped product, so models with experts are not fused here, as on a card in float32.
NUM_OUTPUTS = 5
NAMES = {"Gemma 2": True, "Qwen3": True, "GPT-OSS": False, "DeepSeek V3 (MLA)": False}


@pytest.mark.parametrize(("name", "is_fused"), NAMES.items())
def test_equals_generate(
    name: str, is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_models, "NUM_OUTPUTS", NUM_OUTPUTS)
    calls = []
    for way in ("attend", "attend_stored"):
        attend = getattr(TritonContext, way)
        monkeypatch.setattr(
            TritonContext,
            way,
            lambda self, *args, way=way, attend=attend: (calls.append(way), attend(self, *args))[1],
        )
    traced: list[object] = []
    trace = torch_runner.trace_for_card

    def noted(*args: Any) -> Any:
        traced.append(trace(*args))
        return traced[-1]

    monkeypatch.setattr(torch_runner, "trace_for_card", noted)
    norms = []
    normed = ForwardOps.rms_norm
    monkeypatch.setattr(
        ForwardOps, "rms_norm", lambda self, *args: (norms.append(1), normed(self, *args))[1]
    )
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == name)
    tiny_models.save(architecture, tmp_path)
    expected = tiny_models.generate(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    (served,) = tiny_models.serve(model, tiny_models.CHUNKED)
    assert served.outputs == expected
    assert len(calls) > 4 * NUM_OUTPUTS, "Triton's kernels attended"
    assert set(calls) == {"attend_stored" if is_fused else "attend"}
    assert [forward is not None for forward in traced] == [is_fused]
    assert len(norms) >= NUM_OUTPUTS * is_fused, "the fused forward ran in each step"
