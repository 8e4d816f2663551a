"""Streams of a model whose steps have drafts, from the core to the client's text: what they say is
what they say without, whichever of core and worker dies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.helpers.answer_stack import ANSWER
from tests.helpers.mini_stack import MiniStack, Received
from tests.helpers.told_drafts import ToldDrafts

from slipstream.demo_model import MODEL_PATH
from slipstream_core._native import StepSender
from slipstream_core.config import SpeculativeConfig
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.grammar.grammar_drafter import GrammarDrafter
from slipstream_core.runner.draft_model import DraftModel
from slipstream_core.step.plan import StepPlan, StepResult
from slipstream_core.workers import sender
from slipstream_ipc.messages import (
    AnswerOptions,
    ChatMessage,
    ReasoningIds,
    SamplingParams,
    StructuredOutputs,
    Submit,
)
from slipstream_ipc.transport.codec import encode_params

NUM_OUTPUTS = 40
SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "description": {"enum": ["short", "longer"]}},
    "required": ["value", "description"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
CODES = StructuredOutputs(regex="(ab|ba|[0-9]{2}){20,}")
WITHOUT_CALLS = structs.replace(ANSWER, options=AnswerOptions(tool_choice="none"))
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 5},
    {"stop": ["the ", "at"], "min_tokens": 10},
    {"logprobs": 0, "ignore_eos": True},
    {"repetition_penalty": 1.2},
    {"logit_bias": {17: 2.0}, "bad_words": ["of"]},
    {"structured_outputs": StructuredOutputs(json=SCHEMA)},
    {"structured_outputs": COMPACT, "temperature": 1.0, "seed": 7, "logprobs": 1},
    {"structured_outputs": COMPACT, "temperature": 0.7, "frequency_penalty": 0.5, "seed": 8},
    {"structured_outputs": CODES, "temperature": 1.2, "seed": 9},
]
DRAFTS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=8, prompt_lookup_min=1, prompt_lookup_max=4
)
FLAT, CHEAP = ((1, 1.0), (64, 1.01)), ((1, 0.001), (64, 0.001))  # of steps, and a draft model's
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 12,
    "block_size": 4,
    "num_blocks": 400,
    "threads": 1,
    "speculative_config": DRAFTS,
}


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """No two begin alike."""
    words = ["def", "class", "The", "import", "for", "If", "return", "A"]
    words += ["In", "with", "while", "No"]
    return [tokenizer.encode(f"{word} name is a value of name").ids for word in words]


def ask(stack: MiniStack, prompts: list[list[int]]) -> list[Received]:
    client = stack.client()
    return [
        client.submit(prompt, **{"max_tokens": NUM_OUTPUTS} | kind)
        for prompt, kind in zip(prompts, KINDS, strict=True)
    ]


def are_over(streams: list[Received]) -> bool:
    return all(it.is_over for it in streams)


def have_read(streams: list[Received], num: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num


def have_begun(streams: list[Received]) -> bool:
    return all(it.token_ids for it in streams)


def said(streams: list[Received]) -> list[object]:
    return [(it.text, it.token_ids, it.end, it.ranks) for it in streams]


def draft_with(stack: MiniStack, drafter: Any) -> None:
    """Nothing is admitted yet."""
    assert stack.core is not None
    scheduler: Any = stack.core.scheduler
    engine: Any = stack.core.engine
    scheduler._drafter = GrammarDrafter(
        drafter, engine._grammars, num_speculative_tokens=16, costs=StepCosts()
    )


def give_costs(stack: MiniStack) -> None:
    """All drafters know the same times of steps, not those of this machine at this moment."""
    assert stack.core is not None
    drafter: Any = stack.core.scheduler._drafter  # type: ignore[attr-defined]
    while drafter is not None:
        drafter._costs = StepCosts()
        drafter = getattr(drafter, "_other", None)


def drafts_of(stack: MiniStack) -> tuple[int, int]:
    """Tokens drafted, and right."""
    assert stack.core is not None
    counters = stack.core.numbers().counters
    return counters.num_draft_tokens, sum(counters.num_accepted_tokens_per_pos)


def has_drafted(stack: MiniStack) -> bool:
    """Some drafts were right and some were not."""
    drafted, right = drafts_of(stack)
    return 0 < right < drafted


def test_drafts_and_deaths_among_them_change_nothing(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]]
) -> None:
    torch.set_num_threads(1)
    stack = make_stack(model=str(MODEL_PATH), **SETTINGS | {"speculative_config": None})
    plain = ask(stack, prompts)
    stack.until(partial(are_over, plain))
    assert drafts_of(stack) == (0, 0)
    texts = [[*prompt, *it.token_ids] for prompt, it in zip(prompts, plain, strict=True)]
    deaths = ((5, "core"), (12, "worker"), (20, "core"))
    for most, deaths_now in ((1, ()), (4, deaths), (16, ())):
        stack = make_stack(model=str(MODEL_PATH), **SETTINGS)
        draft_with(stack, ToldDrafts(texts, 1 << 16, most, seed=most))
        streams = ask(stack, prompts)
        for num, kind in deaths_now:
            # the first drafts of a single row may all be right, or none of them
            stack.until(
                lambda streams=streams, num=num, stack=stack: (
                    has_drafted(stack) and have_read(streams, num)
                )
            )
            if kind == "core":
                stack.kill_core()
                stack.start_core()
                draft_with(stack, ToldDrafts(texts, 1 << 16, most, seed=num))
            else:
                stack.kill_worker()
                stack.start_worker()
        stack.until(partial(are_over, streams))
        assert said(streams) == said(plain), most
        for got, wanted in zip(streams, plain, strict=True):
            if deaths_now:  # another core has computed what was said in chunks
                values = (np.frombuffer(it.logprobs, np.float32) for it in (got, wanted))
                np.testing.assert_allclose(*values, atol=1e-4)
            else:
                assert got.logprobs == wanted.logprobs


BY_MODEL = SpeculativeConfig(method="draft_model", model=str(MODEL_PATH), num_speculative_tokens=4)


def test_a_draft_model_and_deaths_beside_it_change_nothing(
    make_stack: Callable[..., MiniStack],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model itself, with noise: drafts that are often right. Now and then it fails."""
    torch.set_num_threads(1)
    stack = make_stack(model=str(MODEL_PATH), **SETTINGS | {"speculative_config": None})
    fingerprint = stack.core.handler._card.fingerprint if stack.core is not None else b""
    plain = ask(stack, prompts)
    stack.until(partial(are_over, plain))
    usual, num = DraftModel.foresee, count(1)

    def noisy(self: DraftModel, plan: StepPlan) -> StepResult:
        found = usual(self, plan)
        at = next(num) if plan.step else 1  # before the first request steps are timed
        if at == 5:
            raise ValueError("a draft model's own fault")
        if at % 3 == 0:
            found.token_ids[-1] = 3
        return found

    monkeypatch.setattr(DraftModel, "foresee", noisy)
    # so that it pays whatever this machine does at this moment
    monkeypatch.setattr(
        "slipstream_core.engine.build.StepCosts",
        lambda _, *share: StepCosts(CHEAP if share else FLAT),
    )
    stack = make_stack(model=str(MODEL_PATH), **SETTINGS | {"speculative_config": BY_MODEL})
    assert stack.core is not None
    assert stack.core.handler._card.fingerprint == fingerprint
    streams = ask(stack, prompts)
    for length, kind in ((4, "core"), (8, "worker"), (12, "core")):
        stack.until(lambda length=length: has_drafted(stack) and have_read(streams, length))
        if kind == "core":
            stack.kill_core()
            stack.start_core()
        else:
            stack.kill_worker()
            stack.start_worker()
    stack.until(partial(are_over, streams))
    assert said(streams) == said(plain)
    assert has_drafted(stack)
    assert stack.core.numbers().counters.draft_s > 0
    assert "the draft model failed, and drafts no more for" in caplog.text


