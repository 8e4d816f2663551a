"""The adapter to FlashInfer, over a stand-in that has its signatures."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from tests.helpers import fake_flashinfer
from tests.helpers.torch_driver import BLOCK, PROMPTS, Driver, Request, save_model

from slipstream_core.runner.attention import backend_choice, flashinfer_backend
from slipstream_core.runner.attention.backend_choice import AttentionBackend
from slipstream_core.runner.attention.flashinfer_backend import why_no_flashinfer
from slipstream_core.runner.attention.geometry import LayerGeometry
from slipstream_core.runner.load_error import ModelLoadError
from slipstream_core.runner.model.loader import LoadedModel, load_model
from slipstream_core.runner.torch_runner import TorchRunner

CARD = torch.device("cuda")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(backend_choice, "why_no_flashinfer", lambda *_: None)
    monkeypatch.setattr(flashinfer_backend, "_WORKSPACE_BYTES", 1)


def runner_of(model: LoadedModel, backend: AttentionBackend) -> TorchRunner:
    return TorchRunner(
        model,
        num_blocks=200,
        block_size=BLOCK,
        max_num_seqs=len(PROMPTS),
        threads=1,
        native=False,
        attention_backend=backend,
    )


def outputs(runner: TorchRunner) -> list[list[int]]:
    requests = [Request(prompt, 6) for prompt in PROMPTS]
    driver = Driver(runner, budget=24, seed=3)
    driver.run(requests)
    assert driver.num_mixed
    return [request.output for request in requests]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", ["llama", "mistral"])  # the latter with a window
def test_tokens_are_those_of_torchs_operators(tmp_path: Path, kind: str) -> None:
    model = load_model(str(save_model(tmp_path / kind, kind)), dtype="float32", device="cpu")
    with contextlib.closing(runner_of(model, "torch")) as plain:
        expected = outputs(plain)
    with contextlib.closing(runner_of(model, "flashinfer")) as runner:
        assert runner._flashinfer is not None
        assert outputs(runner) == expected


@pytest.mark.usefixtures("stand_in")
def test_a_step_is_planned_once_for_all_layers_and_by_wrappers_in_turn(tmp_path: Path) -> None:
    model = load_model(str(save_model(tmp_path / "llama")), dtype="float32", device="cpu")
    with contextlib.closing(runner_of(model, "flashinfer")) as runner:
        driver = Driver(runner, budget=24)
        driver.run([Request(PROMPTS[0], 7)])
        attention = runner._flashinfer
        assert attention is not None
        sets = [list(each.values()) for each in attention._sets]
    assert driver.num_steps == 7
    assert [len(each) for each in sets] == [1, 1, 1]
    assert [each[0].decode.num_plans for each in sets] == [2, 2, 2], "of the steps behind the first"
    assert sum(each[0].prefill.num_plans for each in sets) == 1


def layer(
    key_dim: int = 128,
    value_dim: int = 128,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> LayerGeometry:
    return LayerGeometry(8, 2, key_dim, value_dim, window, softcap, has_sinks)


@pytest.mark.parametrize(
    ("geometry", "dtype", "device", "why"),
    [
        (layer(), torch.bfloat16, torch.device("cpu"), "needs an NVIDIA card"),
        (layer(), torch.float32, CARD, "the model in float32"),
        (layer(has_sinks=True), torch.bfloat16, CARD, "attention sinks"),
        (layer(192, 128), torch.bfloat16, CARD, "keys of 192 and values of 128"),
        (layer(96, 96), torch.bfloat16, CARD, "heads have 96 numbers"),
    ],
)
def test_what_it_cannot_serve_is_told(
    monkeypatch: pytest.MonkeyPatch,
    geometry: LayerGeometry,
    dtype: torch.dtype,
    device: torch.device,
    why: str,
) -> None:
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda _: object())
    assert why in str(why_no_flashinfer([layer(), geometry], dtype, device))


def test_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served = [layer(), layer(64, 64, window=512), layer(256, 256, softcap=50.0)]
    assert "pip install flashinfer-python" in str(why_no_flashinfer(served, torch.bfloat16, CARD))
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda _: object())
    for dtype in (torch.float16, torch.bfloat16):
        assert why_no_flashinfer(served, dtype, CARD) is None


def test_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = load_model(str(save_model(tmp_path / "llama")), dtype="float32", device="cpu")
    with pytest.raises(ModelLoadError, match=r"'flashinfer', but .* allowed here are 'auto'"):
        runner_of(model, "flashinfer")
