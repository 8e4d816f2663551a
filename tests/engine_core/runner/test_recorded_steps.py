"""What requests may ask, over recorded decode steps: the same answers as of steps that run eagerly.

A scheduler and a runner, two steps in flight. Requests are preempted, share blocks, leave in the
middle, and have grammars, rules, prompts whose log-probabilities are wanted, and several answers.
The recorder is as strict as a card's (`recording`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.host_device import HostCopies
from tests.helpers.new_requests import new_request
from tests.helpers.op_recorder import OpRecorder
from tests.helpers.token_constraints import asked
from tests.helpers.torch_driver import BLOCK, VOCAB, prompts_of, save_model

from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.decode_graphs import DecodeGraphs
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.step.limits import NO_ROW
from slipstream_core.step.plan import StepPlan, StepResult
from slipstream_ipc.history.token_log import TokenLog

SLOTS = 8


@dataclass
class Wanted:
    """One request. `leaves_after`: outputs, then it is gone, as by a stop string or an abort."""

    prompt: list[int]
    num_tokens: int = 16
    leaves_after: int | None = None
    arrives: int = 0  # steps
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    min_tokens: int = 0
    has_grammar: bool = False
    listed: tuple[int, ...] = ()
    constraints: dict[str, Any] | None = None


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    prompt: dict[int, tuple[list[float], list[int]]] = field(default_factory=dict)


class Play:
    """Requests on their way through one runner."""

    def __init__(self, runner: TorchRunner, *, budget: int, num_blocks: int, sharing: bool) -> None:
        self.runner = runner
        self.tokens = TokenLog()
        self.scheduler = Scheduler(
            tokens=self.tokens,
            cache=CacheConfig(
                num_blocks=num_blocks, block_size=BLOCK, enable_prefix_caching=sharing
            ),
            max_num_seqs=SLOTS,
            max_num_batched_tokens=budget,
            max_model_len=4 * (num_blocks - 1),
        )
        self.in_flight: deque[StepPlan] = deque()
        self.answers: list[Answer] = []
        self.wanted: list[Wanted] = []
        self.num_steps = 0

    def run(self, wanted: Sequence[Wanted]) -> list[Answer]:
        first = len(self.wanted)
        self.wanted += wanted
        self.answers += [Answer() for _ in wanted]
        waiting = deque(sorted(range(first, len(self.wanted)), key=self._arrives))
        acked = np.full(len(self.wanted), 10_000)
        while waiting or self.scheduler.has_work or self.in_flight:
            while waiting and (
                self._arrives(waiting[0]) <= self.num_steps or not self.scheduler.has_work
            ):
                self._add(waiting.popleft())
            plan = self.scheduler.schedule(acked) if len(self.in_flight) < 2 else None
            if plan is not None:
                self.num_steps += 1
                self.runner.launch(plan)
                self.in_flight.append(plan)
                if len(self.in_flight) == 1:
                    self._give_masks()
                    continue
            if self.in_flight:
                self._collect()
        return self.answers[first:]

    def _arrives(self, row: int) -> int:
        return self.wanted[row].arrives

    def _add(self, row: int) -> None:
        it = self.wanted[row]
        self.tokens.open(row)
        self.tokens.extend(row, np.array(it.prompt, np.uint32))
        constraints = (
            None
            if it.constraints is None
            else asked(tuple(it.prompt), **it.constraints).constraints
        )
        self.scheduler.add(
            new_request(
                row=row,
                prompt_len=len(it.prompt),
                max_tokens=it.num_tokens,
                temperature=it.temperature,
                top_k=it.top_k,
                top_p=it.top_p,
                min_p=it.min_p,
                seed=it.seed,
                num_logprobs=it.num_logprobs,
                logprob_token_ids=it.listed,
                min_tokens=it.min_tokens,
                stop_token_ids=(5, 6, 7) if it.min_tokens else (),
                use_prefix_cache=it.num_prompt_logprobs < 0,
                num_prompt_logprobs=it.num_prompt_logprobs,
                constraints=constraints,
                has_grammar=it.has_grammar,
            )
        )

    def _give_masks(self) -> None:
        plan = self.in_flight[0]
        if not plan.awaits_masks:
            return
        bits = np.zeros((len(plan.grammar_rows), -(-VOCAB // 32) * 32), np.uint8)
        for i, row in enumerate(self.scheduler.grammar_rows_of(plan).tolist()):
            last = 0
            if row != NO_ROW:
                length = self.tokens.length(row)
                last = int(self.tokens.read(row, length - 1, length)[0])
            bits[i, random.Random(last).sample(range(3, VOCAB), 9)] = 1
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self.runner.sample(plan, masks)

    def _collect(self) -> None:
        plan = self.in_flight.popleft()
        result = self.runner.collect()
        if plan.prompt is not None:
            self._take_prompts(plan, result)
        rows = self.scheduler.rows_of(plan)[plan.samples].tolist()
        sampled = self.scheduler.complete(plan, result.token_ids)
        assert {rows[at] for at in sampled.index.tolist()} == set(sampled.rows.tolist())
        for at, row in zip(sampled.index.tolist(), sampled.rows.tolist(), strict=True):
            it, answer = self.wanted[row], self.answers[row]
            answer.token_ids.append(int(result.token_ids[at]))
            if it.num_logprobs >= 0:
                assert result.logprobs is not None
                width = 1 + it.num_logprobs
                answer.logprobs.append(result.logprobs.values[at, :width].tolist())
                answer.top_ids.append(result.logprobs.ids[at, :width].tolist())
            if len(answer.token_ids) == it.leaves_after:
                self.scheduler.remove(row)
        if self.in_flight:
            self._give_masks()

    def _take_prompts(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.prompt is not None
        rows = self.scheduler.prompt_rows_of(plan).tolist()
        for row, start, found in zip(rows, plan.prompt.starts.tolist(), result.prompt, strict=True):
            if row == NO_ROW:
                continue
            known = self.answers[row].prompt
            for place, (values, ids) in enumerate(zip(found.values, found.ids, strict=True)):
                known[start + place] = values.tolist(), ids.tolist()
            if len(known) == len(self.wanted[row].prompt) - 1:
                self.scheduler.has_prompt_logprobs(row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    return save_model(tmp_path_factory.mktemp("mistral"), "mistral")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


Make = Callable[..., tuple[TorchRunner, OpRecorder]]


@pytest.fixture
def make(model: LoadedModel) -> Iterator[Make]:
    made: list[TorchRunner] = []

    def make(sizes: Sequence[int], buckets: Sequence[int] = ()) -> tuple[TorchRunner, OpRecorder]:
        recorder = OpRecorder()
        runner = TorchRunner(
            model,
            num_blocks=200,
            block_size=BLOCK,
            max_num_seqs=SLOTS,
            kernel_config=KernelConfig(
                threads=1,
                native=False,
                capture=CaptureConfig(sizes=sizes, buckets=buckets, recorder=recorder),
                copies=HostCopies(),
            ),
        )
        made.append(runner)
        return runner, recorder

    yield make
    for runner in made:
        runner.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that was recorded."""
    found: list[int] = []
    forward = DecodeGraphs.forward

    def counting(self: DecodeGraphs, plan: StepPlan) -> torch.Tensor:
        found.append(plan.num_requests)
        return forward(self, plan)

    monkeypatch.setattr(DecodeGraphs, "forward", counting)
    return found


