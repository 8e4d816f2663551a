"""What a chat of very many messages costs the front, which begins a request in one part."""

from __future__ import annotations

import json
import sys

import pytest
from tests.helpers.http_answer import CARD

from slipstream.http.api_errors import ApiError
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream_ipc.messages import MAX_CHAT_TURNS

MOST_CALLS = 4  # of functions, for a message


def begin(num: int, last: object) -> None:
    turns = [{"role": "assistant", "content": ""} for _ in range(num - 1)]
    body = {"max_tokens": 1, "messages": [*turns, {"role": "user", "content": last}]}
    plan_chat(read_chat(json.dumps(body).encode()), CARD)


def num_calls(num: int) -> int:
    """The calls of functions, Python's and C's, with which a chat of so many messages begins."""
    count = 0

    def note(_frame: object, event: str, _given: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        begin(num, "x")
    finally:
        sys.setprofile(before)
    return count


def test_a_message_costs_few_calls() -> None:
    """16,000 messages took 0.43 s of a busy front at once, and 17 calls for each."""
    begin(1, "x")  # what is looked up once
    few, many = num_calls(100), num_calls(1100)
    assert 0 < many - few <= 1000 * MOST_CALLS


def test_the_longest_chat_is_begun_and_a_longer_one_is_refused() -> None:
    begin(MAX_CHAT_TURNS, "x")
    with pytest.raises(ApiError, match="messages: got 16385 messages, allowed: at most 16384"):
        begin(MAX_CHAT_TURNS + 1, "x")
