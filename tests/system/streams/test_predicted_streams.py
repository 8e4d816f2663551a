"""Streams with a prediction, from the core to the client's text: what they say is what they say
without, in fewer steps, and their usage is the same whichever of core and worker dies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.helpers.mini_stack import MiniStack, Received

from slipstream.demo_model import MODEL_PATH
from slipstream_core.config import SpeculativeConfig
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_ipc.columns import u32
from slipstream_ipc.history.prediction import FollowedPrediction
from slipstream_ipc.messages import StructuredOutputs

NUM_OUTPUTS = 48
SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "description": {"enum": ["short", "longer"]}},
    "required": ["value", "description"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
CODES = StructuredOutputs(regex="(ab|ba|[0-9]{2}){20,}")
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 5},
    {"stop": ["the ", "at"], "min_tokens": 10},
    {"logprobs": 0, "ignore_eos": True},
    {"repetition_penalty": 1.2},
    {"logit_bias": {17: 2.0}, "bad_words": ["of"]},
    {"structured_outputs": COMPACT, "temperature": 1.0, "seed": 7, "logprobs": 1},
    {"structured_outputs": CODES, "temperature": 1.2, "seed": 9},
]
DRAFTS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=8, prompt_lookup_min=2, prompt_lookup_max=4
)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 12,
    "block_size": 4,
    "num_blocks": 400,
    "threads": 1,
}


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """No two begin alike."""
    words = ["def", "class", "The", "import", "for", "If", "return", "A", "In", "with"]
    return [tokenizer.encode(f"{word} name is a value of name").ids for word in words]


def stack_of(make_stack: Callable[..., MiniStack], drafts: SpeculativeConfig | None) -> MiniStack:
    torch.set_num_threads(1)
    stack = make_stack(model=str(MODEL_PATH), **SETTINGS, speculative_config=drafts)
    use_usual_costs(stack)
    return stack


def use_usual_costs(stack: MiniStack) -> None:
    """Not those of this machine at this moment."""
    assert stack.core is not None
    drafter: Any = stack.core.scheduler._drafter  # type: ignore[attr-defined]
    while drafter is not None:
        drafter._costs = StepCosts([(1, 1.0), (256, 1.2)])
        drafter = getattr(drafter, "_other", None)


def ask(
    stack: MiniStack, prompts: list[list[int]], predictions: list[str] | None = None
) -> list[Received]:
    client = stack.client()
    return [
        client.submit(prompt, prediction=text, **{"max_tokens": NUM_OUTPUTS} | kind)
        for prompt, kind, text in zip(
            prompts, KINDS, predictions or [""] * len(prompts), strict=True
        )
    ]


def are_over(streams: list[Received]) -> bool:
    return all(it.is_over for it in streams)


def have_read(streams: list[Received], num: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num


def counted(streams: list[Received]) -> list[tuple[int, int]]:
    """Accepted and rejected tokens of each prediction."""
    ends = [it.end for it in streams if it.end is not None]
    return [
        (end.num_accepted_prediction_tokens, end.num_rejected_prediction_tokens) for end in ends
    ]


def said(streams: list[Received]) -> list[object]:
    """All but what is counted."""
    nothing = {
        "num_cached_tokens": 0,
        "num_accepted_prediction_tokens": 0,
        "num_rejected_prediction_tokens": 0,
    }
    ends = [it.end and structs.replace(it.end, **nothing) for it in streams]
    return [(it.text, it.token_ids, end, it.ranks) for it, end in zip(streams, ends, strict=True)]


def edited(text: str, random: Random) -> str:
    """The text with a word cut, one put in, and one in another's place."""
    words = text.split(" ")
    for change in ("put", "cut", "replace"):
        at = random.randrange(len(words))
        words[at : at + (change != "put")] = [] if change == "cut" else ["Quux"]
    return " ".join(words) or "Quux"


def right_drafts(stack: MiniStack) -> int:
    assert stack.core is not None
    return sum(stack.core.numbers().counters.num_accepted_tokens_per_pos)