def same(ours: Sequence[Answer], theirs: Sequence[Answer], wanted: Sequence[Wanted]) -> None:
    for one, other, it in zip(ours, theirs, wanted, strict=True):
        least = it.num_tokens if it.leaves_after is None else it.leaves_after
        assert len(one.token_ids) == len(other.token_ids) == least
        assert one.token_ids == other.token_ids
        assert one.top_ids == other.top_ids
        for values, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert values == pytest.approx(expected, abs=1e-4)
        assert one.prompt.keys() == other.prompt.keys()
        for place, (values, ids) in one.prompt.items():
            assert ids == other.prompt[place][1]
            assert values == pytest.approx(other.prompt[place][0], abs=1e-4)


GREEDY = [Wanted(prompt) for prompt in prompts_of(5, 23, 1, 41, 12, 30)]
RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logit_bias": {7: 6.0, 8: 6.0}, "words": [(7, 7), (8, 7), (9,)]},
    {"allowed_token_ids": (4, 5), "words": [(4, 4), (5, 5, 5)]},
]
_COMMON = prompts_of(26, seed=9)[0]


def drawn(seed: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 1.1, "seed": seed, **more}


SCENES: dict[str, list[Wanted]] = {
    "greedy": GREEDY,
    "grammars beside others": [
        Wanted(prompt, has_grammar=n % 2 == 0, num_logprobs=n % 3 - 1)
        for n, prompt in enumerate(prompts_of(5, 23, 1, 12))
    ],
    "rules beside others": [
        Wanted(prompt, constraints=RULES[n] if n < len(RULES) else None, num_logprobs=2)
        for n, prompt in enumerate(prompts_of(9, 30, 5, 14, 3, 22))
    ],
    "rules, drawn, some of them with a grammar": [
        Wanted(prompt, constraints=constraints, has_grammar=n == 1, **drawn(n, top_k=20))
        for n, (prompt, constraints) in enumerate(zip(prompts_of(9, 5, 14, 3), RULES, strict=True))
    ],
    "ends that are forbidden for a while": [
        Wanted(prompt, min_tokens=8 * (n % 2), num_logprobs=1)
        for n, prompt in enumerate(prompts_of(9, 5, 14, 3))
    ],
    "blocks that are shared": [
        Wanted([*_COMMON, *tail], arrives=4 * n, num_logprobs=n - 1)
        for n, tail in enumerate(([], [5], [5, 6, 7], [11, 12]))
    ],
    "several answers to one prompt": [
        Wanted(_COMMON[:19], arrives=6 * (n > 0), **drawn(50 + n, top_p=0.9)) for n in range(6)
    ],
    "rows that leave in the middle": [
        Wanted(prompt, num_tokens=24, leaves_after=(3, 17, None, 1, 9, None)[n])
        for n, prompt in enumerate(prompts_of(5, 23, 1, 12, 7, 30))
    ],
    "batches that grow and shrink": [
        Wanted(prompt, num_tokens=6 + 5 * (n % 4), arrives=3 * n, **drawn(n, min_p=0.05))
        for n, prompt in enumerate(prompts_of(5, 23, 1, 12, 7, 30, 4, 9, 2, 16))
    ],
    "prompts whose log-probabilities are wanted": [
        Wanted(prompt, arrives=5 * n, num_logprobs=n - 1, num_prompt_logprobs=(3, -1, 0)[n % 3])
        for n, prompt in enumerate(prompts_of(9, 30, 12, 41))
    ],
    "more log-probabilities than are recorded": [
        Wanted(prompt, num_logprobs=(25, -1, 3)[n]) for n, prompt in enumerate(prompts_of(9, 5, 12))
    ],
    "listed ids, of a request that leaves": [
        Wanted(
            prompt, num_logprobs=(2, -1, 3)[n], listed=((9, 4), (), ())[n], num_tokens=8 + 16 * n
        )
        for n, prompt in enumerate(prompts_of(9, 5, 12))
    ],
}
RUNS_FOR_LONG = 24  # recorded steps at the least; so is what hangs on the steps before


