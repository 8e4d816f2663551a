"""Prompts that a client holds encoded: the same on the wire, and as small as what was sent."""

from __future__ import annotations

import gc
import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from tests.helpers.http_answer import CARD

from slipstream.client.placing.prompt_keys import prompt_key
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream.packed_prompts import PACKED_BYTES, messages_of, packed, prompt_text_of
from slipstream.request.requests import new_submit
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    MAX_CHAT_TURNS,
    Accepted,
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    SamplingParams,
    Submit,
)

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
CALLS = st.builds(lambda name: (ChatToolCall(FunctionCall(name, "{}"), "call_1"),), TEXTS)
TURNS = st.builds(ChatMessage, TEXTS, TEXTS, st.none() | TEXTS, st.none() | CALLS)
PROMPTS = TEXTS | st.lists(TURNS, min_size=1, max_size=5) | st.lists(st.just(7), min_size=1)
encode = msgspec.msgpack.encode


@given(PROMPTS)
def test_a_packed_prompt_is_the_same_on_the_wire_and_to_its_readers(prompt: object) -> None:
    plain = new_submit(prompt, SamplingParams())  # type: ignore[arg-type]
    small = packed(plain)
    assert encode(small) == encode(plain)
    assert messages_of(small) == plain.messages
    assert prompt_text_of(small) == plain.text
    key, other = prompt_key(plain, "m"), prompt_key(small, "m")
    assert (key.first, key.second, key.prompt_len) == (other.first, other.second, other.prompt_len)
    assert key.chain.tolist() == other.chain.tolist()


@pytest.mark.parametrize("is_large", [False, True])
def test_only_a_large_request_is_packed(is_large: bool) -> None:
    turns = [ChatMessage("user", "ä" * (PACKED_BYTES // 2 if is_large else 10))]
    chat, text = new_submit(turns, SamplingParams()), new_submit(turns[0].content, SamplingParams())
    assert isinstance(chat.messages, Raw) == isinstance(text.text, Raw) == is_large
    assert messages_of(chat) == tuple(turns)
    assert prompt_text_of(text) == turns[0].content
    sent = msgspec.msgpack.decode(encode(chat), type=Submit)
    assert sent.messages == tuple(turns)


def held_bytes(plan: AnswerPlan, num_prompt: int) -> int:
    """The bytes that a stream holds once it is accepted, as tracemalloc has counted them."""
    table = ClientStreamTable()
    for state in plan.states:
        table.add(state)
        table.accept(Accepted(state.handle, pack_u32([7] * num_prompt)))
        assert state.prompt_ids is not None
        assert state.prompt_len == num_prompt
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    return held


NUM = MAX_CHAT_TURNS
CHAT = {"messages": [{"role": "user", "content": "hello there"}] * NUM, "max_tokens": 9}


@pytest.mark.parametrize("name", ["chat", "text"])
def test_a_stream_holds_no_more_than_its_client_has_sent(name: str) -> None:
    """16,000 messages took 3.1 MiB for 0.9 MB of JSON, and their tokens 4 bytes each besides."""
    body = CHAT if name == "chat" else {"prompt": "a" * 2**19 + "\U0001f600", "max_tokens": 9}
    content = json.dumps(body).encode()

    def begun(content: bytes) -> AnswerPlan:
        if name == "chat":
            return plan_chat(read_chat(content), CARD)
        return plan_completion(read_completion(content), CARD)

    begun(json.dumps(body).encode())  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        plan = begun(content)
        assert held_bytes(plan, 300_000) < len(content) + PACKED_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [{}, {"return_token_ids": True}])
def test_a_front_keeps_ids_of_a_prompt_where_the_answer_shows_them(body: dict[str, bool]) -> None:
    plan = plan_chat(read_chat(json.dumps({**CHAT, **body}).encode()), CARD)
    state: StreamState = plan.states[0]
    table = ClientStreamTable()
    table.add(state)
    table.accept(Accepted(state.handle, pack_u32([1, 2, 3])))
    assert state.prompt_ids == (pack_u32([1, 2, 3]) if body else b"")
    assert state.prompt_len == 3
