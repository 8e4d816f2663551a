"""A client's session with its server: attaches, sends what is due, and delivers what arrives.

A thread (`ThreadIO`) or an event loop (`LoopIO`) drives it, and passes the current time in.

- All calls come from one thread. `turn` is called after other calls, when the socket is readable,
  and at least every `Cluster.tick_s`.
- Deltas are acknowledged once they are in their streams' queues: with the next message or a few at
  a time, at once where a stream ends. Pings are answered here too, so a slow reader neither counts
  as a dead client nor delays other streams. Unread deltas are merged (`merge_unread`), so they take
  no more memory than the answer.
- A server that says goodbye counts as gone, like one that died: streams that it had accepted
  continue with the next server at its address, and streams that it rejected are submitted there. A
  session that does not outlive its server fails them with OverloadedError instead.
- When the server has been away for `timeout_s`, everything that waits for it fails; later requests
  wait anew. An accepted stream waits six times as long: its output would be lost, and a server
  that ran before is probably being replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from typing import Any

import zmq
from msgspec.structs import replace

from slipstream.client.connection.pending_requests import PendingRequests
from slipstream.client.connection.queries import (
    PendingQueries,
    PendingQuery,
    Post,
    Query,
)
from slipstream.client.server_presence import why_absent
from slipstream.client.streams.delta_relay import DeltaRelay
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import CarriedStream, ClientStreamTable
from slipstream.errors import (
    ConnectionLostError,
    EngineError,
    OverloadedError,
    SlipstreamError,
)
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    ONE_TENANT,
    Abort,
    Accepted,
    AdapterChanged,
    AdapterList,
    AdapterRecords,
    AttachRefused,
    Cancelled,
    ClientToWorker,
    Deltas,
    Detokenized,
    Embedded,
    Fault,
    Goodbye,
    Inspected,
    KnowsAdapters,
    Load,
    Located,
    ModelCard,
    PromptLogprobs,
    Recalled,
    Rejected,
    Submit,
    Superseded,
    Tokenized,
    UnknownStreams,
    Welcome,
    WorkerToClient,
)
from slipstream_ipc.transport.codec import client_codec
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.dealer import Dealer, LinkOptions
from slipstream_ipc.transport.link import MAY_OWE

logger = logging.getLogger(__name__)

TICK_S = 0.25  # how late a deadline may be noticed where a server is away
GOODBYE_S = 0.5  # how long a client waits for the server to acknowledge its goodbye

_MAX_BREACHES = 3
_ABSENT_S = 1.0  # without a server to be expected, where `fails_early`
_ACCEPTED_WAIT = 6  # times `timeout_s`, for accepted streams
_WHAT_TO_DO = (
    "start one with scripts/launch or `slipstream serve`, or say where it is "
    "(the address argument or $SLIPSTREAM_ADDRESS)"
)


@dataclass(eq=False, slots=True)
class _Caller:
    """A call of `connect` that waits for the server."""

    future: Future[ModelCard]
    since: float


@dataclass(frozen=True, slots=True)
class Absence:
    """The ways of a session while its server is away. outlives_server: whether to wait for another
    one when it says goodbye. fails_early: until the first attach, whether to wait no longer than
    _ABSENT_S where no server is to be expected (`why_absent`).
    """

    outlives_server: bool = True
    fails_early: bool = False


class SessionObserver:
    """Callbacks of a session, called from inside `turn`. These do nothing."""

    def welcomed(self, welcome: Welcome) -> None:
        """The server has answered, and nothing was said to it yet: streams and queries may be
        taken.
        """

    def loaded(self, load: Load) -> None:
        """The server has told its load."""

    def adapters_changed(self, model: ModelCard, records: AdapterRecords) -> None:
        """The server's model has other adapters than before, by these changes."""

    def refused(self, error: Callable[[], SlipstreamError]) -> bool:
        """The server refuses the client, or breaks the protocol: whether the streams go elsewhere,
        else they fail with this error.
        """
        return False

    def turned_away(self, state: StreamState) -> None:
        """The server leaves and has not accepted this stream."""

    def overloaded(self, state: StreamState) -> bool:
        """Called if the server has no room for this stream; return True if it goes elsewhere."""
        return False

    def over(self, state: StreamState) -> None:
        """A stream is over."""