def test_a_tokenizer_in_place_of_the_models_is_that_of_drafts_and_grammars(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]], tmp_path: Path
) -> None:
    """The model's folder has none: nothing could be drafted, and no grammar compiled."""
    torch.set_num_threads(1)
    for path in MODEL_PATH.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    settings = SETTINGS | {"speculative_config": BY_MODEL, "core_tokenizer": str(MODEL_PATH)}
    stack = make_stack(model=str(tmp_path), **settings)
    stream = stack.client().submit(prompts[0], structured_outputs=COMPACT, max_tokens=NUM_OUTPUTS)
    stack.until(partial(are_over, [stream]))
    assert json.loads(stream.text).keys() == {"value", "description"}


def test_steps_with_drafts_are_sent_in_c_as_others_are(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    sent: list[bool] = []

    class Counted:
        def __init__(self, *columns: Any) -> None:
            self._sender = StepSender(*columns)

        def send(self, *step: Any) -> int:
            sent.append(bool(found := self._sender.send(*step)))
            return found

    monkeypatch.setattr(sender, "StepSender", Counted)
    kind = {"max_tokens": 120, "ignore_eos": True, "min_tokens": 120}
    texts: list[list[int]] = []
    refused = []
    for most in (0, 4):
        stack = make_stack(model=str(MODEL_PATH), **SETTINGS | {"speculative_config": None})
        if most:
            draft_with(stack, ToldDrafts(texts, 1 << 16, most))
        client = stack.client()
        streams = [client.submit(prompt, **kind) for prompt in prompts]
        # an admission is sent beside the step: how many steps they spread over is the machine's
        stack.until(partial(have_begun, streams))
        sent.clear()
        stack.until(partial(are_over, streams))
        texts = [[*prompt, *it.token_ids] for prompt, it in zip(prompts, streams, strict=True)]
        assert (drafts_of(stack)[1] > 200) == (most > 0)
        assert sum(sent) > 5
        refused.append(sent.count(False))
    assert refused[1] <= refused[0] + 2


def test_text_that_repeats_nothing_keeps_steps_that_are_planned_ahead(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]]
) -> None:
    """The same steps, as many of them launched behind another."""
    torch.set_num_threads(1)
    found = []
    for config in (None, DRAFTS):
        settings = SETTINGS | {"speculative_config": config}
        stack = make_stack(model=str(MODEL_PATH), **settings)
        assert stack.core is not None
        engine: Any = stack.core.engine
        give_costs(stack)
        ahead: list[bool] = []
        launch = engine._runner.launch

        def noting(plan: Any, launch: Any = launch, engine: Any = engine, to: Any = ahead) -> None:
            to.append(len(engine._in_flight) > 0)
            launch(plan)

        engine._runner.launch = noting
        client = stack.client()
        kind = {"temperature": 4.0, "max_tokens": 150, "ignore_eos": True, "min_tokens": 150}
        streams = [client.submit(prompt, **kind, seed=9) for prompt in prompts[:2]]
        stack.until(partial(are_over, streams))
        found.append((len(ahead), sum(ahead), [it.token_ids for it in streams]))
        assert drafts_of(stack)[0] < 8
    (steps, num_ahead, ids), (steps_drafted, num_ahead_drafted, ids_drafted) = found
    assert ids == ids_drafted
    assert steps_drafted >= steps - 8
    assert num_ahead_drafted >= num_ahead - 16 > 0


