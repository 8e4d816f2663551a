"""Which mixers are recorded, and that a recording that computes something else is not used."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream_core.forward import trace
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.states import flat_mixers
from slipstream_core.states.flat_mixers import mixer_markers
from slipstream_core.states.flat_step import FlatStep
from slipstream_core.states.state_cache import MixerStates, StateError, StateShape
from slipstream_lab.models import tiny_models

FOUND: Any = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def logs(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    torch.set_num_threads(1)
    caplog.set_level(logging.DEBUG, logger="slipstream_core.forward")
    return caplog


def loaded(name: str, folder: Path) -> LoadedModel:
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == name)
    tiny_models.save(tiny, folder)
    return load_model(str(folder), device="cpu", dtype="float32")


def recorded(name: str, folder: Path) -> Any:
    model = loaded(name, folder)
    return trace.trace(model.module, FOUND, model.vocab_size, states=model.states)


@pytest.mark.parametrize(
    "name",
    [
        *("Qwen3.5", "LFM2", "LFM3", "Bamba", "Mamba 2", "Falcon-H1", "OLMo Hybrid"),
        *("Nemotron-H", "Nemotron-H, limited", "Mamba", "Jamba"),
        "Falcon-Mamba",  # whose norms have no weights
    ],
)
def test_a_decode_step_is_one_call(
    name: str, tmp_path: Path, logs: pytest.LogCaptureFixture
) -> None:
    assert recorded(name, tmp_path) is not None
    assert "operations in one call" in logs.text


@pytest.mark.parametrize("names", ["_CONVOLUTIONS", "_RECURRENCES"])
def test_what_kernels_do_not_compute_is_not_recorded(
    names: str, tmp_path: Path, logs: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_mixers, names, ("functions", "of", "other", "names"))
    assert recorded("Mamba", tmp_path) is None
    assert "MambaMixer computes its states in an unknown way" in logs.text


def test_mixers_that_would_compute_something_else_run_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: pytest.LogCaptureFixture
) -> None:
    model = loaded("LFM2", tmp_path)
    mixed = partial(trace.kernels_mix, model.module, FOUND, model.vocab_size, model.states)
    assert mixed()
    not_activated(monkeypatch)
    assert mixed()  # LFM2's convolution has no activation
    always_new(monkeypatch)
    assert not mixed()
    assert "tokens differ" in logs.text


def other_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    recur = FlatStep.recur

    def changed(step: FlatStep, query: Any, key: Any, value: Any, decay: Any, *more: Any) -> Any:
        return recur(step, query, key, value, decay * 0.9, *more)

    monkeypatch.setattr(FlatStep, "recur", changed)


def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    init = FlatStep.__init__

    def changed(step: FlatStep, *parts: Any, **rows: Any) -> None:
        init(step, *parts, **rows)
        step._columns.begins[:] = 1

    monkeypatch.setattr(FlatStep, "__init__", changed)


def not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    convolve = FlatStep.convolve

    def changed(step: FlatStep, *given: Any) -> Any:
        return convolve(step, *given[:-1], False)

    monkeypatch.setattr(FlatStep, "convolve", changed)


@pytest.mark.parametrize(
    "mutant", [other_decay, always_new, not_activated], ids=lambda it: it.__name__
)
def test_a_recording_that_differs_is_not_used(
    mutant: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logs: pytest.LogCaptureFixture,
) -> None:
    mutant(monkeypatch)
    assert recorded("Qwen3.5", tmp_path) is None
    assert "tokens differ" in logs.text


def test_states_of_another_type_are_refused() -> None:
    states = MixerStates({0: StateShape((4, 3), torch.bfloat16)}, {})
    with pytest.raises(StateError, match="a state is"):
        mixer_markers([states])
