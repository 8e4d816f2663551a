"""One bad request that ended all others: what happened at the peers, and what happens here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.helpers.scripted import play

from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
from slipstream_ipc.messages import StructuredOutputs
from slipstream_worker.output.stop_strings import StopStrings

PROMPTS = [f"The {n}. question is: whose fault is it?" for n in range(8)]
BAD = 3


class Faulty:
    """A factory like any other, but what it makes for one prompt raises, in one place."""

    def __init__(self, factory: Any, prompt_ids: list[int], where: str) -> None:
        self.fast_table = factory.fast_table  # the others take the quick way
        self.delimiter_ids = factory.delimiter_ids
        self._factory, self._prompt_ids, self._where = factory, prompt_ids, where

    def create(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Any:
        real = self._factory.create(prompt_ids, skip_special_tokens)
        if list(prompt_ids) != self._prompt_ids:
            return real
        if self._where == "create":
            raise RuntimeError("not for this prompt")
        return _Broken(real, self._where)


class _Broken:
    def __init__(self, real: Any, where: str) -> None:
        self._real, self._where, self._num_steps = real, where, 0

    def _look(self, where: str) -> None:
        if where == self._where and self._num_steps > 5:
            raise OverflowError("out of range integral type conversion attempted")

    def step(self, token_id: int) -> str:
        self._num_steps += 1
        self._look("step")
        return str(self._real.step(token_id))

    def flush(self) -> str:
        self._look("flush")
        return str(self._real.flush())

    @property
    def num_pending(self) -> int:
        self._look("num_pending")
        return int(self._real.num_pending)

    @property
    def is_settled(self) -> bool:
        self._look("is_settled")
        return False  # so that it sees every token


@pytest.mark.parametrize("where", ["create", "step", "num_pending", "flush", "is_settled"])
def test_an_exception_in_one_output_ends_that_request_alone_vllm_17448(
    make_stack, expected, tokenizer, detokenizers, where
) -> None:
    """There whatever the detokeniser of one request raised ended the task that served them all."""
    plain = expected(PROMPTS, max_tokens=40, logprobs=1)
    faulty = Faulty(detokenizers, tokenizer.encode(PROMPTS[BAD]).ids, where)
    stack = make_stack(detokenizers=faulty, grace_s=0.0)
    client, other = stack.client(), stack.client()
    readers = [client if n % 2 else other for n in range(len(PROMPTS))]
    streams = [
        reader.submit(p, max_tokens=40, logprobs=1)
        for reader, p in zip(readers, PROMPTS, strict=True)
    ]
    stack.until(lambda: all(s.is_over for s in streams))
    bad = streams.pop(BAD)
    undisturbed = [p for n, p in enumerate(plain) if n != BAD]
    for it, same in zip(streams, undisturbed, strict=True):
        assert (it.text, it.token_ids, it.ranks) == (same.text, same.token_ids, same.ranks)
        assert it.end == same.end
    if where == "is_settled":  # asked when a delta has left; without an answer it goes on slowly
        assert bad.text == plain[BAD].text
    else:
        fault = bad.fault if bad.end is None else bad.end.fault
        assert fault.code == "engine"
        assert plain[BAD].text.startswith(bad.text)
    again = client.submit(PROMPTS[0], max_tokens=40)
    stack.until(lambda: again.is_over)
    assert again.text == plain[0].text
    stack.until(stack.holds_nothing)


def test_an_exception_in_one_stop_matcher_ends_that_request_alone_vllm_17448(
    make_stack, expected, monkeypatch
) -> None:
    """The same where stop strings are sought, in the third step of one request."""
    plain = expected(PROMPTS, max_tokens=40, stop=("q}",))
    feed, calls = StopStrings.feed, []

    def raises(self, held, text, active=True):
        if self._stops == ("bad one",):
            calls.append(text)
            if len(calls) > 2:
                raise RecursionError("maximum recursion depth exceeded")
        return feed(self, held, text, active)

    monkeypatch.setattr(StopStrings, "feed", raises)
    stack = make_stack()
    client = stack.client()
    streams = [
        client.submit(p, max_tokens=40, stop=("bad one",) if n == BAD else ("q}",))
        for n, p in enumerate(PROMPTS)
    ]
    # its stop string shares a first letter with every text sooner or later
    stack.until(lambda: all(s.is_over for s in streams))
    assert streams[BAD].end.fault.code == "engine"
    for n, (it, same) in enumerate(zip(streams, plain, strict=True)):
        assert n == BAD or (it.text, it.end) == (same.text, same.end)


def test_an_id_that_the_tokenizer_does_not_have_ends_nobody_vllm_21951(
    make_stack, tokenizer
) -> None:
    """There an id beyond the tokenizer's vocabulary, which many models can sample, raised in the
    detokeniser and ended every request."""
    words = tokenizer.encode("one two three").ids
    strange = [*words * 5, 4096, *words * 5, 4999, *words * 5, 4999, 4096, *words]
    answers = {(5,): strange, (6,): words * 16}
    stack = play(make_stack, answers, vocab_size=5000)
    client = stack.client()
    streams = [
        client.submit([prompt], max_tokens=len(answers[prompt,]), logprobs=2, **params)
        for prompt in (5, 6)
        for params in ({}, {"stop": ("zzz",)}, {"skip_special_tokens": False})
    ]
    stack.until(lambda: all(s.is_over for s in streams))
    assert {s.text for s in streams} == {"one two three" * 16}
    assert [s.token_ids for s in streams] == [strange] * 3 + [answers[6,]] * 3
    assert {s.end.reason for s in streams} == {"length"}


@pytest.mark.parametrize("stop", [("END",), "END"])
def test_a_stop_string_without_detokeniser_is_refused_areal_286(make_stack, expected, stop) -> None:
    """There a stop string for a server that does not detokenise ended that server."""
    [plain] = expected(PROMPTS[:1], max_tokens=100)
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    good = client.submit(PROMPTS[0], max_tokens=100)
    stack.until(lambda: len(good.token_ids) > 3)
    bad = client.submit(PROMPTS[1], stop=stop, detokenize=False)
    fine = client.submit(PROMPTS[1], stop_token_ids=(7,), detokenize=False, max_tokens=5)
    stack.until(lambda: all(s.is_over for s in (good, bad, fine)))
    assert (bad.fault.code, bad.fault.field) == ("bad_request", "stop")
    assert "detokenize" in bad.fault.message
    assert (fine.text, fine.end.num_tokens) == ("", 5)
    assert good.text == plain.text
    stack.until(stack.holds_nothing)


def test_no_limit_evicts_a_stream_that_runs_sglang_2812(make_stack, expected, monkeypatch) -> None:
    """There the state of running requests was evicted when there were too many, and its absence
    ended the detokeniser, and so the server."""
    monkeypatch.setattr("slipstream_worker.streams.retention._MAX_ENDED_BYTES", 100)
    monkeypatch.setattr("slipstream_worker.streams.retention._MIN_TOMBSTONES", 2)
    [plain] = expected(PROMPTS[:1], max_tokens=300, stop=("q}",))
    stack = make_stack(grace_s=1000.0, max_num_seqs=8)
    client = stack.client()
    long = client.submit(PROMPTS[0], max_tokens=300, stop=("q}",))
    stack.until(lambda: len(long.token_ids) > 3)
    num_others = 0
    while not long.is_over:
        others = [client.submit(p, max_tokens=4) for p in PROMPTS[1:]]
        stack.until(lambda others=others: all(s.is_over for s in others))
        num_others += len(others)
        assert [s.end.num_tokens for s in others] == [4] * len(others)
    assert num_others > 50
    assert (long.text, long.token_ids, long.end) == (plain.text, plain.token_ids, plain.end)


def test_what_is_evicted_last_is_evicted_sglang_2812(make_stack, monkeypatch) -> None:
    """The limit itself: an ended stream that nobody had read when memory ran out goes when its
    reader has it, not a whole grace time later."""
    monkeypatch.setattr("slipstream_worker.streams.retention._MAX_ENDED_BYTES", 1000)
    stack = make_stack(grace_s=1000.0)
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 3)
    client.is_reading = False
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    for _ in range(10):
        stack.step()
    client.is_reading = True
    stack.until(lambda: it.is_over)
    stack.until(stack.holds_nothing)  # long before


LISTED: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": StructuredOutputs(json={"const": "a" * 9000})},
    "schema as text": {
        "structured_outputs": StructuredOutputs(json=f'{{"const": "{"a" * 9000}"}}')
    },
    "regex": {"structured_outputs": StructuredOutputs(regex="a" * 9000)},
    "choice": {"structured_outputs": StructuredOutputs(choice=("a" * 4500, "b" * 4500))},
    "allowed ids": {"allowed_token_ids": tuple(range(300))},
    "biases": {"logit_bias": dict.fromkeys(range(300), 1.0)},
    "stop strings": {"stop": tuple(f"{n:0900}" for n in range(10))},
    "bad words": {"bad_words": tuple(f"{n:0128}" for n in range(64))},
}


@pytest.mark.parametrize("listed", LISTED)
def test_what_requests_list_is_counted_as_long_as_it_is_kept(
    make_stack, monkeypatch, listed: str
) -> None:
    """An ended stream is kept for readers that come back, and its request with it."""
    monkeypatch.setattr("slipstream_worker.streams.retention._MAX_ENDED_BYTES", 40_000)
    stack = make_stack(grace_s=1000.0)
    client = stack.client()

    def num_kept(num: int, **options: Any) -> int:
        before = len(stack.worker.streams)
        for number in range(num):
            it = client.submit([number, 5, 7], max_tokens=2, stop_token_ids=(0,), **options)
            stack.until(lambda it=it: it.is_over)
            assert it.fault is None
        for _ in range(10):
            stack.step()
        return len(stack.worker.streams) - before

    assert num_kept(20) == 20
    assert num_kept(20, **LISTED[listed]) < 0


def test_a_request_that_no_step_survives_ends_alone(make_stack, expected, monkeypatch) -> None:
    """The same in the engine: a forward pass raises whenever one request is in it."""
    plain = expected(PROMPTS, max_tokens=40)
    poison = [9] * 57  # its length gives it away
    execute = SimulatedRunner._execute

    def raises(self, plan, masks):
        if (plan.prompt_lens == len(poison)).any():
            raise ValueError("index out of bounds: 55434")
        return execute(self, plan, masks)

    monkeypatch.setattr(SimulatedRunner, "_execute", raises)
    stack = make_stack(grace_s=0.0)
    client = stack.client()
    streams = [client.submit(p, max_tokens=40) for p in PROMPTS[:4]]
    stack.until(lambda: all(len(s.token_ids) > 3 for s in streams))
    bad = client.submit(poison, max_tokens=40)
    streams += [client.submit(p, max_tokens=40) for p in PROMPTS[4:]]
    stack.until(lambda: bad.is_over and all(s.is_over for s in streams))
    assert (bad.end.reason, bad.end.fault.code, bad.text) == ("error", "engine", "")
    assert "55434" in bad.end.fault.message
    for it, same in zip(streams, plain, strict=True):
        assert (it.text, it.token_ids, it.end) == (same.text, same.token_ids, same.end)
    stack.until(stack.holds_nothing)
