"""The bare loop: the real scheduler and a runner, one step ahead, and nothing else. Stacks are
compared with it, and it generates the tokens for checks of exactness.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs

from slipstream_core.drafting.drafter import Drafter
from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.grammar.matcher import GrammarMatcher
from slipstream_core.media.places import MediaPlaces
from slipstream_core.scheduler.constraint_columns import token_constraints
from slipstream_core.scheduler.scheduler import CacheConfig, NewRequest, Scheduler
from slipstream_core.step.plan import ModelInfo, Runner, StepPlan
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import RequestSpec, SamplingParams

_NOTHING = SamplingParams()


@dataclass(frozen=True, slots=True)
class LoopRequest:
    """One request."""

    prompt: npt.NDArray[np.uint32]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    adapter: int = -1  # its place; with the prefix cache requests share blocks with their own
    more: SamplingParams = _NOTHING  # what else it asks for
    bad_words: tuple[tuple[int, ...], ...] = ()  # in token ids
    grammar: Callable[[], GrammarMatcher] | None = None  # at its start
    prediction: tuple[int, ...] = ()  # of its answer
    media: MediaPlaces | None = None  # its images


@dataclass(slots=True)
class LoopOutput:
    """The outputs of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of those tokens, if requested
    others: list[float] = field(default_factory=list)  # and of the alternatives to each


@dataclass(frozen=True, slots=True)
class LoopStep:
    """A collected step."""

    at_s: float  # time.perf_counter()
    num_decodes: int
    num_requests: int
    is_overlapped: bool = False  # another was launched behind it
    num_drafts: int = 0
    num_accepted: int = 0
    has_prompts: bool = False  # computes tokens of prompts


def new_scheduler(
    requests: Sequence[LoopRequest],
    *,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_model_len: int,
    info: ModelInfo | None = None,
    tokens: TokenLog | None = None,
    drafter: Drafter | None = None,
    by_model: ModelDrafter | None = None,
) -> Scheduler:
    """A scheduler with `requests` queued as rows 0, 1, 2, …

    info: of the model whose prefixes are cached, in as many slots as its runner has; None: nothing
    is cached, and all requests run at once; with drafts, of a model without states. tokens: the
    histories; default: new ones. drafter: if the runner takes drafts; by_model: the part of it that
    its draft model drafts for.
    """
    tokens = TokenLog() if tokens is None else tokens
    scheduler = Scheduler(
        tokens=tokens,
        cache=CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=info is not None,
            has_states=info is not None and info.has_states,
            num_snapshots=info.num_snapshots if info else 0,
            num_draft_states=info.num_draft_states if info else 0,
            caches_answers=info is None or info.caches_answers,
            has_draft_model=by_model is not None,
        ),
        max_num_seqs=(info.max_num_seqs if info else None) or len(requests),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        drafter=drafter,
        by_model=by_model,
    )
    for row, it in enumerate(requests):
        add_request(scheduler, tokens, row, it)
    return scheduler


def add_request(scheduler: Scheduler, tokens: TokenLog, row: int, it: LoopRequest) -> None:
    """Queue one request, in a row of the histories that is free."""
    tokens.open(row)
    tokens.extend(row, it.prompt)
    scheduler.add(
        NewRequest(
            row=row,
            prompt_len=len(it.prompt),
            max_tokens=it.max_tokens,
            spec=RequestSpec(_params_of(it)),
            seed=it.seed,
            prefix_root=b"" if it.adapter < 0 else it.adapter.to_bytes(4, "little"),
            adapter=it.adapter,
            worker_ends=False,
            constraints=token_constraints(it.more, it.bad_words),
            has_grammar=it.grammar is not None,
            prediction_ids=pack_u32(it.prediction),
            media=it.media,
        )
    )


def _params_of(it: LoopRequest) -> SamplingParams:
    return structs.replace(
        it.more,
        temperature=it.temperature,
        top_k=it.top_k,
        top_p=it.top_p,
        min_p=it.min_p,
        logprobs=None if it.num_logprobs < 0 else it.num_logprobs,
    )


