"""Requests that begin with outputs, seeds included, in vLLM's process that computes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

NAME = "slipstream_core.vllm_engine.worker_extension"


@pytest.fixture
def state_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a `CachedRequestState` as vLLM's V1 runner does, once the extension is imported."""
    for name in ("vllm.v1.worker", "vllm.v1.worker.gpu_model_runner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    runner: Any = sys.modules["vllm.v1.worker.gpu_model_runner"]
    monkeypatch.setattr(sys.modules["vllm.v1.worker"], "gpu_model_runner", runner, raising=False)
    runner.CachedRequestState = SimpleNamespace
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    extension = importlib.import_module(NAME)
    extension._patch()  # again: nothing is wrapped twice

    def make(outputs: list[int] | None, seed: int | None = None) -> Any:
        extra = None if outputs is None else {extension.EARLIER: outputs}
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        params = SimpleNamespace(extra_args=extra)
        return runner.CachedRequestState(
            sampling_params=params, generator=generator, output_token_ids=[], req_id="1.1"
        )

    yield make
    sys.modules.pop(NAME, None)


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


def draws(seed: int, num: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [draw(generator) for _ in range(num)]


@pytest.mark.parametrize("outputs", [None, [], [5], [5, 6, 7]])
def test_a_request_begins_with_its_outputs_and_where_its_seed_stood(
    state_of: Any, outputs: list[int] | None
) -> None:
    state = state_of(outputs, seed=9)
    num = len(outputs or ())
    assert state.output_token_ids == (outputs or [])
    assert state.req_id == "1.1"
    assert [draw(state.generator) for _ in range(4)] == draws(9, num + 4)[num:]


def test_a_request_without_a_seed_has_no_generator(state_of: Any) -> None:
    assert state_of([5]).generator is None
    assert state_of([5]).output_token_ids == [5]


def test_a_generator_that_is_stepped_back_stands_behind_the_outputs(state_of: Any) -> None:
    state = state_of([5, 6], seed=3)
    draw(state.generator)
    state.generator.set_offset(state.generator.get_offset() - 4)
    assert draw(state.generator) == draws(3, 3)[-1]
    state.output_token_ids.append(7)  # as the runner does
    draw(state.generator)
    state.generator.set_offset(state.generator.get_offset() - 4)
    assert draw(state.generator) == draws(3, 4)[-1]
