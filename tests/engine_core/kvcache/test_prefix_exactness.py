"""Real models over shared blocks: token for token what generate says."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.new_requests import new_request
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from slipstream_core.model.loader import load_model
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.history.token_log import TokenLog

VOCAB = 199
NUM_OUTPUTS = 12
COMMON = [(7 * i + 3) % VOCAB for i in range(22)]


def save_model(folder: Path, kind: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # wide, so that outputs are diverse
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=7))
    model.save_pretrained(folder)
    return model.eval()


def generate(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_OUTPUTS, do_sample=False)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


class Served:
    """Requests over one scheduler and runner, one step ahead."""

    def __init__(self, runner: TorchRunner, *, budget: int) -> None:
        self.runner = runner
        self.log = TokenLog()
        self.scheduler = Scheduler(
            tokens=self.log,
            cache=CacheConfig(
                num_blocks=runner.num_blocks,
                block_size=runner.info.block_size,
                enable_prefix_caching=True,
            ),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=runner.info.max_model_len,
        )
        self.num_rows = 0

    def run(self, prompts: list[list[int]]) -> list[list[int]]:
        rows = range(self.num_rows, self.num_rows + len(prompts))
        self.num_rows += len(prompts)
        for row, prompt in zip(rows, prompts, strict=True):
            self.log.open(row)
            self.log.extend(row, np.array(prompt, np.uint32))
            self.scheduler.add(
                new_request(
                    row=row,
                    prompt_len=len(prompt),
                    max_tokens=NUM_OUTPUTS,
                    temperature=0.0,
                    top_k=0,
                    top_p=1.0,
                    min_p=0.0,
                    seed=0,
                )
            )
        acked = np.full(self.num_rows, 10_000)
        in_flight: deque[StepPlan] = deque()
        while self.scheduler.has_work or in_flight:
            plan = self.scheduler.schedule(acked)
            if plan is not None:
                self.runner.launch(plan)
                in_flight.append(plan)
            if plan is None or len(in_flight) > 1:
                done = in_flight.popleft()
                self.scheduler.complete(done, self.runner.collect().token_ids)
        return [
            self.log.read(row, len(prompt), self.log.length(row)).tolist()
            for row, prompt in zip(rows, prompts, strict=True)
        ]


@pytest.mark.parametrize("kind", ["llama", "sliding window"])
@pytest.mark.parametrize(("budget", "num_blocks"), [(256, 200), (9, 200), (40, 24)])
def test_shared_blocks_change_nothing(
    kind: str, budget: int, num_blocks: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    reference = save_model(tmp_path, kind)
    model = load_model(str(tmp_path), device="cpu", dtype="float32", max_model_len=80)
    runner = TorchRunner(model, num_blocks=num_blocks, block_size=4, max_num_seqs=8)
    try:
        # whoever reads a block that nobody wrote gets no number at all; the null block is padding
        for layer in runner._layers:
            layer.key_blocks[1:].fill_(float("nan"))
            layer.value_blocks[1:].fill_(float("nan"))
        served = Served(runner, budget=budget)
        first = [COMMON + tail for tail in ([], [5], [5, 6, 7, 8, 9], [11, 12])] + [COMMON[:17]]
        outputs = served.run(first)
        assert outputs == [generate(reference, prompt) for prompt in first]
        assert len({token for output in outputs for token in output}) > 8
        hits = served.scheduler.prefix_cache_hits
        assert hits >= 4 * 16
        turns = [[*first[i], *outputs[i], 3, 4] for i in (2, 0)]
        assert served.run(turns) == [generate(reference, prompt) for prompt in turns]
        assert served.scheduler.prefix_cache_hits >= hits + 2 * 20
        assert (served.scheduler.num_preemptions > 0) == (num_blocks == 24)
    finally:
        runner.close()
