"""The torch runner against transformers' generate: the same tokens, however steps are cut.

A toy scheduler of a few lines drives it: it hands out blocks at random, cuts prompts into chunks
and keeps one step in flight.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.host_device import HostCopies, HostRecorder
from tests.helpers.patience import PATIENCE_S
from tests.helpers.torch_driver import (
    BLOCK,
    NUM_TOKENS,
    PROMPTS,
    VOCAB,
    Driver,
    Request,
    generate,
    save_model,
)
from transformers import LlamaForCausalLM

from slipstream_core.attention import torch_backend
from slipstream_core.attention.torch_backend import TorchBackend
from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.step.plan import StepFailed
from slipstream_ipc.messages import SamplingDefaults


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_model(llama: Path) -> LoadedModel:
    return load_model(str(llama), device="cpu")


@pytest.fixture(params=["native", "torch", "as a card"])
def runner(llama_model: LoadedModel, request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    is_card = request.param == "as a card"
    runner = TorchRunner(
        llama_model,
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(
            native=request.param == "native",
            capture=CaptureConfig(sizes=(1, 4) if is_card else (), recorder=HostRecorder()),
            copies=HostCopies() if is_card else None,
        ),
    )
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def expected(llama: Path) -> list[list[int]]:
    outputs = generate(llama, PROMPTS, NUM_TOKENS)
    assert len({token for output in outputs for token in output}) > 40  # not one token for ever
    return outputs


@pytest.mark.quick
def test_alone_equals_generate(runner: TorchRunner, expected: list[list[int]]) -> None:
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    for request in requests:
        Driver(runner, budget=1000, depth=0).run([request])
    assert [r.output for r in requests] == expected[:3]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [9, 32, 1000])
def test_batches_with_chunks_equal_generate(
    runner: TorchRunner, expected: list[list[int]], depth: int, budget: int
) -> None:
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    driver = Driver(runner, budget=budget, depth=depth, seed=budget + depth)
    driver.run(requests)
    assert [r.output for r in requests] == expected
    assert driver.num_mixed > 0


def test_many_buckets_equal_generate(
    runner: TorchRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(runner._attention, TorchBackend):  # our kernels have no buckets
        monkeypatch.setattr(runner._attention, "_blocks_per_bucket", 12)  # some rows exceed it
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=50).run(requests)
    assert [r.output for r in requests] == expected


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
def test_what_others_left_in_the_cache_never_shows(
    runner: TorchRunner, expected: list[list[int]], rubbish: float
) -> None:
    """A mask hides finite rubbish only: 0 * nan is nan, and so is inf - inf."""
    for layer in runner._layers:
        for blocks in layer.blocks:
            blocks[1:] = rubbish  # all but the null block
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=32).run(requests)
    assert [r.output for r in requests] == expected


@pytest.mark.parametrize("native", [True, False])
def test_sliding_window_equals_generate(
    tmp_path_factory: pytest.TempPathFactory, native: bool
) -> None:
    folder = save_model(tmp_path_factory.mktemp("mistral"), "mistral")
    expected = generate(folder, PROMPTS, NUM_TOKENS)
    model = load_model(str(folder), device="cpu")
    assert [layer.window for layer in model.geometry] == [7, 7, 7]
    runner = TorchRunner(
        model,
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(native=native),
    )
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=24).run(requests)
    runner.close()
    assert [r.output for r in requests] == expected


def test_bfloat16_runs(llama: Path) -> None:
    config = CoreConfig(
        model=str(llama),
        address="",
        device="cpu",
        dtype="bfloat16",
        block_size=BLOCK,
        num_blocks=99,
    )
    runner = load_runner(config)
    request = Request(PROMPTS[0], 5)
    Driver(runner).run([request])
    runner.close()
    assert len(request.output) == 5


def test_a_seeded_request_samples_the_same_alone_and_in_a_batch(runner: TorchRunner) -> None:
    def make() -> list[Request]:
        return [
            Request(prompt, 12, temperature=0.9, seed=i, top_k=(0, 5)[i % 2], top_p=(1, 0.8)[i % 2])
            for i, prompt in enumerate(PROMPTS)
        ]

    alone, together = make(), make()
    for request in alone:
        Driver(runner, budget=7, depth=0).run([request])
    Driver(runner, budget=30).run(together)
    assert [r.output for r in together] == [r.output for r in alone]
    others = make()
    for request in others:
        request.seed += 1000
    Driver(runner, budget=30).run(others)
    assert [r.output for r in others] != [r.output for r in alone]


def test_logprobs_are_those_of_the_model(runner: TorchRunner, llama: Path) -> None:
    requests = [
        Request(PROMPTS[1], 6, num_logprobs=3, temperature=1.0, seed=4),
        Request(PROMPTS[0], 6),
        Request(PROMPTS[4], 6, num_logprobs=0),
    ]
    Driver(runner).run(requests)
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    for request in (requests[0], requests[2]):
        ids = torch.tensor([request.prompt + request.output])
        with torch.inference_mode():
            table = model(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
        for row, (token, (values, ids_, rank)) in enumerate(
            zip(request.output, request.logprobs, strict=True)
        ):
            assert ids_[0] == token
            assert ids_[1:] == table[row].topk(max(request.num_logprobs, 0)).indices.tolist()
            assert values == pytest.approx(table[row, ids_].tolist(), abs=1e-4)
            assert rank == int((table[row] > table[row, token]).sum()) + 1
    assert requests[1].logprobs == []


def test_a_step_of_prefill_chunks_alone_samples_nothing(runner: TorchRunner) -> None:
    driver = Driver(runner, budget=8)
    request = Request(PROMPTS[3], 1)
    request.slot = 0
    driver.launch([request])
    result = driver.collect()
    assert result.step == 1
    assert result.token_ids.shape == (0,)
    assert result.token_ids.dtype == np.int64
    assert result.logprobs is None


def test_a_failing_step_fails_alone(runner: TorchRunner, expected: list[list[int]]) -> None:
    request = Request(PROMPTS[0], NUM_TOKENS)
    bad = Request([VOCAB + 5], 1)  # an id that the embedding does not have
    bad.slot = 9
    driver = Driver(runner, depth=0)
    driver.launch([bad])
    with pytest.raises(StepFailed, match=r"step 1 failed in the model: IndexError") as failure:
        driver.collect()
    assert failure.value.step == 1
    driver.run([request])
    assert request.output == expected[0]


def test_the_descriptor_counts_finished_steps(runner: TorchRunner) -> None:
    driver = Driver(runner)
    requests = [Request(prompt, 1) for prompt in PROMPTS[:2]]
    for slot, request in enumerate(requests):
        request.slot = slot
    assert select.select([runner.fileno()], [], [], 0)[0] == []
    assert not runner.done()
    driver.launch(requests[:1])
    driver.launch(requests[1:])
    for _ in requests:
        assert select.select([runner.fileno()], [], [], PATIENCE_S)[0] == [runner.fileno()]
        assert runner.done()
        driver.collect()
    assert select.select([runner.fileno()], [], [], 0)[0] == []
    assert runner.done_at() is None


def test_close_with_steps_in_flight_and_twice(llama_model: LoadedModel) -> None:
    runner = TorchRunner(llama_model, num_blocks=400, block_size=BLOCK, max_num_seqs=16)
    requests = [Request(prompt, 1) for prompt in PROMPTS]
    driver = Driver(runner, budget=8)
    for slot, request in enumerate(requests):
        request.slot = slot
        driver.launch([request])
    runner.close()
    runner.close()


def test_cache_size(llama: Path, llama_model: LoadedModel) -> None:
    config = CoreConfig(
        model=str(llama), address="", device="cpu", block_size=16, kv_cache_gib=1 / 1024
    )
    runner = load_runner(config)
    # 3 layers, keys and values, 2 heads of 16 floats
    assert runner.info.block_bytes == 16 * 3 * 2 * 2 * 16 * 4
    assert runner.num_blocks == 2**20 // runner.info.block_bytes
    assert runner.info.max_model_len == 256
    runner.close()
    small = TorchRunner(llama_model, num_blocks=5, block_size=16, max_num_seqs=2)
    assert small.info.max_model_len == 64  # no request could be longer
    small.close()
    with pytest.raises(ModelLoadError, match=r"room for 1 blocks .* needs 2"):
        TorchRunner(llama_model, num_blocks=1, block_size=16, max_num_seqs=2)


def test_a_length_that_was_asked_for_is_kept_or_refused(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CoreConfig(model=str(llama), address="", device="cpu", block_size=16, num_blocks=5)
    runner = load_runner(config)
    assert runner.info.max_model_len == 64
    assert "supports 256 tokens, but the KV cache holds 64" in caplog.text
    runner.close()
    runner = load_runner(msgspec.structs.replace(config, max_model_len=60))
    assert runner.info.max_model_len == 60
    runner.close()
    with pytest.raises(ModelLoadError, match=r"max_model_len is 65, .* for 64 .* \(6 blocks\)"):
        load_runner(msgspec.structs.replace(config, max_model_len=65))


def test_default_sampling_is_told_and_not_applied(llama_model: LoadedModel) -> None:
    given = SamplingDefaults(temperature=0.6, repetition_penalty=1.1)
    model = replace(llama_model, default_sampling=given)
    runner = TorchRunner(model, num_blocks=9, block_size=16, max_num_seqs=2)
    assert runner.info.default_sampling == given
    runner.close()


def test_scratch_holds_a_row_longer_than_itself(
    llama_model: LoadedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "SCRATCH_BYTES", 1024)
    runner = TorchRunner(
        llama_model,
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(native=False),
    )
    request = Request(PROMPTS[5], NUM_TOKENS)
    Driver(runner).run([request])
    runner.close()
    assert request.output == expected[5]
