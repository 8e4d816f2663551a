"""A step may give each row any number of tokens, as speculation does, and nothing else changes.

The simulated device here gives more of each stream's own output than a step computes. Every layer
between it and the client's text is the real one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.given_lengths import give
from tests.helpers.mini_stack import CHAIN, MiniStack, Received

from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
from slipstream_core.step.plan import StepResult
from slipstream_ipc.messages import RepetitionDetection
from slipstream_worker.detokenizer.factory import DetokenizerFactory

PROMPTS = [list(range(40, 40 + 3 * n)) for n in range(1, 5)]
MAX_TOKENS = 24


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
        *,
        is_paced: bool = False,
        **options: object,
    ) -> list[Received]:
        with tempfile.TemporaryDirectory(prefix="mini-") as folder:
            stack = MiniStack(Path(folder), CHAIN, tokenizer, detokenizers, **options)
            try:
                return serve_in(stack, kinds, counts, is_paced=is_paced)
            finally:
                stack.close()

    return run


def serve_in(
    stack: MiniStack,
    kinds: Sequence[dict[str, object]],
    counts: Sequence[int] | None,
    *,
    is_paced: bool,
) -> list[Received]:
    assert stack.core is not None
    engine, scheduler = stack.core.engine, stack.core.scheduler
    streams: list[Received] = []

    if counts is not None:
        give(engine._runner, counts)
    if is_paced:
        pace(engine._runner, lambda: sum(len(it.token_ids) for it in streams))
    client = stack.client()
    streams += [
        client.submit(prompt, max_tokens=MAX_TOKENS, **kind)
        for prompt, kind in zip(PROMPTS, kinds, strict=False)
    ]
    stack.until(lambda: all(it.is_over for it in streams))
    stack.until(lambda: not scheduler.has_work)
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1
    return streams


def pace(runner: SimulatedRunner, num_read: Callable[[], int]) -> None:
    """No step of `runner` is done before all that were collected have been read."""
    num_collected = 0

    def collect(inner: Callable[[], StepResult] = runner.collect) -> StepResult:
        nonlocal num_collected
        result = inner()
        num_collected += len(result.token_ids)
        return result

    def done(inner: Callable[[], bool] = runner.done) -> bool:
        return num_read() >= num_collected and inner()

    def done_at(inner: Callable[[], float | None] = runner.done_at) -> float | None:
        return inner() if num_read() >= num_collected else None

    runner.collect, runner.done, runner.done_at = collect, done, done_at  # type: ignore[method-assign]


def told(streams: list[Received]) -> list[object]:
    return [(it.text, it.token_ids, it.end, it.ranks, bytes(it.logprobs)) for it in streams]


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
    plain = serve(kinds, **options)
    assert told(serve(kinds, counts, **options)) == told(plain)


def test_several_tokens_travel_together(serve: Serve) -> None:
    plain = serve([{}], [1], is_paced=True, stream_interval=1)
    several = serve([{}], [4], stream_interval=1)
    assert told(several) == told(plain)
    assert several[0].num_deltas <= 1 + MAX_TOKENS // 4 < plain[0].num_deltas