@pytest.mark.parametrize(
    ("sizes", "buckets"), [((1, 2, 4, 8), ()), ((3, 8), ()), ((4, 8), (4, 16))], ids=str
)
@pytest.mark.parametrize("name", SCENES)
def test_the_same_answers_as_without(
    make: Make, taken: list[int], name: str, sizes: tuple[int, ...], buckets: tuple[int, ...]
) -> None:
    wanted = SCENES[name]
    answers, plays = [], []
    for runner, recorder in (make(()), make(sizes, buckets)):
        recorder.num_replays = 0
        play = Play(runner, budget=12, num_blocks=200, sharing=True)
        answers.append(play.run(wanted))
        plays.append((play, recorder.num_replays))
    same(*answers, wanted)
    assert len({token for it in answers[0] for token in it.token_ids}) > 8
    assert plays[0][1] == 0
    assert plays[1][1] >= RUNS_FOR_LONG // 2
    assert len(taken) >= 8
    if name == "blocks that are shared":
        assert plays[1][0].scheduler.prefix_cache_hits > 3 * BLOCK
    if (
        name == "batches that grow and shrink" and not buckets
    ):  # over sizes that are recorded, both ways
        ups = [a < b for a, b in pairwise(taken) if a != b]
        assert sum(ups) > 2
        assert len(ups) - sum(ups) > 2


def test_who_was_preempted_goes_on_as_before(make: Make, taken: list[int]) -> None:
    wanted = [
        Wanted(
            prompt,
            constraints=RULES[n % 4] if n % 3 == 0 else None,
            has_grammar=n == 4,
            num_logprobs=n % 3 - 1,
            leaves_after=9 if n == 5 else None,
            **drawn(n) if n % 2 else {},
        )
        for n, prompt in enumerate(prompts_of(9, 30, 5, 14, 3, 22, 11, 7, seed=5))
    ]
    answers = []
    for sizes, num_blocks, buckets in (
        ((), 200, ()),
        ((), 22, ()),
        ((1, 2, 4, 8), 22, ()),
        ((5,), 22, ()),
        ((2, 8), 22, (8, 32, 64)),
    ):
        runner, _ = make(sizes, buckets)
        play = Play(runner, budget=40, num_blocks=num_blocks, sharing=False)
        answers.append(play.run(wanted))
        assert (play.scheduler.num_preemptions > 3) == (num_blocks == 22)
    for found in answers[1:]:
        same(found, answers[0], wanted)
    assert len(taken) >= RUNS_FOR_LONG
