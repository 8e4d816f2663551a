"""Requests that begin with outputs, seeds included, in vLLM's process that computes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

NAME = "slipstream_core.vllm_engine.worker_extension"


VOCAB_SIZE = 70_001


def draw_once(logits: torch.Tensor, generators: dict[int, torch.Generator], *_: None) -> None:
    """As vLLM 0.31 and later sample on a CPU."""
    assert logits.shape == (1, VOCAB_SIZE)
    draw(generators[0])


def draw_for_each_id(
    logits: torch.Tensor, generators: dict[int, torch.Generator], *_: None
) -> None:
    """As vLLM 0.30 does."""
    torch.empty_like(logits)[0].exponential_(generator=generators[0])


def draw_twice(logits: torch.Tensor, generators: dict[int, torch.Generator], *_: None) -> None:
    draw_once(logits, generators)
    draw_once(logits, generators)


@pytest.fixture(params=[draw_once])
def state_of(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Makes a `CachedRequestState` as vLLM's V1 runner does, once the extension is imported.

    Its parameter samples.
    """
    for name in ("vllm.v1.worker", "vllm.v1.worker.gpu_model_runner"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    runner: Any = sys.modules["vllm.v1.worker.gpu_model_runner"]
    monkeypatch.setattr(sys.modules["vllm.v1.worker"], "gpu_model_runner", runner, raising=False)
    runner.CachedRequestState = SimpleNamespace

    class GPUModelRunner:
        def __init__(self, vllm_config: Any, device: str) -> None:
            self.sampler = SimpleNamespace(topk_topp_sampler=request.param)

    runner.GPUModelRunner = GPUModelRunner
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    extension = importlib.import_module(NAME)
    extension._patch()  # again: nothing is wrapped twice
    model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE)
    runner.GPUModelRunner(SimpleNamespace(model_config=model_config), device="cpu")

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


@pytest.mark.parametrize("state_of", [draw_for_each_id], indirect=True)
def test_a_seed_goes_on_where_each_id_took_a_draw(state_of: Any) -> None:
    whole = torch.Generator().manual_seed(4)
    noise = [torch.empty(VOCAB_SIZE).exponential_(generator=whole) for _ in range(4)]
    state = state_of([5, 6, 7], seed=4)
    assert torch.equal(torch.empty(VOCAB_SIZE).exponential_(generator=state.generator), noise[3])
    state.generator.set_offset(state.generator.get_offset() - 4)
    assert torch.equal(torch.empty(VOCAB_SIZE).exponential_(generator=state.generator), noise[3])


@pytest.mark.parametrize("state_of", [draw_twice], indirect=True)
def test_a_sampler_that_draws_otherwise_is_refused(state_of: Any) -> None:
    with pytest.raises(RuntimeError, match=r"neither one draw .* nor 70001"):
        state_of([5], seed=4)
