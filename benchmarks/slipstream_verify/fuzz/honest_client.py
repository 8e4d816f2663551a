"""The honest client: the product's own, which streams continuously and compares each answer with
the expected one.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import zmq
from msgspec import Struct

from slipstream.client.base import new_state
from slipstream.client.connection.link_session import ClientSession
from slipstream.client.streams.stream_state import StreamState
from slipstream.outputs import join
from slipstream_ipc.messages import SamplingParams

_NUM_STREAMS = 8
_STOPS = ((), ("()",), ("the ", "self"), ())
_TIMEOUT_S = 3600.0  # never reached: the stack runs in this thread


class HonestAnswer(Struct, frozen=True):
    """The complete answer of a stream."""

    text: str
    token_ids: tuple[int, ...]
    num_logprobs: int
    finish_reason: str | None
    error: str | None


class HonestClient:
    """Keeps several streams running. Call `turn` from the stack's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, seed: int) -> None:
        self._requests = _requests(seed)
        self._session = ClientSession(context, address, _TIMEOUT_S, zmq.Poller(), time.monotonic())
        self._running: dict[int, StreamState] = {}  # by request number
        self._expected: list[HonestAnswer] | None = None
        self._round: dict[int, HonestAnswer] = {}
        self._is_stopped = False
        self.num_identical = 0
        self.differences: list[str] = []
        self.last_end_at = time.monotonic()

    def expected_answers(self) -> list[HonestAnswer] | None:
        """The expected answers, once each request has run undisturbed; None until then."""
        self.turn()
        if self._expected is None and len(self._round) == len(self._requests):
            self._expected = [self._round[index] for index in range(len(self._requests))]
        return self._expected

    def expect(self, answers: list[HonestAnswer]) -> None:
        """Set the expected answer of every request."""
        self._expected = answers

    def turn(self) -> None:
        """Read what has arrived and start further requests."""
        self._session.turn(time.monotonic())
        for index, state in list(self._running.items()):
            if state.is_over:
                del self._running[index]
                self._ended(index, state)
        if self._session.model is None:
            return
        for index, (prompt, params) in enumerate(() if self._is_stopped else self._requests):
            if index not in self._running and (self._expected or index not in self._round):
                self._start(index, prompt, params)

    @property
    def stream_ids(self) -> list[bytes]:
        """The ids of the running streams."""
        return [state.stream_id for state in self._running.values()]

    def start(self) -> None:
        """Start requests again after `stop`."""
        self._is_stopped = False
        self.last_end_at = time.monotonic()

    def stop(self) -> None:
        """Start no further requests."""
        self._is_stopped = True

    def close(self) -> None:
        """Close the client."""
        self._session.close()

    def _start(self, index: int, prompt: list[int], params: SamplingParams) -> None:
        state = new_state(self._session.model, prompt, params, kind="delta")
        self._running[index] = state
        self._session.submit(state, time.monotonic())

    def _ended(self, index: int, state: StreamState) -> None:
        self.last_end_at = time.monotonic()
        whole = join(list(state.deltas), state.end)
        entries = whole.logprobs or []
        answer = HonestAnswer(
            whole.text,
            tuple(whole.token_ids),
            sum(len(entry) for entry in entries),
            whole.finish_reason,
            None if state.error is None else str(state.error),
        )
        if self._expected is None:
            self._round[index] = answer
        elif answer == self._expected[index]:
            self.num_identical += 1
        else:
            self.differences.append(f"request {index}: {answer}, expected {self._expected[index]}")


def _requests(seed: int) -> list[tuple[Any, SamplingParams]]:
    random = Random(seed)  # noqa: S311  (they are to be the same each time)
    requests = []
    for index in range(_NUM_STREAMS):
        prompt = [random.randrange(100, 1000) for _ in range(random.randrange(3, 40))]
        params = SamplingParams(
            temperature=0.0 if index % 3 else 0.8,
            seed=index,
            max_tokens=random.randrange(20, 150),
            stop=_STOPS[index % len(_STOPS)],
            logprobs=3 if index % 4 == 1 else None,
            ignore_eos=index % 2 == 0,
        )
        requests.append((np.array(prompt, np.uint32), params))
    return requests
