"""On a card: no step makes the host wait, by torch's own account."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.torch_driver import BLOCK, PROMPTS, Driver, Request, save_model

from slipstream_core.model.loader import load_model
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner

if not torch.cuda.is_available():
    pytest.skip("needs a card", allow_module_level=True)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[TorchRunner]:
    model = load_model(str(save_model(tmp_path / "llama", "llama")), dtype="bfloat16")
    runner = TorchRunner(
        model,
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(capture=CaptureConfig(sizes=(1, 4, 8))),
    )
    torch.cuda.set_sync_debug_mode("error")
    yield runner
    torch.cuda.set_sync_debug_mode("default")
    runner.close()


def test_steps_of_all_kinds(runner: TorchRunner) -> None:
    requests = [
        Request(
            prompt,
            12 + n,
            temperature=(0.0, 0.9, 1.3)[n % 3],
            top_k=(0, 0, 5)[n % 3],
            top_p=(1.0, 0.9)[n % 2],
            seed=n,
            num_logprobs=(-1, 3)[n % 2],
        )
        for n, prompt in enumerate(PROMPTS)
    ]
    Driver(runner, budget=64).run(requests)
    assert [len(request.output) for request in requests] == [12 + n for n in range(len(PROMPTS))]
