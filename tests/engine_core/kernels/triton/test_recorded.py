"""Recorded decode steps with Triton's kernels: padded, tables of one width, the same tokens."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs a model on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from tests.helpers.host_device import HostCopies, HostRecorder
from tests.helpers.torch_driver import BLOCK, PROMPTS, Driver, Request, generate, save_model

from slipstream_core.model.loader import load_model
from slipstream_core.runner import decode_graphs
from slipstream_core.runner.decode_graphs import DecodeGraphs, GraphKind
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.sampling import top_k_top_p
from slipstream_core.step.plan import StepPlan

NUM_TOKENS = 6


@pytest.mark.parametrize(
    ("kind", "buckets"),
    [("llama", ()), ("mistral", ()), ("llama", (16, 32)), ("mistral", (32,)), ("minicpm3", (32,))],
)
def test_equals_generate(
    kind: str, buckets: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    forward = DecodeGraphs.forward

    def counting(self: DecodeGraphs, plan: StepPlan) -> torch.Tensor:
        taken.append(plan.num_requests)
        return forward(self, plan)

    monkeypatch.setattr(DecodeGraphs, "forward", counting)
    folder = save_model(tmp_path / kind, kind)
    prompts = PROMPTS[:3]
    expected = generate(folder, prompts, NUM_TOKENS)
    runner = TorchRunner(
        load_model(str(folder), device="cpu", dtype="float32"),
        num_blocks=100,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(
            threads=1,
            capture=CaptureConfig(sizes=(1, 4), buckets=buckets, recorder=HostRecorder()),
            copies=HostCopies(),
        ),
    )
    eager: list[StepPlan] = []
    as_it_comes = runner._forward
    monkeypatch.setattr(
        runner, "_forward", lambda plan, _: (eager.append(plan), as_it_comes(plan))[1]
    )
    requests = [Request(prompt, NUM_TOKENS - n) for n, prompt in enumerate(prompts)]
    Driver(runner, budget=32).run(requests)
    caches = [weakref.ref(layer.keys) for layer in runner._layers]
    runner.close()
    gc.collect()
    assert all(cache() is None for cache in caches)
    assert [r.output for r in requests] == [
        tokens[: NUM_TOKENS - n] for n, tokens in enumerate(expected)
    ]
    assert 3 in taken  # padded to 4
    assert bool(eager) == (not buckets), "prefills are recorded too"


def test_draws_as_torchs_operators_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few candidates, kept sets reach further in most steps; nobody asks whether they do."""
    for module in (top_k_top_p, decode_graphs):
        monkeypatch.setattr(module, "NUM_CANDIDATES", 8)
    asked: list[bool] = []
    monkeypatch.setattr(DecodeGraphs, "_is_covered", lambda *_: asked.append(True))
    kinds: list[GraphKind | None] = []
    kind_of = DecodeGraphs._kind_of
    monkeypatch.setattr(
        DecodeGraphs, "_kind_of", lambda it, plan: kinds.append(kind_of(it, plan)) or kinds[-1]
    )
    model = load_model(str(save_model(tmp_path / "llama", "llama")), device="cpu", dtype="float32")
    outputs = []
    for native, sizes in ((False, ()), (True, ()), (True, (1, 4))):
        runner = TorchRunner(
            model,
            num_blocks=100,
            block_size=BLOCK,
            max_num_seqs=16,
            kernel_config=KernelConfig(
                threads=1,
                native=native,
                capture=CaptureConfig(sizes=sizes, recorder=HostRecorder()),
                copies=HostCopies(),
            ),
        )
        assert (runner._sampling.whole is not None) == native
        kept = ((1.0, 0), (0.9, 0), (0.7, 40), (1.0, 5))
        requests = [
            Request(prompt, 5, temperature=2.5 * (n != 3), top_p=p, top_k=k, seed=n)
            for n, (prompt, (p, k)) in enumerate(zip(PROMPTS[:4], kept, strict=True))
        ]
        Driver(runner, budget=32).run(requests)
        plain = [
            Request(prompt, 4, temperature=2.5, top_k=k, seed=9)
            for prompt, k in zip(PROMPTS[:2], (0, 30), strict=True)
        ]
        num_refused = kinds.count(None)
        Driver(runner, budget=32).run(plain)
        assert kinds.count(None) == num_refused
        runner.close()
        outputs.append([it.output for it in (*requests, *plain)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert asked == []
    assert None in kinds  # top_p after a top_k of more than the candidates
    assert len(kinds) > kinds.count(None)