class ClientSession:
    """Carries all streams of one client over successive attaches. Starts to attach at once.

    poller: the current attach's socket is registered in it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        timeout_s: float,
        poller: zmq.Poller,
        now: float,
        *,
        access: Access | None = None,
        absence: Absence | None = None,
        group_ids: Iterator[int] | None = None,
        observer: SessionObserver | None = None,
        options: LinkOptions | None = None,
    ) -> None:
        """group_ids: see `ClientStreamTable`. options: of the link."""
        self._observer = observer = observer or SessionObserver()
        self._absence = absence or Absence()
        self._has_left = False  # the server has said goodbye
        self._warns_of_tenants = False  # to the server it is one, whatever tenants it names
        self.address = address
        self.timeout_s = timeout_s
        self.model: ModelCard | None = None  # as last reported by the server
        self._table = ClientStreamTable(group_ids, observer.over)
        self._callers: list[_Caller] = []
        self._requests = PendingRequests(self._table)
        self._queries = PendingQueries()
        self._owes_at_once = False  # an end has arrived: the server keeps its stream until then
        self._known_change: int | None = None  # of adapters, still to be said
        self._relay: DeltaRelay | None = None  # to begin a turn with
        self._made_relay: DeltaRelay | None = None  # the latest one
        self._beat_at = now
        self._lost_at: float | None = now
        self._num_breaches = 0  # of the protocol, since the last valid message
        self._goodbye_epoch: int | None = None  # the attach in which goodbye was sent
        self._dealer: Dealer[ClientToWorker, WorkerToClient, Abort | None] = Dealer(
            context,
            address,
            client_codec(),
            poller,
            identity=token_bytes(16),
            now=now,
            access=access,
            options=options,
        )

    @property
    def is_attached(self) -> bool:
        """True if the session is attached to a server, as far as is known."""
        return self._dealer.is_attached

    @property
    def is_starting(self) -> bool:
        """True if a server has answered that it cannot serve yet."""
        return self._dealer.is_starting

    @property
    def trouble(self) -> str:
        """The failure of handshakes since the last attach; empty if there was none."""
        return self._dealer.trouble

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes something for this session."""
        return self._dealer.is_among(arrived)

    # ---- what may be asked for ---------------------------------------------------------------

    def connect(self, future: Future[ModelCard], now: float) -> None:
        """Fulfil `future` when the server answers; ConnectionLostError after `timeout_s`."""
        if self._dealer.is_attached and self.model is not None:
            future.set_result(self.model)
        else:
            self._callers.append(_Caller(future, now))

    def submit(self, state: StreamState, now: float) -> None:
        """Submit a new stream, or one to be resumed."""
        state.submitted_at = now
        self._table.add(state)
        self._requests.add(state)
        if self._warns_of_tenants and isinstance(state.request, Submit) and state.request.tenant:
            self._warns_of_tenants = False  # once for each attach
            logger.warning(
                "%s takes this process's key for a client's, so that its API keys are one tenant: "
                "give it a front's key (`slipstream keys DIR --front NAME`)",
                self.address,
            )

    def ask(self, query: Query, future: Future[Any], now: float, post: Post) -> None:
        """Fulfil `future` with the server's answer; ConnectionLostError after `timeout_s`.

        post: see `PendingQueries.ask`.
        """
        self._queries.ask(query, future, now, post)

    def abort(self, state: StreamState) -> None:
        """Ask the server to end the stream, which then still receives its End."""
        if not state.was_sent:
            self._table.give_up(state, None)
        elif not state.is_over and not state.is_abort_wanted:
            state.is_abort_wanted = True
            self._requests.abort(state)

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for the server."""
        if not state.is_over:
            self._requests.abandon(self._table.give_up(state, None))

    def supersede(self, state: StreamState) -> None:
        """End a stream that another reader of this client goes on with, at this server."""
        self._table.supersede(Superseded(state.handle))

    @property
    def streams(self) -> list[StreamState]:
        """The streams that are not over."""
        return self._table.streams

    def take(self, state: StreamState) -> CarriedStream:
        """Give a stream that is not over to another session, which goes on with it."""
        return self._table.take(state)

    def leave(self, state: StreamState) -> CarriedStream:
        """Give a stream away, to go on at another server. This one is told to end it."""
        carried = self._table.take(state)
        self._requests.abandon(self._table.abandon(state, has_moved=True))
        state.was_sent = state.was_resubmitted = False
        state.num_gaps = 0  # they were this server's
        return carried

    def position(self, state: StreamState) -> tuple[int, int]:
        """The number of characters and tokens received of one of the session's streams."""
        return self._table.position(state)

    def carry_on(self, carried: CarriedStream) -> None:
        """Go on with a stream of another session."""
        state = carried.state
        self._table.add(state, carried)
        self._requests.add(state)
        if state.is_abort_wanted:
            self._requests.abort(state)

    def take_queries(self, *, but_of_streams: bool = False) -> list[PendingQuery]:
        """Give unanswered queries to another session, which asks them anew: see `take_all`."""
        return self._queries.take_all(but_of_streams=but_of_streams)

    def end_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail all waiting calls and all streams, each with a new error."""
        self._fail_waiting(error)
        self._table.wake()

    # ---- what is done with it ----------------------------------------------------------------

    def turn(self, now: float) -> bool:
        """Receive, send what is due, and wake readers. Returns whether deltas arrived."""
        relay = self._relay
        if relay is not None and now < self._beat_at and relay.take(now):
            return True
        self._relay = None
        dealer = self._dealer
        has_deltas = self._receive(now)
        if dealer.link.has_receipts:
            self._take_receipts()
        if now >= self._beat_at:
            dealer.beat(now)
            self._beat_at = now + TICK_S / 2  # so that each tick finds it due
        if dealer.is_attached:
            self._lost_at = None
            if self._requests.due or self._requests.abandoned:
                self._requests.flush(dealer.send)
            if self._queries.due:
                self._queries.flush(self._send_query)
            if self._known_change is not None and dealer.send(
                KnowsAdapters(self._known_change), None
            ):
                self._known_change = None
            if self._owes_at_once or dealer.link.num_owed_acks > MAY_OWE:
                dealer.acknowledge()
                self._owes_at_once = False
        else:
            self._requests.clear()
            self._count_absence(now)
        self._relay = self._find_relay()
        self._table.wake()
        return has_deltas

    def say_goodbye(self, now: float) -> bool:
        """Say goodbye to the server; True once it is acknowledged, or no server is attached.

        Until then, call it again when the socket is readable; call `close` after GOODBYE_S at the
        latest.
        """
        dealer = self._dealer
        for _ in dealer.receive(now):
            pass
        if self._goodbye_epoch is None and dealer.send(Goodbye(), None):
            self._goodbye_epoch = dealer.epoch
        if not dealer.is_attached:
            return True
        if self._goodbye_epoch is None:
            return False  # without credit
        return dealer.epoch != self._goodbye_epoch or dealer.num_unacked == 0

    def close(self) -> None:
        """Close the socket, without a goodbye."""
        self._dealer.close()

    def _find_relay(self) -> DeltaRelay | None:
        """The relay to begin the next turn with, if the connection is a local one, and this turn
        has left nothing for the next one but what a relay sees itself.
        """
        end = self._dealer.local_end
        is_busy = self._owes_at_once or self._known_change is not None
        if end is None or is_busy or self._num_breaches:
            return None
        link, connection = end
        if not connection.is_bare:
            return None
        made = self._made_relay
        if made is None or made.link is not link or made.is_spent:
            requests = self._requests
            queues = requests.due, requests.abandoned, self._queries.due
            made = self._made_relay = self._table.relay(link, connection, *queues)
        return made

    def _receive(self, now: float) -> bool:
        """Handle what has arrived; return True if deltas are among it."""
        has_deltas = False
        for body in self._dealer.receive(now, acknowledges=False):
            has_deltas |= self._handle(body, now)
        return has_deltas

    def _take_receipts(self) -> None:
        for abandoned in self._dealer.take_receipts():
            if abandoned is not None:
                self._table.forget(abandoned)

    def _handle(self, body: WorkerToClient | AttachRefused, now: float) -> bool:
        """Handle a message; return True if it has deltas."""
        table = self._table
        has_deltas = False
        try:
            match body:
                case Deltas():
                    has_deltas = True
                    self._owes_at_once |= bool(body.ended)
                    if not table.deliver(body, now):
                        self._dealer.attach(now)
                    self._num_breaches = 0
                case Accepted():
                    table.accept(body)
                case PromptLogprobs():
                    if not table.take_prompt(body):
                        self._dealer.attach(now)
                case Rejected() if body.is_leaving and self._absence.outlives_server:
                    turned_away = table.turn_away(body)
                    if turned_away is not None:
                        self._observer.turned_away(turned_away)
                case Rejected() if self._goes_elsewhere(body):
                    pass
                case Rejected():
                    self._requests.abandon(table.reject(body))
                case Superseded():
                    table.supersede(body)
                case UnknownStreams():
                    again = table.lose(body)
                    for state in again:
                        self._requests.add(state)
                    self._queries.ask_again(frozenset([state.stream_id for state in again]))
                case (
                    Tokenized()
                    | Detokenized()
                    | Cancelled()
                    | Recalled()
                    | Located()
                    | Inspected()
                    | AdapterChanged()
                    | Embedded()
                ):
                    self._queries.answer(body)
                    self._num_breaches = 0
                case Welcome():
                    self._greet(body)
                case AdapterList():
                    if self.model is not None:
                        self.model = replace(self.model, adapters=body.adapters)
                        self._observer.adapters_changed(self.model, body.records)
                    self._known_change = body.number
                case AttachRefused() if body.is_leaving and self._absence.outlives_server:
                    self._has_left = True
                    if self._dealer.is_attached:
                        self._dealer.attach(now)
                case Load():
                    self._observer.loaded(body)
                case AttachRefused():
                    kind = OverloadedError if body.is_leaving else SlipstreamError
                    self._refuse(partial(kind, body.fault))
                    if self._dealer.is_attached:  # else `beat` retries, after its interval
                        self._dealer.attach(now)
        except ProtocolError as error:
            self._note_breach(error)
            self._dealer.attach(now)
        return has_deltas

    def _goes_elsewhere(self, rejected: Rejected) -> bool:
        """True if another server is asked for a stream that this one has no room for."""
        if rejected.fault.code != "overloaded":
            return False
        state = self._table.get(rejected.handle)
        if state is None or state.is_abort_wanted or state.prompt_ids is not None:
            return False
        return self._observer.overloaded(state)

    def _send_query(self, query: Query) -> bool:
        return self._dealer.send(query, None)

    def _note_breach(self, error: ProtocolError) -> None:
        """Count a breach; after _MAX_BREACHES, attaching anew has not helped: fail what waits."""
        self._num_breaches += 1
        if self._num_breaches >= _MAX_BREACHES:
            self._num_breaches = 0
            why = f"the server does not keep to the protocol: {error}"
            self._refuse(partial(EngineError, Fault("engine", why)))

    def _refuse(self, error: Callable[[], SlipstreamError]) -> None:
        """Fail the streams that wait for this server, which refuses them, unless they can go
        elsewhere.
        """
        if not self._observer.refused(error):
            self._fail_waiting(error)

    def _greet(self, welcome: Welcome) -> None:
        self.model = welcome.model
        self._known_change = None
        self._has_left = False
        self._warns_of_tenants = bool(welcome.answers & ONE_TENANT)
        self._observer.welcomed(welcome)
        callers, self._callers = self._callers, []
        for caller in callers:
            caller.future.set_result(welcome.model)
        self._requests.refill()
        self._queries.refill()

    def _count_absence(self, now: float) -> None:
        """Fail what has waited for `timeout_s` without a server. A server that loads its model
        counts as present: it answers each attach with that.
        """
        if self._dealer.is_starting:
            self._lost_at = None
            return
        if self._lost_at is None:
            self._lost_at = now
        if self._absence.fails_early and self.model is None and self._lost_at <= now - _ABSENT_S:
            absent = why_absent(self.address)
            if absent is not None:
                why = f"no Slipstream server at {self.address}: {absent}; {_WHAT_TO_DO}"
                self._fail_older(partial(ConnectionLostError, Fault("engine", why)), _ABSENT_S, now)
        if self._lost_at > now - self.timeout_s:
            return
        was_there = self.model is not None
        what = (
            "the Slipstream server has been gone from" if was_there else "no Slipstream server at"
        )
        if self._has_left:
            what = "the Slipstream server has shut down, and none has come in its place at"
        trouble = self._dealer.trouble  # a server answers, but the handshake fails
        why = f"{what} {self.address} for {now - self._lost_at:.3g} s: {trouble or _WHAT_TO_DO}"
        self._fail_older(partial(ConnectionLostError, Fault("engine", why)), self.timeout_s, now)

    def _fail_older(
        self, error: Callable[[], SlipstreamError], waited_s: float, now: float
    ) -> None:
        """Fail what has waited for `waited_s`, and accepted streams after _ACCEPTED_WAIT times the
        timeout.
        """
        assert self._lost_at is not None
        latest = now - waited_s
        for state in self._table.streams:
            is_accepted = state.prompt_ids is not None
            if is_accepted and self._lost_at > now - _ACCEPTED_WAIT * self.timeout_s:
                continue
            if state.submitted_at <= latest:
                self._table.give_up(state, error())
        self._queries.fail(error, latest)
        for caller in list(self._callers):
            if caller.since <= latest:
                self._callers.remove(caller)
                caller.future.set_exception(error())

    def _fail_waiting(self, error: Callable[[], SlipstreamError]) -> None:
        callers, self._callers = self._callers, []
        for caller in callers:
            caller.future.set_exception(error())
        self._queries.fail(error)
        self._table.give_up_all(error)
