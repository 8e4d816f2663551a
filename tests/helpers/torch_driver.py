"""Tiny models, and a driver that steps a runner over them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import StepPlan, StepResult, blank_plan

VOCAB = 199


BLOCK = 4


def save_model(folder: Path, kind: str = "llama") -> Path:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # wide, so that outputs are diverse
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    if kind == "llama":
        LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    elif kind == "minicpm3":  # caches latents
        settings |= {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16}
        settings |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
        MiniCPM3ForCausalLM(MiniCPM3Config(**settings)).save_pretrained(folder)
    else:
        MistralForCausalLM(MistralConfig(**settings, sliding_window=7)).save_pretrained(folder)
    return folder


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_logprobs: int = -1
    output: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[float], list[int], int]] = field(default_factory=list)
    slot: int = -1
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_launched: int = 0  # output tokens, including those in flight

    @property
    def pending(self) -> int:
        """Tokens, known or in flight, that are not computed yet."""
        if self.num_launched == self.max_tokens:
            return 0
        return len(self.prompt) + self.num_launched - self.num_computed


KINDS = ("greedy", "plain", "truncated")


def requests_of(kind: str) -> list[Request]:
    """Requests without log-probabilities; in steps of drawn rows there are greedy ones, too."""
    is_truncated = kind == "truncated"
    return [
        Request(
            prompt,
            10,
            temperature=0.0 if kind == "greedy" else 0.9 * (at % 3),
            top_k=9 * (at % 2) if is_truncated else 0,
            top_p=0.8 if is_truncated and at > 1 else 1.0,
            seed=at,
        )
        for at, prompt in enumerate(prompts_of(3, 17, 9, 30))
    ]


class Driver:
    """Schedules steps on a runner, with `depth` of them in flight. budget: tokens per step."""

    def __init__(
        self, runner: TorchRunner, *, budget: int = 16, depth: int = 1, seed: int = 0
    ) -> None:
        self.runner = runner
        self.budget = budget
        self.depth = depth
        self.random = random.Random(seed)
        self.free_blocks = list(range(1, runner.num_blocks))
        self.random.shuffle(self.free_blocks)
        self.in_flight: deque[list[Request]] = deque()
        self.num_steps = 0
        self.num_mixed = 0

    def run(self, requests: Sequence[Request], arrivals_per_step: int = 2) -> None:
        waiting, running = deque(requests), list[Request]()
        slots = list(range(len(requests)))
        self.random.shuffle(slots)
        while waiting or any(r.pending for r in running) or self.in_flight:
            for _ in range(min(arrivals_per_step, len(waiting))):
                request = waiting.popleft()
                request.slot = slots.pop()
                running.append(request)
            if any(r.pending for r in running):
                self.launch(running)
            if len(self.in_flight) > self.depth or not any(r.pending for r in running):
                self.collect()

    def launch(self, running: list[Request]) -> None:
        left = self.budget
        rows: list[tuple[Request, int]] = []
        # decodes first; otherwise shuffled, so that no test depends on an order of lengths
        for request in sorted(running, key=lambda r: (r.pending != 1, self.random.random())):
            if count := min(left, request.pending):
                rows.append((request, count))
                left -= count
        num_decodes = sum(request.pending == 1 for request, _ in rows)
        self.num_mixed += 0 < num_decodes < len(rows)
        self.runner.launch(self.plan(rows, num_decodes))

    def plan(self, rows: list[tuple[Request, int]], num_decodes: int) -> StepPlan:
        tokens: list[tuple[int, int, int, int]] = []  # id, gather slot, position, kv slot
        entries: list[tuple[int, int, int]] = []  # slot, number, block
        sampled: list[Request] = []
        for request, count in rows:
            known = request.prompt + request.output
            for position in range(request.num_computed, request.num_computed + count):
                if position // BLOCK == len(request.table):
                    request.table.append(self.free_blocks.pop())
                    entries.append((request.slot, position // BLOCK, request.table[-1]))
                here = position < len(known)
                tokens.append(
                    (
                        known[position] if here else 0,
                        -1 if here else request.slot,
                        position,
                        request.table[position // BLOCK] * BLOCK + position % BLOCK,
                    )
                )
            request.num_computed += count
            if not request.pending:
                sampled.append(request)
        samples = [request in sampled for request, _ in rows]
        for request in sampled:
            request.num_launched += 1
        self.in_flight.append(sampled)
        self.num_steps += 1
        columns = [np.array(column, np.int64) for column in zip(*tokens, strict=True)]
        slots, numbers, blocks = np.array(entries, np.int64).reshape(-1, 3).T
        return blank_plan(
            step=self.num_steps,
            num_decodes=num_decodes,
            token_ids=columns[0],
            gather_slots=columns[1],
            positions=columns[2],
            kv_slots=columns[3],
            slots=np.array([request.slot for request, _ in rows], np.int64),
            query_lens=np.array([count for _, count in rows], np.int32),
            kv_lens=np.array([request.num_computed for request, _ in rows], np.int32),
            prompt_lens=np.array([len(request.prompt) for request, _ in rows], np.int32),
            samples=np.array(samples),
            table_slots=slots,
            table_numbers=numbers,
            table_blocks=blocks.astype(np.int32),
            temperatures=np.array([r.temperature for r in sampled], np.float32),
            top_ks=np.array([r.top_k for r in sampled], np.int32),
            top_ps=np.array([r.top_p for r in sampled], np.float32),
            seeds=np.array([r.seed for r in sampled], np.int64),
            num_logprobs=np.array([r.num_logprobs for r in sampled], np.int32),
        )

    def collect(self) -> StepResult:
        sampled = self.in_flight.popleft()
        result = self.runner.collect()
        assert len(result.token_ids) == len(sampled)
        for row, request in enumerate(sampled):
            request.output.append(int(result.token_ids[row]))
            if request.num_logprobs >= 0:
                assert result.logprobs is not None
                width = 1 + request.num_logprobs
                request.logprobs.append(
                    (
                        result.logprobs.values[row, :width].tolist(),
                        result.logprobs.ids[row, :width].tolist(),
                        int(result.logprobs.ranks[row]),
                    )
                )
        return result


def save_undefined(folder: Path, to: Path, token: int) -> None:
    """A model of which no logit is a number once this token is behind."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_input_embeddings().weight.data[token] = torch.nan
    model.save_pretrained(to)


