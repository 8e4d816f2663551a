"""Which streams wait for which prompt; tests play the tokenizer process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.messages import ChatMessage, ChatToolCall, FunctionCall, Render
from slipstream_worker.streams.stream import Stage, WorkerStream
from slipstream_worker.tokenizer import queue as module
from slipstream_worker.tokenizer.long_prompts import LONG_CHARS, is_long, size_of
from slipstream_worker.tokenizer.queue import RenderQueue

LONG = "x" * (LONG_CHARS + 1)


class Prompts:
    """Has begun with what is in `begun`."""

    def __init__(self) -> None:
        self.waiting: dict[int, Render] = {}
        self.begun: set[int] = set()
        self.num_asked = 0

    def ask(self, request: Render, _tenant: bytes = b"") -> int:
        self.num_asked += 1
        self.waiting[self.num_asked] = request
        return self.num_asked

    def withdraw(self, key: int) -> bool:
        if key in self.begun:
            return False
        del self.waiting[key]
        return True

    def answer(self, key: int) -> None:
        del self.waiting[key]
        self.begun.discard(key)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture
def renderings(prompts: Any) -> RenderQueue:
    return RenderQueue(prompts)


def stream(number: int = 0) -> WorkerStream:
    return WorkerStream(b"%d" % number, Stage.RENDERING)


def test_streams_with_the_same_prompt_wait_for_one_rendering(
    renderings: RenderQueue, prompts: Prompts
) -> None:
    calls = (ChatToolCall(FunctionCall("f", "{}")),)
    turns = [(ChatMessage("assistant", text, tool_calls=calls),) for text in ("a", "a", "b")]
    streams = [stream(number) for number in range(3)]
    for each, messages in zip(streams, turns, strict=True):
        renderings.ask(each, Render(0, messages=messages))
    assert len(prompts.waiting) == 2
    assert renderings.answered(1) == streams[:2]
    assert renderings.answered(2) == streams[2:]
    assert renderings.answered(2) == []


def test_what_nobody_waits_for_any_more_is_withdrawn(
    renderings: RenderQueue, prompts: Prompts
) -> None:
    first, second = stream(1), stream(2)
    renderings.ask(first, Render(0, LONG))
    renderings.ask(second, Render(0, LONG))
    renderings.withdraw(first)
    renderings.withdraw(first)
    assert prompts.waiting
    renderings.withdraw(second)
    assert not prompts.waiting
    assert renderings.answered(1) == []


def test_what_is_being_rendered_keeps_its_place(
    renderings: RenderQueue, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RENDERING_CHARS", len(LONG))
    gone, late = stream(1), stream(2)
    renderings.ask(gone, Render(0, LONG))
    prompts.begun.add(1)
    renderings.withdraw(gone)
    assert renderings.why_full(Render(0, LONG + "y"))
    assert not renderings.why_full(Render(0, LONG)), "it costs nothing more"
    renderings.ask(late, Render(0, LONG))
    assert late in renderings.answered(1)
    assert not renderings.why_full(Render(0, LONG + "y"))


@pytest.mark.parametrize(("name", "bound"), [("MAX_RENDERING", 1), ("MAX_RENDERING_CHARS", 1)])
@pytest.mark.parametrize(("one", "other"), [(LONG, "short"), ("short", LONG)])
def test_long_prompts_and_short_ones_are_bounded_apart(
    renderings: RenderQueue,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    bound: int,
    one: str,
    other: str,
) -> None:
    monkeypatch.setattr(module, name, bound)
    renderings.ask(stream(), Render(0, one))
    assert "are waiting to be tokenised already" in renderings.why_full(Render(0, one + "y"))
    assert not renderings.why_full(Render(0, other))


@given(st.lists(st.tuples(st.sampled_from("asbd"), st.integers(0, 7), st.booleans())))
def test_what_counts_is_what_waits_or_is_worked_on(acts: list[tuple[str, int, bool]]) -> None:
    """Asked, begun with, withdrawn and done in any order."""
    prompts: Any = Prompts()
    renderings = RenderQueue(prompts)
    waiting: dict[WorkerStream, int] = {}  # by the key of its prompt
    for number, (act, which, long) in enumerate(acts):
        keys = sorted(prompts.waiting)
        if act == "a":
            render = Render(0, (LONG if long else "short") + str(which % 3))
            renderings.ask(each := stream(number), render)
            (waiting[each],) = [k for k, asked in prompts.waiting.items() if asked == render]
        elif act == "s" and waiting:
            each = list(waiting)[which % len(waiting)]
            renderings.withdraw(each)
            del waiting[each]
        elif act == "b" and keys:
            prompts.begun.add(keys[which % len(keys)])
        elif act == "d" and keys:
            key = keys[which % len(keys)]
            prompts.answer(key)
            told = renderings.answered(key)
            expected = [each for each, its in waiting.items() if its == key]
            assert [each for each in told if each in waiting] == expected
            waiting = {each: its for each, its in waiting.items() if its != key}
        for key, asked in prompts.waiting.items():
            assert key in waiting.values() or key in prompts.begun, asked
        for kind in (False, True):
            asked = [each for each in prompts.waiting.values() if is_long(each) == kind]
            assert renderings._loads[kind].num_chars == sum(map(size_of, asked))
            num = sum(is_long(prompts.waiting[key]) == kind for key in waiting.values())
            assert num <= renderings._loads[kind].num_streams <= num + len(asked)


@pytest.mark.parametrize("of", ["streams", "characters"])
def test_a_tenants_prompts_turn_away_its_own(
    renderings: RenderQueue, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    size = 100
    monkeypatch.setattr(module, "MAX_RENDERING", 8 if of == "streams" else 1000)
    monkeypatch.setattr(module, "MAX_RENDERING_CHARS", 10**6 if of == "streams" else 8 * size)

    def fill(tenant: bytes) -> int:
        for num in range(1000):
            render = Render(0, f"{tenant!r} {num}".ljust(size))
            if renderings.why_full(render, tenant):
                return num
            renderings.ask(stream(num), render, tenant)
        raise AssertionError("there is no bound")

    assert fill(b"many") == 8  # alone it may have half of what there is
    assert fill(b"one") == 4
    assert fill(b"another") == 2
    for key in list(prompts.waiting):
        prompts.answer(key)
        renderings.answered(key)
    assert {(load.num_streams, load.num_chars) for load in renderings._loads.values()} == {(0, 0)}
    assert not any(load.streams or load.chars for load in renderings._loads.values())
    assert fill(b"one") == 8
