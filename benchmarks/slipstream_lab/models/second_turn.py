"""The second turn of a conversation: how much of the first turn, prompt and answer, is found in the
prefix cache, and how soon the first token comes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.scheduler.scheduler import Scheduler
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.history.token_log import TokenLog
from slipstream_lab.common.bare_loop import LoopRequest, add_request, new_scheduler

_BUDGET = 512  # tokens of a step
_ANSWER_SHARE = 32  # one token in so many is of the answer
MESSAGE_LEN = 48  # new tokens of the second turn


class SecondTurn(NamedTuple):
    """found: share of the first turn's tokens. first_token_s, cold_s: until the first token of the
    second turn, and of the same prompt without the cache.
    """

    found: float
    first_token_s: float
    cold_s: float


def measure_second_turn(runner: TorchRunner, num_tokens: int) -> SecondTurn:
    """A conversation whose first turn has `num_tokens` tokens, alone on a runner with room for it
    and `MESSAGE_LEN` + 1 more.
    """
    random = np.random.default_rng(0)
    answer_len = max(1, num_tokens // _ANSWER_SHARE)
    vocab_size = runner.info.vocab_size
    prompt = random.integers(3, vocab_size, num_tokens - answer_len).astype(np.uint32)
    tokens = TokenLog()
    scheduler = new_scheduler(
        (),
        num_blocks=runner.num_blocks,
        block_size=runner.info.block_size,
        budget=_BUDGET,
        max_model_len=runner.info.max_model_len,
        info=runner.info,
        tokens=tokens,
    )
    answer, _ = _run(runner, scheduler, tokens, 0, prompt, answer_len)
    message = random.integers(3, vocab_size, MESSAGE_LEN).astype(np.uint32)
    turn = np.concatenate([prompt, answer, message])
    hits = scheduler.prefix_cache_hits
    _, first_token_s = _run(runner, scheduler, tokens, 1, turn, 1)
    found = (scheduler.prefix_cache_hits - hits) / num_tokens
    scheduler.reset_prefix_cache()
    _, cold_s = _run(runner, scheduler, tokens, 2, turn, 1)
    return SecondTurn(found, first_token_s, cold_s)


def _run(
    runner: TorchRunner,
    scheduler: Scheduler,
    tokens: TokenLog,
    row: int,
    prompt: npt.NDArray[np.uint32],
    num_outputs: int,
) -> tuple[npt.NDArray[np.uint32], float]:
    """The outputs of one request, and the seconds until the first of them."""
    acked = np.zeros(row + 1, np.int64)
    in_flight: deque[StepPlan] = deque()
    first_token_s = 0.0
    begin = time.perf_counter()
    add_request(scheduler, tokens, row, LoopRequest(prompt, num_outputs))
    while scheduler.has_work or in_flight:
        while len(in_flight) < 2 and (plan := scheduler.schedule(acked)) is not None:
            runner.launch(plan)
            in_flight.append(plan)
        sampled = scheduler.complete(in_flight.popleft(), runner.collect().token_ids)
        if len(sampled.token_ids) and not first_token_s:
            first_token_s = time.perf_counter() - begin
    outputs = tokens.read(row, len(prompt), len(prompt) + num_outputs)
    return outputs, first_token_s
