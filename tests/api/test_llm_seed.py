"""A script whose model has a seed repeats itself; a request's own seed goes before it."""

from __future__ import annotations

import pytest

import slipstream
from slipstream.request.requests import checked_params
from slipstream_ipc.messages import SamplingParams


def script(seed: int | None) -> list[str]:
    """The texts of several calls of one model."""
    params = slipstream.SamplingParams(temperature=1.0, max_tokens=8)
    own = slipstream.SamplingParams(temperature=1.0, max_tokens=8, seed=3)
    several = slipstream.SamplingParams(temperature=1.0, max_tokens=8, n=2)
    with slipstream.LLM(seed=seed, threads=1) as llm:
        outputs = llm.generate(["Lambdas are"] * 2, params, use_tqdm=False)
        outputs += llm.generate("Lambdas are", own, use_tqdm=False)
        outputs += llm.generate("Lambdas are", several, use_tqdm=False)
        return [each.text for output in outputs for each in output.outputs]


@pytest.mark.process  # starts three stacks
def test_a_script_with_a_seed_repeats_itself() -> None:
    first, again, other = script(5), script(5), script(6)
    assert first == again
    assert len(set(first)) == len(first)  # each request has its own
    assert other[2] == first[2]  # whose own seed goes before the model's
    assert all(one != two for n, (one, two) in enumerate(zip(first, other, strict=True)) if n != 2)


@pytest.mark.parametrize("seed", [-1, None])
def test_a_seed_of_minus_one_is_none(seed: int | None) -> None:
    for found in (
        checked_params(SamplingParams(seed=seed, n=2), {}),
        checked_params(None, {"seed": seed}),
    ):
        assert found.seed is None


def test_other_negative_seeds_are_seeds() -> None:
    assert checked_params(None, {"seed": -2}).seed == -2


def test_true_is_one_log_probability() -> None:
    for found in (
        checked_params(SamplingParams(logprobs=True, prompt_logprobs=True), {}),
        checked_params(None, {"logprobs": True, "prompt_logprobs": True}),
    ):
        assert (found.logprobs, found.prompt_logprobs) == (1, 1)
        assert type(found.logprobs) is int
