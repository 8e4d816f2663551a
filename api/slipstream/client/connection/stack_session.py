"""A client's sessions with the workers of one stack, behind the interface of a single session.

- A stream belongs to the worker that its id is dealt to (`worker_of`), and so do queries about it.
  Other queries go to the first worker, which speaks for the stack.
- The first worker's Welcome says how many there are. What was asked for before is dealt then. A
  stack that follows at the same address may have another number: its first Welcome deals all
  streams anew, each with what was received of it.
- The death of one worker touches its own session alone.
- It has the methods of `ClientSession`, and the same rules for calling them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Unpack

import zmq
from msgspec.structs import replace

from slipstream.client.connection.link_session import (
    TICK_S,
    ClientSession,
    LinkOptions,
    SessionObserver,
)
from slipstream.client.connection.queries import PendingQuery, Post, Query
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import CarriedStream
from slipstream.errors import SlipstreamError
from slipstream_ipc.messages import (
    Cancel,
    Cancelled,
    CancelledState,
    Locate,
    Located,
    ModelCard,
    Recall,
    Welcome,
)
from slipstream_ipc.process import BEAT_S
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.worker_deal import worker_address, worker_of


@dataclass(frozen=True, slots=True)
class Handover:
    """The state that a session passes to the session of the fleet to which its server belongs."""

    model: ModelCard
    streams: list[CarriedStream]
    queries: list[PendingQuery]


class StackSession:
    """Carries all streams of one client. Starts to attach to the stack's first worker at once.

    is_in_doubt: see `FleetSession`.
    """

    is_in_doubt = False

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        timeout_s: float,
        poller: zmq.Poller,
        now: float,
        *,
        access: Access | None = None,
        outlives_server: bool = True,
        fails_early: bool = False,
        group_ids: Iterator[int] | None = None,
        observer: SessionObserver | None = None,
        names_fleet: Callable[[tuple[str, ...]], bool] | None = None,
        **link_options: Unpack[LinkOptions],
    ) -> None:
        """address: of the first worker. names_fleet: whether the members that a Welcome lists are a
        fleet, to which this client then belongs (`handover`). The rest: see `ClientSession`.
        """
        self.address = address
        self.handover: Handover | None = None
        self._names_fleet = names_fleet
        self._open = partial(
            ClientSession,
            context,
            timeout_s=timeout_s,
            poller=poller,
            access=access,
            outlives_server=outlives_server,
            group_ids=count(1) if group_ids is None else group_ids,
            observer=observer,
            **link_options,
        )
        self._now = now
        self._all_due_at = now  # when every session turns, for its heartbeats and deadlines
        first = self._open(
            address, now=now, fails_early=fails_early, on_welcome=self._note_num_workers
        )
        self._sessions = [first]  # by worker

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The model as last reported by the first worker; empty before."""
        model = self._sessions[0].model
        return () if model is None else (model,)

    @property
    def is_attached(self) -> bool:
        """True if all sessions are attached, as far as is known."""
        return all(session.is_attached for session in self._sessions)

    @property
    def tick_s(self) -> float:
        """Seconds between turns when nothing arrives: as long as between the other beats of its
        process, and shorter while the stack is away, to find it again.
        """
        return BEAT_S if self.is_attached else TICK_S

    @property
    def is_starting(self) -> bool:
        """True if the stack has answered that it cannot serve yet."""
        return any(session.is_starting for session in self._sessions)

    @property
    def trouble(self) -> str:
        """The failure of handshakes with the first worker since the last attach; empty if there was
        none.
        """
        return self._sessions[0].trouble

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes something for this stack."""
        return any(session.is_among(arrived) for session in self._sessions)

    # ---- what may be asked for ---------------------------------------------------------------

    def connect(self, future: Future[ModelCard], now: float) -> None:
        """Fulfil `future` when the first worker answers."""
        self._sessions[0].connect(future, now)

    def submit(self, state: StreamState, now: float) -> None:
        """Submit a new stream, or one to be resumed."""
        self._deal(state).submit(state, now)

    def ask(
        self, query: Query, future: Future[Any], now: float, post: Post, _model: str = ""
    ) -> None:
        """Fulfil `future` with the answer of the worker, or the workers, that can give it. There is
        one model.
        """
        match query:
            case Recall():
                session = self._sessions[worker_of(query.stream_id, len(self._sessions))]
                session.ask(query, future, now, post)
            case Cancel() | Locate() if len(self._sessions) > 1:
                self._ask_each(query, future, now, post)
            case _:
                self._sessions[0].ask(query, future, now, post)

    def abort(self, state: StreamState) -> None:
        """Ask the stream's worker to end it; it then still receives its End."""
        if not state.is_over:
            self._sessions[state.worker].abort(state)

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for its worker."""
        if not state.is_over:
            self._sessions[state.worker].abandon(state)

    def supersede(self, state: StreamState) -> None:
        """End a stream that another reader of this client goes on with, at this stack."""
        self._sessions[state.worker].supersede(state)

    def position(self, state: StreamState) -> tuple[int, int]:
        """The number of characters and tokens received of one of the session's streams."""
        return self._sessions[state.worker].position(state)

    def leave(self, state: StreamState) -> CarriedStream:
        """Give a stream away, to go on at another stack. This one is told to end it."""
        return self._sessions[state.worker].leave(state)

    def carry_on(self, carried: CarriedStream) -> None:
        """Go on with a stream of another stack."""
        self._deal(carried.state).carry_on(carried)

    def take_queries(self, *, but_of_streams: bool = False) -> list[PendingQuery]:
        """Give unanswered queries away, to be asked elsewhere: see `PendingQueries.take_all`."""
        return [
            asked
            for session in self._sessions
            for asked in session.take_queries(but_of_streams=but_of_streams)
        ]

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail all waiting calls and all streams, each with a new error."""
        for session in self._sessions:
            session.end_all(error)

    # ---- what is done with it ----------------------------------------------------------------

    def turn(self, now: float, arrived: Container[object] | None = None) -> bool:
        """Receive, send what is due, and wake readers. Returns whether deltas arrived.

        arrived: what a poller has reported, where nothing else was asked for since the last turn:
        only sessions with news have to turn then.
        """
        self._now = now
        if len(self._sessions) == 1:
            return self._sessions[0].turn(now)
        if arrived is not None and now < self._all_due_at:
            some = [session for session in self._sessions if session.is_among(arrived)]
        else:
            some = self._sessions
            self._all_due_at = now + TICK_S
        has_deltas = some[0].turn(now) if some else False
        for session in some[1:]:
            has_deltas |= session.turn(now)
        return has_deltas

    def say_goodbye(self, now: float) -> bool:
        """Say goodbye to all workers; True once each has acknowledged it, or is not attached."""
        done = [session.say_goodbye(now) for session in self._sessions]
        return all(done)

    def close(self) -> None:
        """Close the sockets, without a goodbye."""
        for session in self._sessions:
            session.close()

    # ---- the deal ----------------------------------------------------------------------------

    def _deal(self, state: StreamState) -> ClientSession:
        state.worker = worker_of(state.stream_id, len(self._sessions))
        return self._sessions[state.worker]

    def _note_num_workers(self, welcome: Welcome) -> None:
        """Deal anew where the number of workers has changed. Nothing was said to the server yet."""
        names_fleet, self._names_fleet = self._names_fleet, None  # only the first one may
        if names_fleet is not None and names_fleet(welcome.members):
            [session] = self._sessions
            carried = [session.take(state) for state in session.streams]
            self.handover = Handover(welcome.model, carried, self.take_queries())
            return
        # at the address of another worker than the first, the others' addresses are not known
        num = welcome.num_workers if welcome.worker == 0 else 1
        before = list(self._sessions)
        if num == len(before):
            return
        self._sessions = before[:num]
        for worker in range(len(before), num):
            self._sessions.append(self._open(worker_address(self.address, worker), now=self._now))
        for session in before:
            for state in session.streams:
                if self._deal(state) is not session:
                    self._sessions[state.worker].carry_on(session.take(state))
            for asked in session.take_queries():
                self.ask(asked.query, asked.future, asked.since, asked.post)
        for session in before[num:]:
            session.close()

    def _ask_each(
        self, query: Cancel | Locate, future: Future[Any], now: float, post: Post
    ) -> None:
        """Ask each worker about its own streams, and put the answers together."""
        parts: dict[int, list[int]] = {}  # by worker: the places of its streams in the query
        for at, stream_id in enumerate(query.stream_ids):
            parts.setdefault(worker_of(stream_id, len(self._sessions)), []).append(at)
        answer = _AnswerOfEach(query, future, len(parts))
        for worker, places in parts.items():
            part: Future[Any] = Future()
            part.add_done_callback(partial(answer.add, places))
            ids = tuple([query.stream_ids[at] for at in places])
            self._sessions[worker].ask(replace(query, stream_ids=ids), part, now, post)


class _AnswerOfEach:
    """The answer to a query about streams, made of those of several workers."""

    def __init__(self, query: Cancel | Locate, future: Future[Any], num_parts: int) -> None:
        num = len(query.stream_ids)
        self._is_cancel = isinstance(query, Cancel)
        self._states: list[CancelledState] = ["unknown"] * num
        self._moves = [0] * num
        self._future = future
        self._num_left = num_parts

    def add(self, places: list[int], part: Future[Any]) -> None:
        """Take in the answer about the streams at these places; the last one fulfils the future,
        and so does the first error.
        """
        if self._num_left == 0:
            return
        error = part.exception()
        if error is None:
            self._take(places, part.result())
        self._num_left = 0 if error is not None else self._num_left - 1
        if self._num_left or not self._future.set_running_or_notify_cancel():
            return
        if error is not None:
            self._future.set_exception(error)
        elif self._is_cancel:
            self._future.set_result(Cancelled(0, tuple(self._states)))
        else:
            self._future.set_result(Located(0, tuple(self._moves)))

    def _take(self, places: list[int], found: Cancelled | Located | None) -> None:
        if isinstance(found, Cancelled):
            for at, state in zip(places, found.found, strict=True):
                self._states[at] = state
        elif found is not None and found.moves:  # else nothing was looked up
            for at, moves in zip(places, found.moves, strict=True):
                self._moves[at] = moves