@pytest.mark.parametrize("most", [1, 4, 16])
def test_predictions_and_deaths_among_them_change_nothing(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]], tokenizer: Any, most: int
) -> None:
    plain_stack = stack_of(make_stack, None)
    plain = ask(plain_stack, prompts)
    plain_stack.until(partial(are_over, plain))
    random = Random(most)
    predictions = [edited(it.text, random) for it in plain]
    drafts = structs.replace(DRAFTS, num_speculative_tokens=most)
    alone, wanted = stack_of(make_stack, drafts), []
    streams = ask(alone, prompts, predictions)
    alone.until(partial(are_over, streams))
    assert said(streams) == said(plain)
    assert [it.logprobs for it in streams] == [it.logprobs for it in plain]
    assert right_drafts(alone) > 20
    for it, text in zip(streams, predictions, strict=True):
        followed = FollowedPrediction(np.array(tokenizer.encode(text).ids, np.uint32))
        followed.follow(np.array(it.token_ids, np.uint32))
        wanted.append((followed.num_accepted, followed.num_rejected))
    assert counted(streams) == wanted
    assert sum(accepted for accepted, _ in wanted) > 100

    stack = stack_of(make_stack, drafts)
    streams = ask(stack, prompts, predictions)
    for num, kind in ((5, "core"), (12, "worker"), (20, "both"), (30, "core")):
        stack.until(partial(have_read, streams, num))
        if kind in ("core", "both"):
            stack.kill_core()
            stack.start_core()
            use_usual_costs(stack)
        if kind in ("worker", "both"):
            stack.kill_worker()
            stack.start_worker()
    stack.until(partial(are_over, streams))
    assert said(streams) == said(plain)
    assert counted(streams) == wanted
    for got, expected in zip(streams, plain, strict=True):  # computed in other chunks
        values = (np.frombuffer(it.logprobs, np.float32) for it in (got, expected))
        np.testing.assert_allclose(*values, atol=1e-4)


def test_an_answer_that_is_predicted_takes_fewer_steps(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]]
) -> None:
    # what repeats nothing, so that own text foresees nothing
    kind = {"temperature": 4.0, "max_tokens": 100, "min_tokens": 100, "ignore_eos": True, "seed": 9}
    stack = stack_of(make_stack, DRAFTS)
    client = stack.client()
    plain = client.submit(prompts[0], **kind)
    stack.until(partial(are_over, [plain]))
    before = right_drafts(stack)
    assert before < 10
    first = client.submit(prompts[0], **kind, prediction=plain.text)
    stack.until(partial(are_over, [first]))
    assert said([first]) == said([plain])
    assert right_drafts(stack) - before > 30
    # the text is tokenised as it would be written, not as the model wrote it
    assert counted([first])[0][0] > 30
    other = client.submit(prompts[1], **kind)
    stack.until(partial(are_over, [other]))
    assert counted([other]) == [(0, 0)]


def test_without_drafts_a_prediction_is_not_even_tokenised(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]]
) -> None:
    stack = stack_of(make_stack, None)
    client = stack.client()
    plain = client.submit(prompts[0], max_tokens=20)
    stack.until(partial(are_over, [plain]))
    stack.prompts.is_held = True  # nothing comes back from the tokenizer process
    predicted = client.submit(prompts[0], max_tokens=20, prediction=plain.text)
    stack.until(partial(are_over, [predicted]))
    assert said([predicted]) == said([plain])
    assert counted([predicted]) == [(0, 0)]


def test_answers_to_one_prompt_follow_one_prediction(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]]
) -> None:
    stack = stack_of(make_stack, DRAFTS)
    client = stack.client()
    asked: dict[str, Any] = {"temperature": 0.4, "max_tokens": 40}
    plain = client.submit_together(prompts[2], [5, 6, 7], **asked)
    stack.until(partial(are_over, plain))
    told = client.submit_together(prompts[2], [5, 6, 7], **asked, prediction=plain[1].text)
    stack.until(partial(are_over, told))
    assert said(told) == said(plain)
    assert counted(told)[1][0] > 20
    assert all(u32(it.submit.token_ids).tolist() == prompts[2] for it in told)
