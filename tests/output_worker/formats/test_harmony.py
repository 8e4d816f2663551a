"""Harmony's channels: answers that are written as its guide has them, and others."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.answers import (
    call,
    content,
    delimiter_tokens,
    divide,
    join,
    read,
    reasoning,
    to_items,
)

from slipstream_core.grammar.reasoning.reasoning_state import Allowed, ReasoningState
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions
from slipstream_worker.formats.channel_header import MAX_HEADER_CHARS
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.reasoning_ids import Spellings, reasoning_ids
from slipstream_worker.formats.start_state import start_state

FORMAT = find_format("harmony")
TOKENS = delimiter_tokens(FORMAT)
COMPILED = compile_format(FORMAT, TOKENS)
LITERALS = {token: literal for literal, token in TOKENS.items()}
START = start_state(COMPILED, [(TOKENS["<|start|>"], "<|start|>"), (7, "assistant")])
TOOLS: dict[str, dict[str, str]] = {"f": {}, "get.it": {}}


class Message(NamedTuple):
    """One message of an answer. text: of a call, its arguments."""

    channel: str
    function: str = ""
    text: str = ""
    is_recipient_first: bool = False
    constrain: str = ""
    end: str = "<|end|>"


def render(messages: list[Message]) -> str:
    texts = []
    for message in messages:
        to = f" to=functions.{message.function}" if message.function else ""
        channel = f"<|channel|>{message.channel}"
        header = to + channel if message.is_recipient_first else channel + to
        constrain = f" <|constrain|>{message.constrain}" if message.constrain else ""
        texts.append(f"{header}{constrain}<|message|>{message.text}{message.end}")
    return "<|start|>assistant".join(texts)


def events(messages: list[Message]) -> list[AnswerEvent]:
    found: list[AnswerEvent] = []
    number = 0
    for message in messages:
        if message.function:
            found += call(number, message.function, message.text or "{}")
            number += 1
        elif text := message.text:
            found.append(reasoning(text) if message.channel == "analysis" else content(text))
    return join(found)


ends = st.sampled_from(["<|end|>", "<|return|>", "<|call|>"])
texts = st.text("ab {}<>|\n", max_size=9).map(str.strip)
arguments = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3)
plain = st.builds(
    Message,
    st.sampled_from(["analysis", "commentary", "final", "other"]),
    st.just(""),
    texts,
    constrain=st.sampled_from(["", "json"]),
    end=ends,
)
calls = st.builds(
    Message,
    st.sampled_from(["commentary", "analysis"]),
    st.sampled_from(sorted(TOOLS)),
    arguments.map(json.dumps) | st.just(""),
    st.booleans(),
    st.sampled_from(["", "json"]),
    end=ends,
)


@given(st.lists(plain | calls, max_size=5), st.lists(st.integers(1, 9), min_size=1))
def test_messages_are_read_as_written(messages: list[Message], sizes: list[int]) -> None:
    expected = events(messages)
    items = divide(to_items(render(messages), TOKENS), sizes)
    assert read(COMPILED, items, TOOLS, state=START) == expected
    without_tokens = compile_format(FORMAT, {})
    start = start_state(without_tokens, [(7, "<|start|>assistant")])
    parts = divide([render(messages)], sizes)
    assert read(without_tokens, parts, TOOLS, state=start) == expected


CASES = [
    # no role before the first channel, and none after a message
    ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b",
     [reasoning("a"), content("b")]),
    # a message without its end
    ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
     [reasoning("a"), content("b")]),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [reasoning("a"), content("b")]),
    # text alone
    ("just text", [content("just text")]),
    ("<|channel|>final<|message|>a<|return|>b", [content("ab")]),
    # a tool that is no function of the request
    ("<|channel|>commentary to=python<|message|>1+1<|call|>", [content("1+1")]),
    ("<|channel|>analysis to=browser.search <|constrain|>json<|message|>{}<|call|>",
     [reasoning("{}")]),
    ("<|channel|>commentary to=functions.g<|message|>{}<|call|>",
     [content("<|channel|>commentary to=functions.g<|message|>{}")]),
    ("<|channel|>commentary to=functions.f<|message|>no JSON<|call|>",
     [content("<|channel|>commentary to=functions.f<|message|>no JSON")]),
    # the recipient in the role, the constraint without a channel
    (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", call(0, "f", "{}")),
    (" to=functions.f <|constrain|>json<|message|>{}<|call|>", call(0, "f", "{}")),
    ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
     call(0, "f", "{}")),
    ("<|channel|>commentary to=functions.f json<|message|>{}<|call|>", call(0, "f", "{}")),
    # a call that fails, or breaks off
    ('<|channel|>commentary to=functions.f<|message|>{"a": oh}<|call|><|channel|>final<|message|>b',
     [*call(0, "f", '{"a": ', ends=False), content("oh}b")]),
    ('<|channel|>commentary to=functions.f<|message|>{"a": "b<|call|>',
     call(0, "f", '{"a": "b', ends=False)),
    ("<|channel|>commentary to=functions.f<|message|>{}", call(0, "f", "{}")),
    ("<|channel|>commentary to=functions.f", [content("<|channel|>commentary to=functions.f")]),
    # headers that are none
    ("<|channel|>final<|end|>x", [content("<|channel|>finalx")]),
    ("<|message|>x", [content("x")]),
    ("<|start|>assistant<|message|>x", [content("x")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_other_answers(text: str, expected: list[AnswerEvent]) -> None:
    items = to_items(text, TOKENS)
    assert read(COMPILED, items, TOOLS, state=START) == expected
    assert read(COMPILED, divide(items, [1]), TOOLS, state=START) == expected


def test_without_calls_their_messages_are_content() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|channel|>commentary to=functions.f<|message|>{}"
    expected = [reasoning("a"), content("<|channel|>commentary to=functions.f<|message|>{}")]
    options = AnswerOptions(tool_choice="none")
    assert read(COMPILED, to_items(text, TOKENS), TOOLS, options, START) == expected


def test_headers_are_bounded() -> None:
    header = "<|channel|>" + "x" * MAX_HEADER_CHARS
    items = to_items(f"{header}<|message|>y", TOKENS)
    expected = [content(f"{header}<|message|>y")]
    assert read(COMPILED, items, TOOLS) == expected
    assert read(COMPILED, divide(items, [1]), TOOLS) == expected


def test_reasoning_is_what_stands_in_its_channel() -> None:
    reader = COMPILED.reader(TOOLS, AnswerOptions(), START)
    seen = []
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    for item in to_items(text, TOKENS):
        if isinstance(item, int):
            reader.feed_delimiter(item)
        else:
            reader.feed(item)
            seen.append((item, reader.is_reasoning))
    assert seen == [
        ("analysis", False), ("a", True), ("assistant", False), ("final", False), ("b", False),
    ]  # fmt: skip


ANALYSIS, LETTER = 1, 2  # ids of a channel's name, and of a text's
HEADER = (TOKENS["<|channel|>"], ANALYSIS, TOKENS["<|message|>"])
SPELLINGS = Spellings(TOKENS, {"<|channel|>analysis<|message|>": (HEADER,)})


@given(
    lens=st.lists(st.integers(0, 6), max_size=4),
    budget=st.none() | st.integers(0, 9),
    is_open=st.booleans(),
)
def test_a_budget_bounds_all_messages_of_reasoning(
    lens: list[int], budget: int | None, is_open: bool
) -> None:
    """A model that writes what it wants to, but for the ends that the core writes. is_open: the
    prompt has begun the first message.
    """
    prompt = [(7, "<|start|>assistant"), *([(7, "<|channel|>analysis<|message|>")] * is_open)]
    pieces = [piece for _, text in prompt for piece in items_of(text)]
    start = start_state(COMPILED, pieces)
    place = COMPILED.reader(TOOLS, AnswerOptions(), start).place
    ids = reasoning_ids(FORMAT, SPELLINGS, (), place, is_start=False)
    assert ids is not None
    state = ReasoningState(ids, budget, has_grammar=False)
    written: list[int] = []

    def write(token_id: int) -> bool:
        """Write a token; whether it was another one, which ends reasoning."""
        is_ended = state.allowed_at(len(written)) is Allowed.END
        token_id = TOKENS["<|end|>"] if is_ended else token_id
        state.take(token_id, len(written))
        written.append(token_id)
        return is_ended

    for number, size in enumerate(lens):
        if number or not is_open:
            for token_id in (TOKENS["<|channel|>"], ANALYSIS, TOKENS["<|message|>"]):
                assert not write(token_id)
        if not any(write(LETTER) for _ in range(size)):
            write(TOKENS["<|end|>"])
        assert written[-1] == TOKENS["<|end|>"]
        write(TOKENS["<|start|>"])
        write(3)
    if lens or not is_open:
        for token_id in (TOKENS["<|channel|>"], 4, TOKENS["<|message|>"], LETTER):
            assert not write(token_id)
    texts = {ANALYSIS: "analysis", LETTER: "a", 3: "assistant", 4: "final"}
    answer = read(COMPILED, [texts.get(each, each) for each in written], TOOLS, state=start)
    num = sum(lens) if budget is None else min(budget, sum(lens))
    final = [content("a")] if lens or not is_open else []
    assert answer == [*([reasoning("a" * num)] if num else []), *final]


def items_of(text: str) -> list[tuple[int, str]]:
    """Pieces of a prompt, as `start_state` takes them."""
    items = to_items(text, TOKENS)
    return [(it, LITERALS[it]) if isinstance(it, int) else (-1, it) for it in items]


def test_without_ids_of_the_channels_name_there_is_no_budget() -> None:
    place = COMPILED.reader(TOOLS, AnswerOptions(), START).place
    assert reasoning_ids(FORMAT, Spellings(TOKENS), (), place, is_start=True) is None