def undefined_by(runner: Any, requests: Sequence[Request]) -> list[list[bool]]:
    """Run requests; whether a step told that a token's logits were undefined, for each."""
    found: dict[int, list[bool]] = {}

    class Telling(Driver):
        def collect(self) -> StepResult:
            sampled = self.in_flight[0]
            result = super().collect()
            rows = () if result.undefined is None else result.undefined.tolist()
            for row, request in enumerate(sampled):
                found.setdefault(id(request), []).append(row in rows)
            return result

    Telling(runner).run(requests)
    return [found[id(each)] for each in requests]


def assert_undefined_behind(
    token: int, requests: Sequence[Request], told: Sequence[list[bool]]
) -> None:
    """Assert that what was told is true of the model that `save_undefined` has saved."""
    num_broken = 0
    for request, flags in zip(requests, told, strict=True):
        ids = [*request.prompt, *request.output]
        end = ids.index(token) + 1 if token in ids[:-1] else len(ids)
        num_sound = max(0, end - len(request.prompt))
        assert flags[:num_sound] == [False] * num_sound
        assert flags[num_sound : num_sound + 1] != [False]
        num_broken += any(flags)
    assert 0 < num_broken < len(requests)


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def generate(folder: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """The outputs of transformers, one prompt at a time."""
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return generate_by(model, prompts, num_tokens)


def generate_by(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """The outputs of a model of transformers, one prompt at a time."""
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


PROMPTS = prompts_of(5, 23, 1, 41, 12, 64, 3, 30)


NUM_TOKENS = 20
