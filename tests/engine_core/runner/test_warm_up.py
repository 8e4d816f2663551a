"""What a core on a CPU does before it is ready: counted in steps, blocks and page faults."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.patience import PATIENCE_S
from tests.helpers.torch_driver import PROMPTS, Driver, Request, generate, save_model

from slipstream_core.config import CoreConfig, SpeculativeConfig
from slipstream_core.runner import torch_factory, torch_runner, warm_up
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import StepPlan


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def config(llama: Path) -> CoreConfig:
    return CoreConfig(
        model=str(llama),
        address="",
        device="cpu",
        dtype="float32",
        block_size=4,
        num_blocks=512,
        max_num_seqs=5,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans of all steps."""
    plans: list[StepPlan] = []
    launch = TorchRunner.launch

    def noting(runner: TorchRunner, plan: StepPlan) -> None:
        plans.append(plan)
        launch(runner, plan)

    monkeypatch.setattr(TorchRunner, "launch", noting)
    monkeypatch.setattr(torch_factory, "keep_freed_memory", lambda: None)
    return plans


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were touched, for each time."""
    counts: list[int] = []
    touch = TorchRunner.touch_cache

    def noting(runner: TorchRunner, *args: Any) -> int:
        counts.append(touch(runner, *args))
        return counts[-1]

    monkeypatch.setattr(TorchRunner, "touch_cache", noting)
    return counts


def test_a_prompt_and_both_kinds_of_decode_steps_run(
    config: CoreConfig, launched: list[StepPlan], touched: list[int]
) -> None:
    load_runner(msgspec.structs.replace(config, touches_cache=True)).close()
    greedy, sampled, prompt = launched
    assert (prompt.num_requests, prompt.num_tokens, prompt.num_decodes) == (1, 64, 0)
    assert (greedy.num_decodes, greedy.all_greedy, greedy.max_logprobs) == (5, True, -1)
    assert (sampled.num_decodes, sampled.all_greedy, sampled.max_logprobs) == (5, False, 20)
    assert not any(plan.kv_slots.any() for plan in launched)  # the null block alone
    assert touched == [512]


def test_a_cache_of_the_default_size_and_prompts_take_no_memory_at_first(
    config: CoreConfig, launched: list[StepPlan], touched: list[int]
) -> None:
    load_runner(config).close()
    assert [(plan.num_decodes, plan.all_greedy) for plan in launched] == [(5, True), (5, False)]
    assert touched == []


def test_requests_get_the_same_tokens_as_ever(config: CoreConfig, llama: Path) -> None:
    runner = load_runner(msgspec.structs.replace(config, touches_cache=True))
    request = Request(PROMPTS[0], 12)
    Driver(runner).run([request])
    runner.close()
    assert request.output == generate(llama, [PROMPTS[0]], 12)[0]


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 3}, {"max_model_len": 2}])
def test_steps_keep_within_limits(
    config: CoreConfig, launched: list[StepPlan], limits: dict[str, Any]
) -> None:
    load_runner(msgspec.structs.replace(config, touches_cache=True, **limits)).close()
    most = min(limits.values())
    assert [plan.num_tokens for plan in launched] == [most, most, most]


def test_streams_of_a_predecessor_do_not_wait_for_it(
    config: CoreConfig, launched: list[StepPlan], touched: list[int]
) -> None:
    later = msgspec.structs.replace(config, predecessor_ended_s=1.0, touches_cache=True)
    load_runner(later).close()
    assert (launched, touched) == ([], [])


def test_large_weights_are_not_read_for_it(
    config: CoreConfig,
    launched: list[StepPlan],
    touched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_up, "_LARGE_BYTES", 1000)
    load_runner(msgspec.structs.replace(config, touches_cache=True)).close()
    assert (launched, touched) == ([], [512])


@pytest.fixture
def runner(config: CoreConfig, launched: list[StepPlan]) -> Iterator[TorchRunner]:
    runner = load_runner(config)
    yield runner
    runner.close()


@pytest.mark.parametrize("turns", [0, 1, 3, 8, 9])
def test_the_blocks_that_are_dealt_out_first_are_touched_until_the_time_is_over(
    runner: TorchRunner, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 64  # blocks
    monkeypatch.setattr(
        torch_runner, "_TOUCHED_BYTES", piece * runner._layers[0].key_blocks[0].nbytes
    )
    for layer in runner._layers:
        layer.key_blocks.fill_(torch.nan)
        layer.value_blocks.fill_(torch.nan)
    ticks = count()
    assert runner.touch_cache(turns + 0.5, lambda: float(next(ticks))) == min(512, piece * turns)
    for layer in runner._layers:
        for blocks in layer.blocks:
            assert not blocks[: piece * turns].any()
            assert blocks[piece * turns :].isnan().all()


_FAULTS = """
import resource, sys, torch
from slipstream_core.runner.warm_up import keep_freed_memory
from slipstream_core.step.device_thread import DeviceThread

def steps(num):
    for _ in range(num):  # as sampling does: a few buffers of a batch's logits
        buffers = [torch.empty(n << 18).zero_() for n in (8, 8, 12, 40, 8)]
        del buffers

def faults(num):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    steps(num)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

if sys.argv[1] == "kept":
    keep_freed_memory()
torch.set_num_threads(1)
thread = DeviceThread("device", lambda: torch.set_num_threads(1))
for num in (8, 8):
    thread.submit(lambda: faults(num))
    print(thread.collect())
thread.close()
"""


@pytest.mark.process
def test_a_steps_buffers_are_those_of_the_step_before() -> None:
    faults = {}
    for kind in ("kept", "given back"):
        command = [sys.executable, "-c", _FAULTS, kind]
        run = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
        faults[kind] = [int(line) for line in run.stdout.split()]
    # the heap settles in the first steps; by default the largest buffer is new in every step
    page = resource.getpagesize()
    assert faults["kept"][1] * page < 16 << 20
    assert faults["given back"][1] * page > 4 * (40 << 20)


DRAFTS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4
)


def test_decode_steps_are_timed_where_tokens_are_drafted(
    config: CoreConfig, launched: list[StepPlan]
) -> None:
    without = load_runner(config)
    without.close()
    assert without.info.decode_s == ()
    num = len(launched)
    runner = load_runner(msgspec.structs.replace(config, speculative_config=DRAFTS))
    runner.close()
    timed = launched[2 * num :]
    times = runner.info.decode_s
    rows = [num_rows for num_rows, _ in times]
    assert rows == [1, 2, 4, 8, 16, 32, 64, 128][: len(rows)]
    assert [plan.num_requests for plan in timed] == [each for each in rows for _ in range(3)]
    assert all(seconds > 0 for _, seconds in times)
    assert all(plan.all_greedy and plan.slots.max() < config.max_num_seqs for plan in timed)


def test_what_is_timed_is_bounded(config: CoreConfig, launched: list[StepPlan]) -> None:
    runner = load_runner(config)
    try:
        ticks = count()
        times = warm_up.decode_times(runner, config, clock=lambda: next(ticks) / 20)
        assert [rows for rows, _ in times] == [1, 2, 4]  # a second has passed
        assert {round(seconds, 3) for _, seconds in times} == {0.05}
        narrow = msgspec.structs.replace(config, max_num_batched_tokens=5)
        assert [rows for rows, _ in warm_up.decode_times(runner, narrow)] == [1, 2, 4]
        awaited = msgspec.structs.replace(config, predecessor_ended_s=1.0)
        num = len(launched)
        assert warm_up.decode_times(runner, awaited) == ()
        assert len(launched) == num
    finally:
        runner.close()
