"""The library's own client in a test's thread, stepped like the other parts of a `MiniStack`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import zmq

from slipstream.client.connection.cluster import Cluster
from slipstream.client.connection.link_session import ClientSession
from slipstream.client.streams.stream_state import StreamState
from slipstream.outputs import Delta, end_of
from slipstream.request.parallel_sampling import params_of_answers
from slipstream.request.requests import checked_params, new_resume, new_submit, new_submits


class Reading:
    """A stream, and what was read of it."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.text = ""
        self.token_ids: list[int] = []
        self.ranks: list[int] = []
        self.last: Delta | None = None

    @property
    def is_over(self) -> bool:
        return self.state.is_over

    def take(self, num: int = 10**9) -> None:
        """Read some of what is there."""
        deltas = self.state.deltas
        for _ in range(min(num, len(deltas))):
            self.last = delta = deltas.popleft()
            self.text += delta.text
            self.token_ids += delta.token_ids
            self.ranks += [next(iter(each.values())).rank for each in delta.logprobs or []]

    @property
    def position(self) -> tuple[int, int]:
        """Where it ends."""
        return (0, 0) if self.last is None else end_of(self.last)


class Client:
    """Steps like the stack's other parts."""

    def __init__(
        self,
        stack: Any,
        timeout_s: float = 60.0,
        kind: type[ClientSession] | type[Cluster] = ClientSession,
    ) -> None:
        self._stack = stack
        self.session: Any = kind(
            stack.context, stack.client_address, timeout_s, zmq.Poller(), stack.now()
        )
        self.hop = SimpleNamespace(close=self.session.close)  # by which the stack ends it
        stack.clients.append(self)

    def step(self) -> None:
        self.session.turn(self._stack.now())

    def submit(self, prompt: str, stream_id: str | None = None, **params: Any) -> Reading:
        given = checked_params(None, {"temperature": 0.0, **params})
        return self._start(
            StreamState(new_submit(prompt, given, stream_id=stream_id), wants_whole=False)
        )

    def submit_together(self, prompt: str, num: int, **params: Any) -> list[Reading]:
        """Several answers to one prompt."""
        given = checked_params(None, {"n": num, "seed": 0, **params})
        submits = new_submits(prompt, params_of_answers(given), stream_ids=[None] * num)
        return [self._start(StreamState(submit, wants_whole=False)) for submit in submits]

    def resume(self, stream_id: bytes, num_chars: int, num_tokens: int) -> Reading:
        resume = new_resume(stream_id.hex(), num_chars, num_tokens)
        return self._start(StreamState(resume, wants_whole=False))

    def _start(self, state: StreamState) -> Reading:
        self.session.submit(state, self._stack.now())
        return Reading(state)

    def die(self) -> None:
        """Without a word."""
        self._stack.clients.remove(self)
        self.session.close()


def finish(stack: Any, streams: list[Reading]) -> None:
    """Step until all are over, and read them."""
    stack.until(lambda: all(each.is_over for each in streams))
    for each in streams:
        each.take()
        assert each.state.error is None, each.state.error
