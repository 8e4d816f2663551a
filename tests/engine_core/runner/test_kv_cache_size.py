"""How much of a card the cache gets; the card is made of numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.torch_driver import save_model

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model import loader
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.graph_capture import NO_CAPTURE, CaptureConfig
from slipstream_core.runner.kv_cache_size import (
    PROFILE_BLOCKS,
    DeviceMemoryUse,
    Meter,
    block_bytes,
    blocks_on_card,
    cache_bytes,
    costliest_plan,
    largest_plan,
    too_small,
)
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner

GIB = 2**30
SLACK = 150 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_model(tmp_path_factory.mktemp("llama"))), device="cpu")


def test_the_cache_gets_what_is_left_of_the_share() -> None:
    use = DeviceMemoryUse(
        total=100 * GIB, free_before=98 * GIB, free=68 * GIB, step=5 * GIB, graphs=GIB
    )
    assert use.own == 30 * GIB
    assert cache_bytes(use, 0.5) == (50 - 30 - 5 - 1) * GIB - SLACK
    # of what others use nothing can be had, whatever the share
    busy = DeviceMemoryUse(
        total=100 * GIB, free_before=40 * GIB, free=10 * GIB, step=5 * GIB, graphs=GIB
    )
    assert cache_bytes(busy, 0.9) == (10 - 5 - 1) * GIB - SLACK


@given(
    total=st.integers(1, 200 * GIB),
    shares=st.tuples(st.floats(0.01, 0.99), st.floats(0, 1), st.floats(0, 1)),
    step=st.integers(0, 20 * GIB),
    graphs=st.integers(0, 20 * GIB),
)
def test_everything_together_stays_within_the_share(
    total: int, shares: tuple[float, float, float], step: int, graphs: int
) -> None:
    utilization, not_busy, not_taken = shares
    free_before = int(total * not_busy)
    use = DeviceMemoryUse(total, free_before, int(free_before * not_taken), step, graphs)
    given = cache_bytes(use, utilization)
    rest = step + graphs + SLACK
    assert given + rest + use.own <= total * utilization + 1
    assert given + rest <= use.free
    assert given + rest + use.own >= total * utilization - 1 or given + rest == use.free


def test_the_error_says_what_takes_the_room() -> None:
    use = DeviceMemoryUse(
        total=80 * GIB, free_before=79 * GIB, free=19 * GIB, step=9 * GIB, graphs=4 * GIB
    )
    said = too_small(use, 0.9, 2 << 20)
    assert "the card's 80.00 GiB others and this process's CUDA context use 1.00, the model" in said
    assert "the model takes 60.00, its largest step 9.00 and recorded steps 4.00" in said
    assert "gpu_memory_utilization is 0.9; raise that, lower max_num_batched_tokens" in said


class CountingMeter(Meter):
    """A card of numbers: `peaks` are what the works take, one after another."""

    def __init__(self, free: int, total: int, peaks: list[int]) -> None:
        self.free, self.total, self.peaks = free, total, peaks
        self.num_worked = 0

    def free_and_total(self) -> tuple[int, int]:
        return self.free, self.total

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        self.num_worked += 1
        return self.peaks.pop(0)


def config(**settings: object) -> CoreConfig:
    return CoreConfig(
        **{  # type: ignore[arg-type]
            "model": "",
            "address": "",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 700,  # more than two prompts of the longest kind
            "block_size": 16,
            "gpu_memory_utilization": 0.5,
            **settings,
        }
    )


@pytest.fixture
def small(model: LoadedModel) -> TorchRunner:
    return TorchRunner(
        model,
        num_blocks=PROFILE_BLOCKS,
        block_size=16,
        max_num_seqs=8,
        kernel_config=KernelConfig(native=False),
    )


def test_the_largest_steps_are_run_and_counted(model: LoadedModel, small: TorchRunner) -> None:
    meter = CountingMeter(6 * GIB, 10 * GIB, [GIB, GIB // 2])
    blocks = blocks_on_card(
        model, config(), meter, small, free_before=7 * GIB, capture=CaptureConfig((1, 8))
    )
    assert meter.num_worked == 2
    most = (5 - 1 - 1.5) * GIB - SLACK  # half of it, less the model and the two steps
    lanes = 8 * (4 * 199 + 8 * 256) * 3 // 2
    logits = 8 * 4 * 199
    size = block_bytes(model, 16)
    assert (most - lanes - 3 * logits - 8 * 1024) // size <= blocks < (most - lanes) // size
    without = CountingMeter(6 * GIB, 10 * GIB, [GIB])
    more = blocks_on_card(model, config(), without, small, free_before=7 * GIB, capture=NO_CAPTURE)
    assert more > blocks + GIB // 2 // size
    with_buckets = CountingMeter(6 * GIB, 10 * GIB, [GIB, GIB // 2, GIB * 3 // 4])
    fewer = blocks_on_card(
        model,
        config(),
        with_buckets,
        small,
        free_before=7 * GIB,
        capture=CaptureConfig((1, 8), (16, 64)),
    )
    assert with_buckets.num_worked == 3
    assert GIB // 4 // size <= blocks - fewer <= (GIB // 4 + 64 * 1024) // size, "the larger one"
    small.close()


def test_no_room_is_refused(model: LoadedModel, small: TorchRunner) -> None:
    meter = CountingMeter(6 * GIB, 10 * GIB, [5 * GIB])
    with pytest.raises(ModelLoadError, match=r"gets 0.00: of the card's 10.00 GiB .* use 3.00"):
        blocks_on_card(model, config(), meter, small, free_before=7 * GIB, capture=NO_CAPTURE)

    class Full(CountingMeter):
        def peak_of(self, work: Callable[[], None]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    full = Full(6 * GIB, 10 * GIB, [])
    with pytest.raises(ModelLoadError, match=r"6.00 of the card's 10.00 GiB are free, .* 700"):
        blocks_on_card(model, config(), full, small, free_before=7 * GIB, capture=NO_CAPTURE)
    small.close()


@pytest.mark.parametrize(
    ("num_rows", "num_tokens"), [(1, 1), (4, 4), (4, 5), (1, 600), (3, 514), (8, 700)]
)
def test_the_largest_plan_has_as_many_tokens_and_samples(num_rows: int, num_tokens: int) -> None:
    plan = largest_plan(num_rows, num_tokens, max_model_len=256, vocab_size=199)
    assert plan.num_tokens == int(plan.query_lens.sum()) == num_tokens
    assert int(plan.samples.sum()) == num_rows == len(plan.temperatures)
    assert int(plan.kv_lens.max()) <= 256
    assert bool((plan.query_lens[: plan.num_decodes] == 1).all())
    starts = np.cumsum(plan.query_lens) - plan.query_lens
    assert plan.positions[starts].tolist() == [0] * plan.num_requests


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "expected"), [(4, 4, 0), (4, 40, 36), (3, 514, 256), (1, 600, 256)]
)
def test_the_dearest_plan_looks_at_as_many_positions_of_prompts_as_it_can(
    num_rows: int, num_tokens: int, expected: int
) -> None:
    plan = largest_plan(num_rows, num_tokens, max_model_len=256, vocab_size=199)
    prompt = costliest_plan(plan, 199).prompt
    if not expected:
        assert prompt is None
        return
    assert prompt is not None
    assert len(prompt.tokens) == len(prompt.targets) == int(prompt.counts.sum()) == expected
    assert int(prompt.rows.min()) >= plan.num_decodes
    ends = np.cumsum(plan.query_lens)
    assert not set(prompt.tokens.tolist()) & set((ends - 1).tolist())
    of_row = np.searchsorted(ends, prompt.tokens, side="right")
    assert np.array_equal(np.repeat(prompt.rows, prompt.counts), of_row)


def test_weights_that_cannot_fit_are_not_loaded(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = sum(parameter.numel() for parameter in model.module.parameters())
    monkeypatch.setattr(loader, "target_device", lambda name, device, rank: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * num - 1, 8 * num))
    with pytest.raises(ModelLoadError, match=r"its weights take .* are free; give a smaller model"):
        load_model(str(Path(model.name)), dtype="float32", device="cuda")
