"""A step may give each row any number of tokens, as speculation does, and nothing else changes.

The runner here gives away more of each stream's own output than a step computes: what a model with
right drafts would. Every layer between it and the client's text is the real one.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.mini_stack import CHAIN, MiniStack, Received

from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
from slipstream_core.step.plan import Logprobs, StepPlan, StepResult
from slipstream_ipc.messages import RepetitionDetection
from slipstream_worker.detokenizer.factory import DetokenizerFactory

PROMPTS = [list(range(40, 40 + 3 * n)) for n in range(1, 5)]  # of different lengths
MAX_TOKENS = 24


class GenerousRunner:
    """A runner whose steps give each row `take()` tokens: its own one, and those that follow it.

    outputs: by prompt length, all that a stream will get; the prompts' lengths differ.
    is_read: whether as many tokens as were collected have been read; a step is not done before.
    """

    def __init__(
        self,
        inner: SimulatedRunner,
        outputs: dict[int, list[int]],
        take: Callable[[], int],
        is_read: Callable[[int], bool],
    ) -> None:
        self._inner = inner
        self._outputs = outputs
        self._take = take
        self._is_read = is_read
        self._num_collected = 0
        self._given: deque[list[list[int]]] = deque()  # of each step in flight, by sampled row
        self.info, self.num_blocks = inner.info, inner.num_blocks

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)
        lens = zip(plan.kv_lens.tolist(), plan.prompt_lens.tolist(), strict=True)
        rows = [each for each, samples in zip(lens, plan.samples, strict=True) if samples]
        # more than a request may have is the scheduler's to drop
        given = [
            [*self._outputs[prompt_len][kv_len - prompt_len :], *[1] * 9][: self._take()]
            for kv_len, prompt_len in rows
        ]
        self._given.append(given)
        # as on a device: the step behind this one begins with the last of them
        for slot, ids in zip(plan.slots[plan.samples], given, strict=True):
            if len(ids) > 1:
                self._inner._last_token[slot] = ids[-1]

    def sample(self, plan: StepPlan, masks: npt.NDArray[np.int32]) -> None:
        self._inner.sample(plan, masks)

    def collect(self) -> StepResult:
        result, given = self._inner.collect(), self._given.popleft()
        for own, each in zip(result.token_ids.tolist(), given, strict=True):
            each[0] = own  # as computed from the cache
        counts = np.array([len(each) for each in given], np.int64)
        ids = np.array([token_id for each in given for token_id in each], np.int64)
        logprobs = result.logprobs
        if logprobs is not None:  # told apart by token
            values, entries = (
                np.repeat(each, counts, 0) for each in (logprobs.values, logprobs.ids)
            )
            values[:, 0], entries[:, 0] = -ids, ids
            logprobs = Logprobs(values, entries, (ids + 1).astype(np.uint32))
        self._num_collected += len(ids)
        every_one = (counts == 1).all() and result.step % 2 == 0
        return StepResult(result.step, ids, logprobs, counts=None if every_one else counts)

    def done(self) -> bool:
        return self._is_read(self._num_collected) and self._inner.done()

    def done_at(self) -> float | None:
        return self._inner.done_at() if self._is_read(self._num_collected) else None

    def fileno(self) -> int | None:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()


Serve = Callable[..., list[Received]]


@pytest.fixture(scope="module")
def serve(tokenizer: object, detokenizers: DetokenizerFactory) -> Serve:
    """Serves a stream of each of `kinds` to its end, with `counts` tokens to a row and step in
    turn; None: as the model does. is_paced, with counts of 1: no step is done before what came of
    the earlier ones is read.
    """

    def run(
        kinds: Sequence[dict[str, object]],
        counts: Sequence[int] | None = None,
        outputs: dict[int, list[int]] | None = None,
        *,
        is_paced: bool = False,
        **options: object,
    ) -> list[Received]:
        with tempfile.TemporaryDirectory(prefix="mini-") as folder:
            stack = MiniStack(Path(folder), CHAIN, tokenizer, detokenizers, **options)
            try:
                return serve_in(stack, kinds, counts, outputs or {}, is_paced=is_paced)
            finally:
                stack.close()

    return run


def serve_in(
    stack: MiniStack,
    kinds: Sequence[dict[str, object]],
    counts: Sequence[int] | None,
    outputs: dict[int, list[int]],
    *,
    is_paced: bool,
) -> list[Received]:
    assert stack.core is not None
    engine, scheduler = stack.core.engine, stack.core.scheduler
    streams: list[Received] = []

    def is_read(num_tokens: int) -> bool:
        return not is_paced or sum(len(it.token_ids) for it in streams) >= num_tokens

    if counts is not None:
        draw = cycle(counts)
        engine._runner = GenerousRunner(engine._runner, outputs, lambda: next(draw), is_read)
    client = stack.client()
    streams += [
        client.submit(prompt, max_tokens=MAX_TOKENS, **kind)
        for prompt, kind in zip(PROMPTS, kinds, strict=False)
    ]
    stack.until(lambda: all(it.is_over for it in streams))
    stack.until(lambda: not scheduler.has_work)
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1
    return streams


def outputs_of(streams: list[Received]) -> dict[int, list[int]]:
    outputs = {it.prompt_len: it.token_ids for it in streams}
    assert len(outputs) == len(streams), "the prompts' lengths tell streams apart"
    return outputs


def told(streams: list[Received]) -> list[object]:
    return [(it.text, it.token_ids, it.end) for it in streams]


SAMPLED = ("seed", "temperature")  # what decides which tokens there are to give
KINDS: list[dict[str, object]] = [
    {},
    {"seed": 7, "temperature": 1.0},
    {"stop": ["e"]},
    {"stop": ["zz", "on"], "min_tokens": 5},
    {"logprobs": 2},
    {"repetition_detection": RepetitionDetection(max_pattern_size=5, min_count=2)},
]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    options=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([4, 16]),
            "enable_prefix_caching": st.booleans(),
            "stream_interval": st.integers(1, 5),
            "is_tight": st.booleans(),
        }
    ),
)
@example(  # one each, said and left unsaid in turn
    kinds=[KINDS[0]],
    counts=[1],
    options={
        "block_size": 16,
        "enable_prefix_caching": False,
        "stream_interval": 1,
        "is_tight": False,
    },
)
@example(  # long ones, which preempt each other
    kinds=[KINDS[0], KINDS[0], KINDS[1], KINDS[4]],
    counts=[2, 5, 1, 4, 1],
    options={
        "block_size": 4,
        "enable_prefix_caching": False,
        "stream_interval": 1,
        "is_tight": True,
    },
)
@example(
    kinds=[KINDS[0], KINDS[2], KINDS[3], KINDS[4]],
    counts=[5, 1, 1, 3, 6, 1],
    options={
        "block_size": 4,
        "enable_prefix_caching": True,
        "stream_interval": 1,
        "is_tight": True,
    },
)
@settings(max_examples=25, deadline=None)
def test_text_does_not_depend_on_how_many_tokens_a_step_gives(
    serve: Serve,
    kinds: list[dict[str, object]],
    counts: list[int],
    options: dict[str, object],
) -> None:
    """From the core's histories over deltas and the worker to the client's text."""
    options = dict(options)
    # blocks for one stream and a half: the others give way and begin again
    tight = {"num_blocks": 16 if options["block_size"] == 4 else 5, "max_model_len": 56}
    options |= tight if options.pop("is_tight") else {}
    sampled = [{name: kind[name] for name in SAMPLED if name in kind} for kind in kinds]
    whole, plain = serve(sampled, **options), serve(kinds, **options)
    several = serve(kinds, counts, outputs_of(whole), **options)
    assert told(several) == told(plain)
    for it, kind in zip(several, kinds, strict=True):
        if "logprobs" in kind:
            assert it.ranks == [token_id + 1 for token_id in it.token_ids]


def test_several_tokens_travel_together(serve: Serve) -> None:
    whole = outputs_of(serve([{}], stream_interval=1))
    plain = serve([{}], [1], whole, is_paced=True, stream_interval=1)
    several = serve([{}], [4], whole, stream_interval=1)
    assert told(several) == told(plain)
    assert several[0].num_deltas <= 1 + MAX_TOKENS // 4 < plain[0].num_deltas
