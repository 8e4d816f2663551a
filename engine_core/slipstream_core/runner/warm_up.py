"""The warm-up of a core on a CPU, after which its first steps cost what later ones do.

- Small steps on the null block: threads start, libraries choose their kernels, code and memory are
  touched for the first time. They are left out for weights of more than `_LARGE_BYTES`, whose steps
  take so long that the rest does not matter, and where a predecessor's streams wait.
- Where the cache's size was asked for, so that memory may be taken, one of the steps is a prompt
  (libraries keep 18 MiB from their first large product on), and the cache is touched,
  starting with the blocks that are allocated first, for at most `_TOUCH_S`; of several ranks, the
  first one's.
- Where tokens are drafted, decode steps of 1, 2, 4, … rows are timed, for at most `_MEASURE_S`: by
  them the drafts of a step are chosen.
- Freed memory stays in the process: a step's buffers are those of the step before. The allocator
  would give the end of its heap back after one step and take it again, page by page, in the next.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from slipstream_core.config import CoreConfig
from slipstream_core.runner.kv_cache_size import largest_plan
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import (
    ModelInfo,
    ProposalPlan,
    Runner,
    StepFailed,
    StepPlan,
    columns_over,
    sampling_flags,
)

logger = logging.getLogger(__name__)

_ROWS, _TOKENS = 8, 64  # of the steps
_LARGE_BYTES = 2 << 30
_TOUCH_S = 1.0
_MEASURE_S, _REPEATS, _MOST_MEASURED = 1.0, 3, 128  # seconds; the quickest of so many; rows
_KEPT_BYTES = 256 << 20  # of the heap's end, and the largest buffer that is part of the heap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory, in one heap for all threads that start from now on."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    # a thread's own heap gives its end back behind each step (decision 031)
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def warm_up(runner: Runner, own: TorchRunner, config: CoreConfig) -> None:
    """Run the steps and touch the cache, as far as `config` and the size of the weights allow.

    runner: has all ranks compute a step. own: what computes in this process, whose cache it is.
    """
    if config.predecessor_ended_s:  # its streams wait (decision 031)
        return
    if own.weight_bytes <= _LARGE_BYTES:
        for plan in warm_up_plans(runner.info, config):
            runner.launch(plan)
            try:
                runner.collect()
            except StepFailed as error:  # requests will tell
                logger.warning("a step before the first request failed: %s", error)
    if config.touches_cache:
        num = own.touch_cache(_TOUCH_S)
        logger.debug("touched %d of %d cache blocks", num, own.num_blocks)


def decode_times(
    runner: Runner,
    config: CoreConfig,
    clock: Callable[[], float] = time.perf_counter,
    *,
    of_draft_model: bool = False,
) -> tuple[tuple[int, float], ...]:
    """Seconds of decode steps, by ascending numbers of rows; as many as are timed soon enough.

    Empty where a predecessor's streams wait, or a step fails. of_draft_model: of its steps, in
    which it foresees a token of each row; empty where there is none.
    """
    info, found, begin = runner.info, list[tuple[int, float]](), clock()
    if config.predecessor_ended_s or (of_draft_model and not info.draft_model_len):
        return ()
    slots = info.max_num_seqs or config.max_num_seqs
    most, rows = min(config.max_num_batched_tokens, info.max_model_len, _MOST_MEASURED), 1
    while rows <= most and clock() - begin < _MEASURE_S:
        limits = {"max_model_len": info.max_model_len, "vocab_size": info.vocab_size}
        plan = _greedy(largest_plan(rows, rows, **limits))
        plan = replace(plan, slots=plan.slots % slots)  # as drafts share their row's
        if of_draft_model:
            one = np.ones(rows, np.int64)
            plan = replace(plan, proposals=ProposalPlan(one, one[:0]))
        taken = []
        for _ in range(_REPEATS):
            started = clock()
            runner.launch(plan)
            try:
                runner.collect()
            except StepFailed as error:  # requests will tell
                logger.warning("a step before the first request failed: %s", error)
                return ()
            taken.append(clock() - started)
        found.append((rows, min(taken)))
        rows *= 2
    return tuple(found)


def warm_up_plans(info: ModelInfo, config: CoreConfig) -> list[StepPlan]:
    """A greedy decode step, one that samples and wants log-probabilities, and perhaps a prompt."""
    most = min(config.max_num_batched_tokens, info.max_model_len)
    rows = min(_ROWS, config.max_num_seqs, most)

    def plan(num_rows: int, num_tokens: int) -> StepPlan:
        return largest_plan(
            num_rows,
            num_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        )

    sampled = plan(rows, rows)
    prompts = [_greedy(plan(1, min(_TOKENS, most)))] if config.touches_cache else []
    return [_greedy(sampled), sampled, *prompts]


def _greedy(plan: StepPlan) -> StepPlan:
    num = len(plan.temperatures)
    blank = {name: each.blank(num) for name, each in columns_over("S").items()}
    return replace(plan, **blank, **sampling_flags(blank))
