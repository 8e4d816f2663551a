"""Log-probabilities of prompts over deaths at every point: whole, once, and the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.helpers.mini_stack import CHAIN, MiniStack

from slipstream.prompt_logprobs import prompt_logprobs_of

PROMPTS = ["Chapter 1: how names are bound, and where.", "A list is", "x", "And then? " * 9]
PARAMS: dict[str, Any] = {"max_tokens": 12, "prompt_logprobs": 3, "logprobs": 1}
POINTS = [4, 6, 8, 11, 16, 24]


@pytest.fixture(autouse=True)
def small_messages():
    with patch(
        "slipstream_ipc.history.prompt_logprob_log.MESSAGE_BUDGET_BYTES", 200
    ):  # five tokens to a piece
        yield


@pytest.fixture(scope="module")
def plain(tokenizer, detokenizers):
    directory = Path(tempfile.mkdtemp(prefix="mini-"))
    stack = MiniStack(directory, CHAIN, tokenizer, detokenizers)
    yield run(stack, lambda _stack, _client: None, 0)
    stack.close()
    shutil.rmtree(directory)


def run(stack, disturb, num_steps: int, params: dict[str, Any] = PARAMS):
    client = stack.client()
    streams = [client.submit(prompt, **params) for prompt in PROMPTS]
    for _ in range(num_steps):
        stack.step()
    disturb(stack, client)
    stack.until(lambda: all(stream.is_over for stream in streams))
    assert [stream.fault for stream in streams] == [None] * len(streams)
    return streams


def seen(streams) -> list[Any]:
    return [
        (one.text, one.token_ids, one.ranks, prompt_logprobs_of(one.prompt), one.end)
        for one in streams
    ]


def kill_core(stack, _client) -> None:
    stack.kill_core()
    for _ in range(5):
        stack.step()
    stack.start_core()


def kill_worker(stack, _client) -> None:
    stack.kill_worker()
    for _ in range(5):
        stack.step()
    stack.start_worker()


def kill_both(stack, client) -> None:
    stack.kill_core()
    kill_worker(stack, client)
    stack.start_core()


def kill_core_then_worker(stack, client) -> None:
    """The second core was given what the first one had computed, and has to hand it on."""
    kill_core(stack, client)
    for _ in range(12):
        stack.step()
    kill_worker(stack, client)


def attach_anew(stack, client) -> None:
    client.hop.attach(stack.now())


@pytest.mark.parametrize("num_steps", POINTS)
@pytest.mark.parametrize(
    "disturb", [kill_core, kill_worker, kill_both, kill_core_then_worker, attach_anew]
)
def test_at_every_point(make_stack, plain, disturb, num_steps) -> None:
    # prompts are computed in chunks of a few tokens, so most points lie inside of one
    found = run(make_stack(max_num_batched_tokens=8), disturb, num_steps)
    assert seen(found) == seen(plain)
    for one in found:
        assert len(prompt_logprobs_of(one.prompt)) == one.prompt_len


def test_preempted_in_the_middle_of_a_prompt(make_stack, plain) -> None:
    stack = make_stack(max_num_batched_tokens=8, max_model_len=128, num_blocks=9 + 3)
    found = run(stack, lambda _stack, _client: None, 0)
    assert seen(found) == seen(plain)
    assert stack.held["blocks"] == 0


def test_what_the_cache_has_is_computed_again(make_stack, plain) -> None:
    stack = make_stack()
    run(stack, lambda _stack, _client: None, 0, {"max_tokens": 3})
    assert seen(run(stack, lambda _stack, _client: None, 0)) == seen(plain)


def test_who_goes_on_with_a_stream_elsewhere_gets_them_too(make_stack, plain) -> None:
    stack = make_stack()
    first = stack.client()
    streams = [first.submit(prompt, **PARAMS) for prompt in PROMPTS]
    stack.until(lambda: all(stream.is_over for stream in streams))
    second = stack.client()
    taken = [second.take_over(stream) for stream in streams]
    for one in taken:
        one.wants_prompt = True
    stack.until(lambda: all(stream.is_over for stream in taken))
    assert seen(taken) == seen(plain)


def test_who_ended_before_they_were_whole_has_none(make_stack) -> None:
    stack = make_stack(max_num_batched_tokens=8, grace_s=0.05)
    client = stack.client()
    one = client.submit("And then? " * 30, **PARAMS)
    stack.until(lambda: one.accepted > 0)
    client.abort(one)
    one.wants_prompt = False
    stack.until(lambda: one.is_over)
    assert one.end is not None
    assert one.end.reason == "abort"
    assert not one.prompt.is_whole
    stack.until(stack.holds_nothing)
