"""How much of a prompt was in the prefix cache: what its first computation found, over deaths of
core and worker at every point.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from openai import OpenAI
from tests.helpers.mini_stack import MiniStack, RawClient, Received
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

SHARED = [3 + n % 200 for n in range(64)]
PROMPTS = [[*SHARED, 7, 8], [*SHARED[:32], 9], [5, 6]]
CACHED = [64, 32, 0]
BLOCK_SIZE = 16


@pytest.fixture
def stack(make_stack: Callable[..., MiniStack]) -> MiniStack:
    """A stack whose cache has the blocks of SHARED."""
    stack = make_stack(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    first = stack.client().submit([*SHARED, 1], max_tokens=2)
    stack.until(lambda: first.is_over)
    assert first.end.num_cached_tokens == 0
    return stack


def started(stack: MiniStack) -> tuple[RawClient, list[Received]]:
    client = stack.client()
    return client, [client.submit(prompt, max_tokens=40) for prompt in PROMPTS]


def cached(stack: MiniStack, streams: list[Received]) -> list[int]:
    stack.until(lambda: all(stream.is_over for stream in streams))
    assert [stream.fault for stream in streams] == [None] * len(streams)
    return [stream.end.num_cached_tokens for stream in streams]


def await_more(stack: MiniStack, streams: list[Received], num_tokens: int) -> None:
    """Wait until each stream has so many more tokens, or its end."""
    wanted = [len(it.token_ids) + num_tokens for it in streams]
    pairs = list(zip(streams, wanted, strict=True))
    stack.until(lambda: all(it.is_over or len(it.token_ids) >= num for it, num in pairs))


def kill_core(stack: MiniStack) -> None:
    stack.kill_core()
    for _ in range(5):
        stack.step()
    stack.start_core()


def kill_worker(stack: MiniStack) -> None:
    stack.kill_worker()
    for _ in range(5):
        stack.step()
    stack.start_worker()
    # a stream that core and worker lose together is submitted again, and computed anew
    stack.until(lambda: stack.worker._from_core.is_synced)


def test_an_end_says_how_much_of_the_prompt_was_cached(stack: MiniStack) -> None:
    _, streams = started(stack)
    assert cached(stack, streams) == CACHED


@pytest.mark.parametrize("num_tokens", [1, 5, 15])
@pytest.mark.parametrize(
    "deaths",
    [
        [kill_core],
        [kill_worker],
        [kill_core, kill_worker],
        [kill_worker, kill_core],
        [kill_core, kill_core],
    ],
    ids=lambda deaths: "_".join(death.__name__ for death in deaths),
)
def test_it_is_kept_over_deaths_of_core_and_worker(stack, deaths, num_tokens) -> None:
    """The cache of another core is empty, and may have the blocks of another stream by then."""
    _, streams = started(stack)
    for death in deaths:
        await_more(stack, streams, num_tokens)
        death(stack)
    assert cached(stack, streams) == CACHED


def test_a_stream_that_found_nothing_finds_nothing_later(make_stack) -> None:
    """After the death of a core, one of two equal prompts finds the blocks of the other."""
    stack = make_stack(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    client = stack.client()
    one = client.submit([*SHARED, 1], max_tokens=40)
    stack.until(lambda: len(one.token_ids) > 2)
    other = client.submit([*SHARED, 2], max_tokens=40)
    stack.until(lambda: len(other.token_ids) > 2)
    kill_core(stack)
    assert cached(stack, [one, other]) == [0, 64]


def test_a_reader_that_comes_later_is_told_as_well(stack: MiniStack) -> None:
    _, streams = started(stack)
    assert cached(stack, streams) == CACHED
    reader = stack.client()
    again = [reader.take_over(it) for it in streams]
    assert cached(stack, again) == CACHED
    kill_worker(stack)
    reader = stack.client()
    again = [reader.take_over(it) for it in streams]
    assert cached(stack, again) == CACHED


def test_without_a_cache_it_is_0(make_stack) -> None:
    stack = make_stack(enable_prefix_caching=False)
    for _ in range(2):
        _, streams = started(stack)
        assert cached(stack, streams) == [0, 0, 0]


def test_an_aborted_stream_has_an_end_that_says_it(stack: MiniStack) -> None:
    client, streams = started(stack)
    stack.until(lambda: all(len(it.token_ids) > 1 for it in streams))
    for it in streams:
        client.abort(it)
    assert cached(stack, streams) == CACHED
    assert [it.end.reason for it in streams] == ["abort"] * len(streams)


def test_python_and_http_say_it() -> None:
    model = "simulated:step_ms=1,mode=chain"
    with spareless_stack(model, http_port=0, block_size=BLOCK_SIZE) as stack:
        with stack.client() as client:
            first, second = [client.generate(PROMPTS[0], max_tokens=2) for _ in "ab"]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
        url = f"{stack.http_address}/v1"
        with OpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE_S) as api:
            answer = api.completions.create(model=client.model.name, prompt=PROMPTS[1])
            assert answer.usage.prompt_tokens_details.cached_tokens == 32
            assert answer.usage.completion_tokens_details.reasoning_tokens == 0
