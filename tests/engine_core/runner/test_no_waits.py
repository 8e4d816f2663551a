"""On a card no step may make the host wait, and nothing recorded may look at the host.

The card is one without values (`meta_card`), so that this is seen without one: of every
architecture that is served, in bfloat16, and of the sampler with all that it can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.helpers.meta_card import (
    MAX_MODEL_LEN,
    META,
    WaitedError,
    Watch,
    meta_model,
    meta_runner,
    step,
)
from tests.helpers.token_constraints import asked
from transformers import LlamaConfig

from slipstream_core.model.loader import LoadedModel
from slipstream_core.runner.decode_graphs import KINDS
from slipstream_core.runner.kv_cache_size import costliest_plan, largest_plan
from slipstream_core.runner.readback import EndedStep, StepReadback
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.sampling.logprobs import PendingLogprobs
from slipstream_core.scheduler.constraint_columns import ConstraintColumns
from slipstream_core.step.plan import ListedLogprobs, PromptPlan, StepPlan
from slipstream_ipc.history.token_log import TokenLog
from slipstream_lab.models.tiny_models import ARCHITECTURES

SERVED = [each for each in ARCHITECTURES if each.refused is None]
VOCAB = 600  # more than there are candidates
SIZES = (1, 4)
BUCKETS = (16, 64)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, id=each.name) for each in SERVED],
)
def test_a_models_steps_are_enqueued_and_recorded(architecture: Any) -> None:
    model = meta_model(architecture.config())
    with meta_runner(model, SIZES, token_buckets=BUCKETS) as (runner, recorder):
        assert recorder.num_recorded == len(SIZES) * (1 + len(KINDS)) + len(BUCKETS)
        for num_tokens in (3, 40, 100):  # decode rows alone, with a prompt, with a longer one
            plan = largest_plan(
                3,
                num_tokens,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=model.vocab_size,
            )
            assert isinstance(step(runner, plan), StepReadback)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    return meta_model(config)


@pytest.fixture(scope="module")
def runner(model: LoadedModel) -> Iterator[TorchRunner]:
    """One for all: recording takes far longer than the steps, which leave nothing behind."""
    with meta_runner(model, SIZES) as (runner, _):
        yield runner


def decoding(num: int, **columns: Any) -> StepPlan:
    """A step of `num` decode rows, greedy unless `columns` say otherwise."""
    plan = largest_plan(num, num, max_model_len=8, vocab_size=VOCAB)
    greedy = {
        "temperatures": np.zeros(num, np.float32),
        "top_ks": np.zeros(num, np.int32),
        "top_ps": np.ones(num, np.float32),
        "num_logprobs": np.full(num, -1, np.int32),
        "all_greedy": True,
        "any_truncation": False,
        "max_logprobs": -1,
    }
    return replace(plan, **{**greedy, **columns})


def constraints_of(num: int) -> Any:
    """All kinds, on all of `num` rows."""
    columns, tokens = ConstraintColumns(), TokenLog()
    params: dict[str, Any] = {
        "logit_bias": {5: 1.5},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
    }
    for row in range(num):
        more = {"allowed_token_ids": [4, 5, 6, 9]} if row == 1 else {}
        it = asked((1, 2, 3), words=((7,), (4, 5)), **params, **more)
        tokens.open(row)
        tokens.extend(row, np.array(it.prompt, np.uint32))
        assert it.constraints is not None
        columns.add(row, it.constraints)
    rows = np.arange(num)
    return columns.plan(rows, rows, tokens, np.full(num, 3))


DRAWN = {"all_greedy": False, "temperatures": np.array([0, 0.7, 1], np.float32)}
STEPS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "top_k": DRAWN | {"any_truncation": True, "top_ks": np.array([5, 5, 200], np.int32)},
    "top_k of very many": DRAWN | {"any_truncation": True, "top_ks": np.array([0, 0, 500], "i4")},
    "top_k of very many, then top_p": DRAWN
    | {
        "any_truncation": True,
        "top_ks": np.array([0, 0, 500], np.int32),
        "top_ps": np.array([1, 0.9, 0.9], np.float32),
    },
    "top_p": DRAWN | {"any_truncation": True, "top_ps": np.array([1, 0.9, 0.5], np.float32)},
    "min_p": DRAWN | {"any_truncation": True, "min_ps": np.array([0, 0, 0.1], np.float32)},
    "log-probabilities": {"max_logprobs": 5, "num_logprobs": np.array([-1, 5, 0], np.int32)},
    "more log-probabilities than are recorded": {
        "max_logprobs": 30,
        "num_logprobs": np.array([30, -1, 2], np.int32),
    },
    "listed ids": {
        "max_logprobs": 5,
        "num_logprobs": np.array([2, 5, 0], np.int32),
        "listed": ListedLogprobs(rows=np.array([0]), ids=np.array([[9, 4]]), max_unlisted=5),
    },
    "listed ids of all that ask": {
        "max_logprobs": 2,
        "num_logprobs": np.array([-1, 2, 1], np.int32),
        "listed": ListedLogprobs(
            rows=np.array([1, 2]), ids=np.array([[9, 4], [3, 0]]), max_unlisted=-1
        ),
    },
    "ids that are masked": {"masked_rows": np.array([0, 2]), "masked_ids": np.array([4, 9])},
    "constraints": {"constraints": constraints_of(3)},
    "constraints, drawn": DRAWN | {"constraints": constraints_of(3)},
}


@pytest.mark.parametrize("name", STEPS)
def test_sampling_is_enqueued(runner: TorchRunner, name: str) -> None:
    assert isinstance(step(runner, decoding(3, **STEPS[name])), StepReadback)


def test_a_grammars_masks_are_enqueued(runner: TorchRunner) -> None:
    plan = decoding(3, grammar_rows=np.array([0, 2]))
    runner.sample(plan, np.full((2, -(-VOCAB // 32)), -1, np.int32))
    assert isinstance(step(runner, plan), StepReadback)


def test_very_many_log_probabilities_are_enqueued(runner: TorchRunner) -> None:
    plan = decoding(3, any_wide=True, num_logprobs=np.array([VOCAB, 2, -1], np.int32))
    landing = step(runner, replace(plan, max_logprobs=2))
    assert isinstance(landing, StepReadback)
    ((row, coming),) = landing.wide
    assert row == 0
    assert isinstance(coming, PendingLogprobs)


def test_very_many_listed_ids_are_enqueued(runner: TorchRunner) -> None:
    listed = ListedLogprobs(rows=np.array([0]), ids=np.arange(100)[None], max_unlisted=2)
    plan = decoding(3, any_wide=True, num_logprobs=np.array([100, 2, -1], np.int32))
    landing = step(runner, replace(plan, max_logprobs=2, listed=listed))
    assert isinstance(landing, StepReadback)
    ((row, coming),) = landing.wide
    assert row == 0
    assert isinstance(coming, PendingLogprobs)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_prompts_log_probabilities_are_enqueued(runner: TorchRunner, sampled: bool) -> None:
    plan = largest_plan(2, 40, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
    prompt = PromptPlan(
        rows=np.array([1]),
        starts=np.array([0]),
        counts=np.array([5]),
        num_logprobs=np.array([3]),
        tokens=1 + np.arange(5),
        targets=np.arange(5),
    )
    plan = replace(plan if sampled else chunks_alone(plan), prompt=prompt)
    outcome = step(runner, plan)
    assert isinstance(outcome, StepReadback if sampled else EndedStep)
    (coming,) = outcome.prompt
    assert isinstance(coming, PendingLogprobs)
    (found,) = outcome.wait().prompt
    assert found.values.shape == (5, 4)


def chunks_alone(plan: StepPlan) -> StepPlan:
    """The plan, of which nobody is sampled."""
    none: dict[str, Any] = {
        name: getattr(plan, name)[:0]
        for name in ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "num_logprobs")
    }
    return replace(
        plan,
        **none,
        samples=np.zeros_like(plan.samples),
        all_greedy=True,
        any_truncation=False,
        max_logprobs=-1,
    )


def test_a_step_of_chunks_alone_is_enqueued(runner: TorchRunner) -> None:
    plan = largest_plan(2, 40, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
    assert isinstance(step(runner, chunks_alone(plan)), EndedStep)


def test_the_dearest_step_is_enqueued(runner: TorchRunner) -> None:
    plan = largest_plan(3, 40, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)
    plan = costliest_plan(plan, VOCAB)
    runner.sample(plan, np.full((3, -(-VOCAB // 32)), -1, np.int32))
    assert isinstance(step(runner, plan), StepReadback)


@pytest.mark.parametrize(
    "waits",
    [
        lambda it: it[0].item(),
        lambda it: it.tolist(),
        lambda it: bool((it > 0).any()),
        lambda it: it.nonzero(),
        lambda it: it[it > 0],
        lambda it: it.cpu(),
        lambda it: it[torch.tensor([1, 2])],
        lambda it: it[[1, 2]],
        lambda it: it + torch.ones(4),
        lambda it: it.masked_select(it > 0),
        lambda it: it.unique(),
        lambda it: it.repeat_interleave(it.long()),
        lambda it: torch.tensor([1.0, 2.0], device=META),
        lambda it: it.__setitem__(torch.arange(2, device=META), 0),
    ],
)
def test_the_card_sees_who_waits(waits: Any) -> None:
    """Else the tests above would show nothing."""
    tensor = torch.zeros(4, device=META)
    with pytest.raises((WaitedError, RuntimeError, NotImplementedError)), Watch(uploads=True):
        waits(tensor)