def test_answers_given_before_are_drafted_where_prefixes_are_shared_alone(
    make_stack: Callable[..., MiniStack], prompts: list[list[int]]
) -> None:
    torch.set_num_threads(1)
    config = structs.replace(DRAFTS, method="suffix", num_speculative_tokens=16)
    stack = make_stack(model=str(MODEL_PATH), **SETTINGS | {"speculative_config": config})
    give_costs(stack)
    client, answers, right = stack.client(), [], []
    # what repeats nothing, so own text foresees nothing
    kind = {"temperature": 4.0, "max_tokens": 100, "min_tokens": 100, "ignore_eos": True, "seed": 9}
    for salt in ("one", "one", "two"):
        before = drafts_of(stack)[1]
        stream = client.submit(prompts[0], **kind, cache_salt=salt)
        stack.until(partial(are_over, [stream]))
        answers.append(stream.token_ids)
        right.append(drafts_of(stack)[1] - before)
    assert answers[0] == answers[1] == answers[2]
    assert right[0] < 10
    assert right[1] > 80
    assert right[2] < 10


def count_foreseen(stack: MiniStack) -> dict[int, int]:
    """Drafts in grammars that the stack will have, by row whose reasoning or calls are followed."""
    assert stack.core is not None
    engine: Any = stack.core.engine
    grammars, found = engine._grammars, Counter[int]()
    foresee = grammars.foresee

    def counting(row: int, token_ids: Sequence[int]) -> int:
        num: int = foresee(row, token_ids)
        if grammars._rows[row].reasoning is not None:
            found[row] += num
        return num

    grammars.foresee = counting
    return found


