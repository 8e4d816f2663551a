"""Several `MiniStack`s and a client of all of them, in one thread, stepped by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from tests.helpers.mini_stack import MiniStack
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stepped_client import Reading

from slipstream.client.connection.cluster import Cluster
from slipstream.client.placing.moves import MoveSettings
from slipstream.client.streams.stream_state import StreamState
from slipstream.request.parallel_sampling import params_of_answers
from slipstream.request.requests import checked_params, new_resume, new_submit, new_submits


class MiniFleet:
    """Replicas, and one client that places and moves its streams."""

    def __init__(self, stacks: list[MiniStack], **settings: Any) -> None:
        """settings: see `MoveSettings`."""
        self.stacks = stacks
        self.is_reading = True
        self.clients: list[Cluster] = []
        self.session = self.client(**settings)

    def client(self, **settings: Any) -> Cluster:
        """Another client of the fleet."""
        session = Cluster(
            self.stacks[0].context,
            ",".join([stack.client_address for stack in self.stacks]),
            60.0,
            zmq.Poller(),
            self.now(),
            is_fleet=True,
            settings=MoveSettings(**settings),
        )
        self.clients.append(session)
        return session

    def now(self) -> float:
        """The clock of the clients."""
        return self.stacks[0].now()

    def step(self) -> None:
        """One turn of every replica and of the clients."""
        for stack in self.stacks:
            stack.step()
        for session in self.clients:
            session.turn(self.now())

    def until(self, condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Step until `condition`, with a deadline."""
        patience = Patience(within_s)
        while not condition():
            patience.check()
            self.step()

    def attach(self) -> None:
        """Step until every replica is attached."""
        self.until(lambda: len(self.attached) == len(self.stacks))

    @property
    def attached(self) -> list[int]:
        """The replicas at which the first client's streams may start."""
        return self.session._moves.open_members()

    def where(self, reading: Reading) -> int:
        """The replica that a stream is at; -1: none."""
        return reading.state.member

    def submit(self, prompt: str, **params: Any) -> Reading:
        given = checked_params(None, {"temperature": 0.0, **params})
        return self.start(StreamState(new_submit(prompt, given), wants_whole=False))

    def submit_together(self, prompt: str, num: int, **params: Any) -> list[Reading]:
        """Several answers to one prompt."""
        given = checked_params(None, {"n": num, "seed": 0, **params})
        submits = new_submits(prompt, params_of_answers(given), stream_ids=[None] * num)
        return [self.start(StreamState(submit, wants_whole=False)) for submit in submits]

    def resume(self, session: Cluster, reading: Reading) -> Reading:
        """Another client reads a stream on from where this one has read it."""
        resume = new_resume(reading.state.stream_id.hex(), *reading.position)
        return self.start(StreamState(resume, wants_whole=False), session)

    def start(self, state: StreamState, session: Cluster | None = None) -> Reading:
        (session or self.session).submit(state, self.now())
        return Reading(state)

    def finish(self, readings: list[Reading]) -> None:
        """Step until all are over, and read them."""
        self.until(lambda: all(each.is_over for each in readings))
        for each in readings:
            each.take()
            assert each.state.error is None, each.state.error

    def kill(self, index: int) -> None:
        """A whole replica is lost."""
        stack = self.stacks[index]
        if stack.worker is not None:
            stack.kill_worker()
        if stack.core is not None:
            stack.kill_core()

    def start_again(self, index: int) -> None:
        """A replica of the same name, which knows nothing."""
        self.stacks[index].start_core()
        self.stacks[index].start_worker()

    def cut(self, index: int) -> None:
        """No client reaches a replica, which goes on."""
        for path in self._sockets(index):
            path.rename(path.with_name(f"cut-{path.name}"))
        for session in self.clients:
            for link in session._members[index].links:
                link._dealer.attach(self.now())

    def heal(self, index: int) -> None:
        """The replica can be reached again."""
        folder = self.stacks[index].directory
        for path in list(folder.glob("cut-*")):
            path.rename(path.with_name(path.name.removeprefix("cut-")))

    def _sockets(self, index: int) -> list[Path]:
        folder = self.stacks[index].directory
        return [path for path in folder.iterdir() if path.name.startswith("client")]

    def close(self) -> None:
        for session in {*self.clients, self.session}:  # the first one may have left
            session.close()