class Driven(NamedTuple):
    """What a run of the loop gave; outputs in the order of the requests."""

    outputs: list[LoopOutput]
    steps: list[LoopStep]
    num_preemptions: int
    num_cached: int  # tokens of prompts


def drive(
    runner: Runner,
    requests: Sequence[LoopRequest],
    *,
    budget: int,
    num_blocks: int | None = None,
    is_cached: bool = False,
    drafter: Drafter | Callable[[GrammarBitmasks], Drafter | None] | None = None,
    by_model: ModelDrafter | None = None,
) -> Driven:
    """Run all requests to their lengths, with `budget` tokens per step.

    num_blocks: fewer cache blocks than the runner has. is_cached: with the prefix cache. drafter,
    by_model: see `new_scheduler`; the first perhaps made for the grammars of the requests.
    """
    tokens = TokenLog()
    grammars = GrammarBitmasks(tokens, runner.info.vocab_size)
    for row, it in enumerate(requests):
        if it.grammar is not None:
            grammars.add(row, it.grammar(), len(it.prompt))
    if callable(drafter):
        drafter = drafter(grammars)
    scheduler = new_scheduler(
        requests,
        num_blocks=num_blocks or runner.num_blocks,
        block_size=runner.info.block_size,
        budget=budget,
        max_model_len=runner.info.max_model_len,
        info=runner.info if is_cached else None,
        tokens=tokens,
        drafter=drafter,
        by_model=by_model,
    )
    acked = np.zeros(len(requests), np.int64)  # no reader acknowledges
    outputs = [LoopOutput() for _ in requests]
    steps = []
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        while len(in_flight) < 2 and (plan := scheduler.schedule(acked)) is not None:
            runner.launch(plan)
            in_flight.append(plan)
            if plan.awaits_masks and len(in_flight) == 1:
                runner.sample(plan, grammars.masks(scheduler.grammar_rows_of(plan))[0])
        assert in_flight, "no request can run, and none runs"
        plan = in_flight.popleft()
        result = runner.collect()
        if plan.is_proposal:
            scheduler.complete(plan, result.token_ids)
            continue
        step = LoopStep(
            time.perf_counter(), plan.num_decodes, plan.num_requests, len(in_flight) > 0
        )
        if result.draft_lens is not None and result.counts is not None:
            num_drafts, num_accepted = result.draft_lens.sum(), (result.counts - 1).sum()
            step = replace(step, num_drafts=int(num_drafts), num_accepted=int(num_accepted))
            has_prompts = plan.num_tokens > plan.num_requests + step.num_drafts
            step = replace(step, has_prompts=has_prompts)
        steps.append(step)
        sampled = scheduler.complete(plan, result.token_ids, result.counts)
        if in_flight and in_flight[0].awaits_masks:
            rows = scheduler.grammar_rows_of(in_flight[0])
            runner.sample(in_flight[0], grammars.masks(rows)[0])
        rows, wide = sampled.rows.array, dict(result.wide)
        if sampled.counts is not None:
            rows = np.repeat(rows, sampled.counts)
        for row, token_id, index in zip(
            rows.tolist(), sampled.token_ids.tolist(), sampled.index.tolist(), strict=True
        ):
            outputs[row].token_ids.append(token_id)
            columns = wide.get(index) or result.logprobs
            if columns is not None:
                first, *others = columns.values[0 if index in wide else index].tolist()
                outputs[row].logprobs.append(first)
                outputs[row].others += others[: max(requests[row].num_logprobs, 0)]
    return Driven(outputs, steps, scheduler.num_preemptions, scheduler.prefix_cache_hits)


def decode_intervals_s(steps: Sequence[LoopStep], batch: int) -> list[float]:
    """For each step that decodes `batch` rows and nothing else: seconds since the step before
    ended.
    """
    return [
        after.at_s - before.at_s
        for before, after in pairwise(steps)
        if after.num_decodes == after.num_requests == batch
    ]


def random_prompts(
    num: int, length: int, vocab_size: int, seed: int = 0
) -> list[npt.NDArray[np.uint32]]:
    """Prompts of one length."""
    shape = (num, length)
    return list(np.random.default_rng(seed).integers(0, vocab_size, shape, np.uint32))
