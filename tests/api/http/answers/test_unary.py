"""Answers told at once: the same bytes however they are divided, and room for others meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs
from tests.helpers.fake_worker import Entry, end_of
from tests.helpers.http_answer import CARD, Table, Wire, body_of
from tests.helpers.patience import Patience

from slipstream import delta_batch
from slipstream.http import time_slice
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.api_errors import ApiError
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel, TokenTexts
from slipstream.http.native.generate import plan_generation, read_generate
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream.http.responses.response_plan import new_response
from slipstream.http.responses.responses_request import read_response_request
from slipstream.http.time_slice import TimeSlicedQueue
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.messages import Accepted, End, Fault, LogprobColumns, PromptLogprobs

NUM = 60  # tokens of an answer, and of a prompt
K = 3
CHATS: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
MANY: dict[str, Any] = {"prompt": ["x", "y", "z"], "n": 2, "logprobs": K}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("cmpl", {"prompt": ["x", "y"]}),
    "completion": ("cmpl", {"prompt": "x", "logprobs": K}),
    "completions": ("cmpl", {**MANY, "prompt_logprobs": K}),
    "echo": ("cmpl", {**MANY, "echo": True}),
    "echo, streamed": ("cmpl", {**MANY, "echo": True, "stream": True}),
    "scoring": ("cmpl", {**MANY, "echo": True, "max_tokens": 0}),
    "chat": ("chat", {**CHATS, "n": 2, "logprobs": True, "top_logprobs": K}),
    "chat, prompt": ("chat", {**CHATS, "n": 2, "prompt_logprobs": K}),
    "generate": (
        "gen",
        {"text": "x", "sampling_params": {"logprobs": K, "prompt_logprobs": K, "n": 2}},
    ),
}


def asked(kind: str) -> AnswerPlan:
    if kind.startswith("response"):
        given = {"input": "x", "top_logprobs": K, "max_output_tokens": 2 * NUM, "store": False}
        given["stream"] = "streamed" in kind
        return new_response(read_response_request(json.dumps(given).encode()), CARD)[0]
    which, body = ASKS[kind]
    content = json.dumps(body).encode()
    if which == "cmpl":
        return plan_completion(read_completion(content), CARD)
    if which == "chat":
        return plan_chat(read_chat(content), CARD)
    return plan_generation(*read_generate(content), CARD)


def columns(numbers: random.Random, num: int) -> LogprobColumns:
    """Of so many tokens, each with itself and K others."""
    width = K + 1
    ids = [token for _ in range(num) for token in numbers.sample(range(1000), width)]
    values = [-numbers.random() for _ in ids]
    ranks = [numbers.randint(1, 9) for _ in range(num)]
    return LogprobColumns(width, pack_f32(values), pack_u32(ids), pack_u32(ranks))


class Asked:
    """A request, its table and its wire."""

    def __init__(self, kind: str) -> None:
        self.plan, self.table, self.wire = asked(kind), Table(), Wire()
        self.exchange = self.wire.exchange = Exchange(HttpRequest(), self.wire)  # type: ignore[arg-type]
        self.slices = TimeSlicedQueue()
        where = (TextsByModel(lambda _: "nowhere"), Limits(), self.table.broadcast, self.slices)
        start_answer(self.plan, self.exchange, AnswerContext(self.table, *where))
        self._numbers = random.Random(kind)

    def say(self, index: int) -> None:
        """All of a stream, in two messages."""
        state, numbers, half = self.plan.states[index], self._numbers, NUM // 2
        has_logprobs = self.plan.num_logprobs is not None
        self.table.streams.accept(Accepted(state.handle, pack_u32(range(NUM))))
        if self.plan.echo is not None or self.plan.num_prompt_logprobs is not None:
            prompt = columns(numbers, NUM - 1)
            assert self.table.streams.take_prompt(PromptLogprobs(state.handle, 0, prompt))
        for at in (0, half):
            text = "é" * half
            end = end_of(text * 2) if at else None
            entry = Entry(state.handle, text, at, ids=range(half), end=end)
            self.table.say(entry, logprobs=columns(numbers, half) if has_logprobs else None)

    @property
    def body(self) -> Any:
        """None: it has not been answered."""
        if self.exchange.is_open:
            return None
        return json.loads(body_of(self.wire.writes))


def run(test: Callable[[Asked], Any], kind: str) -> Any:
    """Run it where there is a loop."""

    async def main() -> Any:
        return await test(Asked(kind))

    return asyncio.run(main())


async def answered(asked: Asked) -> Any:
    """What is answered, and in how many turns of the loop, where others have them too."""
    order = list(range(len(asked.plan.states)))
    random.Random(1).shuffle(order)
    for index in order:
        asked.say(index)
    patience, num_turns = Patience(), 0
    while asked.body is None:
        patience.check()
        await asyncio.sleep(0)
        num_turns += 1
    body = asked.body
    assert body.pop("id") == str(asked.plan.id)
    body.pop("created")
    return body, num_turns


UNARY = [kind for kind in ASKS if "streamed" not in kind]


@pytest.mark.parametrize("kind", UNARY)
def test_it_is_the_same_however_it_is_divided(kind, monkeypatch):
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)
    monkeypatch.setattr(delta_batch, "_PART", 1 << 30)
    whole, few = run(answered, kind)
    monkeypatch.setattr(delta_batch, "_PART", 1)
    parts, many = run(answered, kind)
    assert json.dumps(whole) == json.dumps(parts)
    num = len(whole["choices"])
    assert num == len({choice["index"] for choice in whole["choices"]})
    if kind == "plain":
        assert few == many == 0  # there is nothing that could take long
    else:
        assert many - few >= NUM - 2  # each token had its turn, but a prompt's first
    if kind == "echo":
        logprobs = whole["choices"][0]["logprobs"]
        assert [len(column) for column in logprobs.values()] == [2 * NUM] * 4


def test_a_response_is_the_same_however_it_is_divided(monkeypatch):
    """Its log-probabilities were written at once: 4,000 tokens with 20 each took 1.8 s."""
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)

    async def response(asked: Asked) -> tuple[str, int]:
        asked.say(0)
        num_turns, patience = 0, Patience()
        while asked.body is None:
            patience.check()
            await asyncio.sleep(0)
            num_turns += 1
        body = asked.body
        del body["created_at"]
        return json.dumps(body).replace(asked.plan.id.first.hex(), "the id"), num_turns

    monkeypatch.setattr(delta_batch, "_PART", 1 << 30)
    whole, few = run(response, "response")
    monkeypatch.setattr(delta_batch, "_PART", 1)
    parts, many = run(response, "response")
    assert whole == parts
    assert many >= NUM > few
    [item] = json.loads(whole)["output"]
    assert len(item["content"][0]["logprobs"]) == NUM


def test_the_events_that_end_a_streamed_response_are_written_one_in_a_turn(monkeypatch):
    """Three of them have all log-probabilities; they were written at once."""

    async def ended(asked: Asked) -> tuple[list[str], int]:
        asked.say(0)
        assert asked.exchange.is_open
        assert b"done" not in b"".join(asked.wire.writes)
        most, patience = 0, Patience()
        while asked.exchange.is_open:
            patience.check()
            before = body_of(asked.wire.writes).count(b'"logprobs":[{')
            await asyncio.sleep(0)
            most = max(most, body_of(asked.wire.writes).count(b'"logprobs":[{') - before)
        said = body_of(asked.wire.writes)
        return [line.split()[1].decode() for line in said.splitlines() if b"event: " in line], most

    monkeypatch.setattr(time_slice, "SLICE_S", 1000.0)
    names, at_once = run(ended, "response, streamed")
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)
    same, in_turns = run(ended, "response, streamed")
    assert names == same
    assert [name.rpartition(".")[2] for name in names[-4:]] == [*3 * ["done"], "completed"]
    assert (at_once, in_turns) == (3, 1)


def test_choices_are_written_while_other_prompts_run(monkeypatch):
    monkeypatch.setattr(time_slice, "SLICE_S", 1000.0)

    async def test(asked: Asked) -> None:
        num_deltas = [len(state.deltas) for state in asked.plan.states]
        assert num_deltas == [0] * 6
        for index in (2, 0, 3):
            asked.say(index)
        await asyncio.sleep(0)
        num_deltas = [len(state.deltas) for state in asked.plan.states]
        assert num_deltas == [2, 0, 0, 0, 0, 0]  # the second prompt's have been written
        for index in (1, 4, 5):
            asked.say(index)
        await asyncio.sleep(0)
        assert len(asked.body["choices"]) == 6

    run(test, "completions")


def test_for_who_has_left_no_more_is_written(monkeypatch):
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)
    monkeypatch.setattr(delta_batch, "_PART", 1)

    async def test(asked: Asked) -> None:
        asked.say(0)
        await asyncio.sleep(0)
        assert asked.slices.is_busy
        asked.exchange.disconnect()
        await asyncio.sleep(0)
        assert not asked.slices.is_busy
        assert asked.wire.writes == []

    run(test, "completion")


def test_one_stream_that_fails_is_the_answer_though_others_are_being_written(monkeypatch):
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)
    monkeypatch.setattr(delta_batch, "_PART", 1)

    async def test(asked: Asked) -> None:
        for index in (0, 1):
            asked.say(index)
        await asyncio.sleep(0)
        end = End("error", 0, fault=Fault("engine", "no"))
        asked.table.say(Entry(asked.plan.states[2].handle, "", ids=[], end=end))
        assert asked.body["error"]["message"] == "prompt[1]: no"
        while asked.slices.is_busy:  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)
        assert len(asked.wire.writes) == 1

    run(test, "completions")


async def streamed(asked: Asked) -> tuple[dict[int, list[Any]], int]:
    """The chunks of each choice, and in how many turns of the loop they came."""
    for index in range(len(asked.plan.states)):
        asked.say(index)
    assert b"choices" not in b"".join(asked.wire.writes)  # that is for the slices
    patience, num_turns = Patience(), 0
    while asked.exchange.is_open:
        patience.check()
        await asyncio.sleep(0)
        num_turns += 1
    found: dict[int, list[Any]] = {}
    for line in body_of(asked.wire.writes).split(b"data: ")[1:-1]:
        (choice,) = json.JSONDecoder().raw_decode(line.decode())[0]["choices"]
        found.setdefault(choice["index"], []).append(choice)
    return found, num_turns


def test_a_streamed_echo_is_made_in_slices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)
    monkeypatch.setattr(delta_batch, "_PART", 1)
    chunks, num_turns = run(streamed, "echo, streamed")
    assert num_turns >= 3 * NUM
    assert sorted(chunks) == list(range(6))
    for parts in chunks.values():
        assert "".join(part["text"] for part in parts)[0] in "xyz"
        logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
        values = [value for part in logprobs for value in part["token_logprobs"]]
        assert len(values) == 2 * NUM
        assert values[0] is None
        assert None not in values[1:]
        offsets = [offset for part in logprobs for offset in part["text_offset"]]
        assert offsets == sorted(offsets)


def test_a_client_that_leaves_while_its_echo_is_made_costs_no_more() -> None:
    async def left(asked: Asked) -> None:
        asked.say(0)
        assert asked.slices.is_busy
        asked.exchange.disconnect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not asked.slices.is_busy

    run(left, "echo, streamed")


def test_a_choice_that_fails_while_an_echo_is_written_is_told_behind_it() -> None:
    """Nothing stands within a chunk but the chunk."""

    async def failed(asked: Asked) -> list[Any]:
        asked.say(0)
        assert asked.slices.is_busy
        state = asked.plan.states[1]
        asked.table.streams.accept(Accepted(state.handle, pack_u32(range(NUM))))
        prompt = columns(random.Random(1), NUM - 1)
        assert asked.table.streams.take_prompt(PromptLogprobs(state.handle, 0, prompt))
        end = end_of("é", "error", fault=Fault("engine", "it broke"))
        entry = Entry(state.handle, "é", 0, ids=[1], end=end)
        asked.table.say(entry, logprobs=columns(random.Random(2), 1))
        patience = Patience()
        while asked.exchange.is_open:
            patience.check()
            await asyncio.sleep(0)
        return asked.wire.writes

    first, *_, second, last = body_of(run(failed, "echo, streamed")).split(b"\n\n")[:-1]
    assert len(json.loads(first[6:])["choices"][0]["logprobs"]["tokens"]) >= NUM
    assert json.loads(second[6:])["choices"][0]["text"] == "xé"
    assert json.loads(last[6:])["error"]["message"] == "prompt[0]: it broke"


@pytest.mark.parametrize("kind", ["echo", "echo, streamed"])
def test_a_prompt_is_decoded_once_for_all_its_answers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ASKS, kind, (ASKS[kind][0], {**ASKS[kind][1], "prompt": [[1, 2], [3]]}))
    decoded: list[Any] = []
    real = TokenTexts.decode

    def counted(texts: TokenTexts, ids: Any, **given: Any) -> str:
        decoded.append(ids)
        return real(texts, ids, **given)

    monkeypatch.setattr(TokenTexts, "decode", counted)
    run(answered if kind == "echo" else streamed, kind)
    assert len(decoded) == 2


def test_what_is_echoed_in_all_answers_together_has_a_bound() -> None:
    for prompt, num_answers in (("x" * 2**18, 65), ([1] * 2**16, 65), ([[1] * 2**15] * 2, 65)):
        body = {"prompt": prompt, "n": num_answers, "echo": True, "max_tokens": 1}
        card = structs.replace(CARD, max_model_len=2**18)
        with pytest.raises(ApiError, match=r"n: got prompts of 17039360 bytes"):
            plan_completion(read_completion(json.dumps(body).encode()), card)
        body["n"] = 64
        assert plan_completion(read_completion(json.dumps(body).encode()), card)