def test_calls_that_a_trigger_begins_are_drafted_up_to_what_completes_them(
    make_stack: Callable[..., MiniStack], tokenizer: Any, prompts: list[list[int]]
) -> None:
    """The text around them is drafted as well. What is behind a call is no grammar's, and a call
    that may be the only one excludes others.
    """
    torch.set_num_threads(1)
    begin = tokenizer.token_to_id("(")
    # complete with its second digit, although it may go on
    call = StructuredOutputs(grammar='start: "(" /[a-z ]{6,12}/ ", value=" /[0-9]{2,4}/')
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 1, "logprobs": 1},
        {"temperature": 1.0, "seed": 2, "frequency_penalty": 0.4},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
        {"temperature": 0.6, "seed": 4, "logit_bias": {begin: 5.0}},
        {"temperature": 1.0, "seed": 5, "logit_bias": {begin: 4.0}, "logprobs": 2},
    ]
    for is_single in (False, True):
        ids = ReasoningIds("content", (), (), triggers=(begin,), is_single=is_single)
        settings: dict[str, Any] = SETTINGS | {"answer": WITHOUT_CALLS, "reasoning": ids}
        texts: list[list[int]] = []
        told = []
        for most in (0, 1, 4, 16):
            stack = make_stack(model=str(MODEL_PATH), **settings | {"speculative_config": None})
            if most:
                draft_with(stack, ToldDrafts(texts, 1 << 16, most, seed=most))
            foreseen = count_foreseen(stack)
            client = stack.client()
            streams = []
            for at, kind in enumerate(asked):
                given = {"temperature": 0.0, "max_tokens": 80, "logit_bias": {begin: 3.0}} | kind
                params = SamplingParams(**given, structured_outputs=call)
                streams.append(
                    client.send_submit(
                        Submit(
                            at,
                            bytes([at + 1]) * 16,
                            encode_params(params),
                            messages=(ChatMessage("user", tokenizer.decode(prompts[at])),),
                            answer=AnswerOptions(),
                        )
                    )
                )
            stack.until(partial(are_over, streams))
            if not most:
                texts = [
                    [*tokenizer.encode(tokenizer.decode(prompt)).ids, *it.token_ids]
                    for prompt, it in zip(prompts, streams, strict=False)
                ]
                assert sum(", value=" in it.text for it in streams) > 2
            told.append([(it.token_ids, it.end, it.logprobs) for it in streams])
            assert told[-1] == told[0], (most, is_single)
            assert has_drafted(stack) == (most > 0)
            assert (sum(foreseen.values()) > 0) == (most > 0)


def test_reasoning_that_is_followed_is_drafted_and_the_grammar_behind_it(
    make_stack: Callable[..., MiniStack], tokenizer: Any, prompts: list[list[int]]
) -> None:
    """By itself, at a token that is sampled freely, or because its budget is spent."""
    torch.set_num_threads(1)
    ends = tuple(tokenizer.token_to_id(each) for each in (".", ",", "("))
    ids = ReasoningIds("reasoning", (4,), ends)
    settings: dict[str, Any] = SETTINGS | {"answer": WITHOUT_CALLS, "reasoning": ids}
    asked: list[dict[str, Any]] = [
        {"thinking_token_budget": 12},
        {"thinking_token_budget": 3, "temperature": 1.0, "seed": 1, "logprobs": 1},
        {"thinking_token_budget": 30, "temperature": 0.8, "seed": 2},
        {"structured_outputs": COMPACT, "temperature": 1.0, "seed": 3},
        {"structured_outputs": CODES, "thinking_token_budget": 9, "frequency_penalty": 0.4},
        {"thinking_token_budget": 20, "repetition_penalty": 1.2, "temperature": 1.0, "seed": 5},
        {"structured_outputs": COMPACT, "thinking_token_budget": 0},
        {},
    ]
    texts: list[list[int]] = []
    told = []
    for most in (0, 1, 4, 16):
        stack = make_stack(model=str(MODEL_PATH), **settings | {"speculative_config": None})
        if most:
            draft_with(stack, ToldDrafts(texts, 1 << 16, most, seed=most))
        foreseen = count_foreseen(stack)
        client = stack.client()
        streams = []
        for at, kind in enumerate(asked):
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": 60} | kind)
            word = tokenizer.decode(prompts[at])
            streams.append(
                client.send_submit(
                    Submit(
                        at,
                        bytes([at + 1]) * 16,
                        encode_params(params),
                        messages=(ChatMessage("user", word),),
                        answer=AnswerOptions(),
                    )
                )
            )
        stack.until(partial(are_over, streams))
        if not most:
            texts = [
                [*tokenizer.encode(tokenizer.decode(prompt)).ids, *it.token_ids]
                for prompt, it in zip(prompts, streams, strict=False)
            ]
            for it, kind in zip(streams, asked, strict=True):
                first = min(it.token_ids.index(each) for each in ends if each in it.token_ids)
                assert first <= kind.get("thinking_token_budget", 60)
        told.append([(it.token_ids, it.end, it.logprobs) for it in streams])
        assert told[-1] == told[0], most
        assert has_drafted(stack) == (most > 0)
        assert (sum(foreseen.values()) > 0) == (most > 0)
