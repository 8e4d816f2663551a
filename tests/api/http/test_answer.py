"""Answers without a connection: what is begun for whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.http import answer
from slipstream.http.completions import ask_completion, read_completion
from slipstream.http.connection import Exchange
from slipstream.http.parsing import Request
from slipstream.http.token_texts import TokenTexts
from slipstream.stream_table import StreamState
from slipstream_ipc.messages import ModelCard

CARD = ModelCard("a model", "nowhere", 1000, 100, ())


class Engine:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.submitted: list[StreamState] = []

    def submit(self, state: StreamState) -> None:
        self.submitted.append(state)

    def abandon(self, state: StreamState) -> None:
        self.submitted.remove(state)


@pytest.mark.parametrize("is_stream", [b"true", b"false"])
def test_nothing_runs_for_who_left_before_it_could_begin(is_stream: bytes) -> None:
    """A request for log-probabilities waits for the vocabulary; its client may not."""
    body = b'{"prompt": "x", "logprobs": 1, "stream": %b}' % is_stream
    ask = ask_completion(read_completion(body), CARD)
    connection: Any = SimpleNamespace()
    exchange, engine = Exchange(Request(), connection), Engine()
    exchange.leave()
    answer.start(ask, exchange, engine, TokenTexts("nowhere"), 1000)
    assert engine.submitted == []
