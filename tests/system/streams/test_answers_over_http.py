"""Chats over HTTP of a stack whose answers are read: what clients put together, whatever dies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from tests.helpers.answer_stack import PROMPTS, kill_and_replace, of_read_answers
from tests.helpers.chat_message import accumulated, message_of
from tests.helpers.http_answer import CARD, Table, Wire, body_of, identified_events
from tests.helpers.mini_stack import MiniStack, Received

from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.planning.chat import plan_chat, read_chat

TOOL = {"type": "function", "function": {"name": "f"}}


class Chats:
    """Streamed chats whose deltas a client of the stack takes."""

    def __init__(self, stack: MiniStack, *, is_resumable: bool) -> None:
        self.table, self.wires = Table(), []
        self.received: list[Received] = []
        client = stack.client()
        take = client._take_deltas

        def deliver(deltas: Any) -> None:
            take(deltas)
            assert self.table.streams.deliver(deltas)
            self.table.streams.wake()

        client._take_deltas = deliver  # type: ignore[method-assign]
        for prompt in PROMPTS:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "tools": [TOOL],
                "stream": True,
                "max_tokens": 120,
                "ignore_eos": True,
                "temperature": 0,
            }
            plan = plan_chat(read_chat(json.dumps(body).encode()), CARD)
            wire = Wire()
            wire.exchange = Exchange(HttpRequest(), wire)  # type: ignore[arg-type]
            context = AnswerContext(
                self.table, TextsByModel(lambda _: "nowhere"), Limits(), self.table.broadcast
            )
            start_answer(replace(plan, is_resumable=is_resumable), wire.exchange, context)
            [state] = plan.states
            submit = structs.replace(state.request, handle=state.handle)
            self.received.append(client.send_submit(submit))  # type: ignore[arg-type]
            self.wires.append(wire)

    @property
    def is_over(self) -> bool:
        """Whether all of them have ended."""
        return all(each.is_over for each in self.received)


@pytest.mark.parametrize("is_resumable", [False, True])
@pytest.mark.parametrize("what", ["", "worker", "core", "both"])
def test_the_official_client_gets_what_was_read(
    make_stack: Any, what: str, is_resumable: bool
) -> None:
    stack = of_read_answers(make_stack)()
    chats = Chats(stack, is_resumable=is_resumable)
    for _ in range(40):
        stack.step()
    if what:
        kill_and_replace(stack, what)
    stack.until(lambda: chats.is_over)
    messages = []
    for received, wire in zip(chats.received, chats.wires, strict=True):
        assert received.end is not None
        stream_id, reason = received.submit.stream_id, received.end.reason
        messages.append(accumulated(identified_events(body_of(wire.writes))))
        assert messages[-1] == message_of(received.events, stream_id, reason)
    assert any(calls for _, _, calls, _ in messages)
    assert any(reasoning for _, reasoning, _, _ in messages)
