"""The worker's loop: handle what has arrived, then send what is due.

- The report to the core is sent before the deltas to the clients, and before most of their text is
  built: the device may be waiting for it.
- Clients' messages are read only once the core has sent everything it knows (`SyncDone`). Clients
  that attach earlier are asked to wait, and welcomed afterwards.
- After a protocol error of the core the worker attaches to it again; no stream is affected.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from math import inf
from time import monotonic, monotonic_ns

import zmq
from msgspec.structs import replace

from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import Fault, ModelCard, Rendered, Step
from slipstream_ipc.telemetry.statistics import Statistics, WorkerNumbers
from slipstream_ipc.telemetry.timeline import RecentSpans
from slipstream_ipc.telemetry.trace import SpanKind, Tracer
from slipstream_ipc.transport.sockets import ServerSockets
from slipstream_worker.clients.adapter_queries import AdapterQueries
from slipstream_worker.clients.core_queries import CoreQueries
from slipstream_worker.clients.embedding_queries import EmbeddingQueries
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.load_notices import LoadNotices
from slipstream_worker.clients.ports import AUTO_MAX_UNACKED, FrontAcceptor
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.config import WorkerConfig
from slipstream_worker.core_link import CoreLink
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.lifecycle.answer_keeper import AnswerKeeper
from slipstream_worker.lifecycle.client_messages import ClientMessages
from slipstream_worker.lifecycle.core_messages import AnswerForm, CoreMessages
from slipstream_worker.lifecycle.lifecycle import StreamLifecycle
from slipstream_worker.lifecycle.stream_store import StreamStore
from slipstream_worker.request_spans import RequestSpans
from slipstream_worker.step_relay import TAKEN, UNREPORTED, UNSENT, RelayMaker, StepRelay
from slipstream_worker.streams.retention import Retention
from slipstream_worker.streams.stream import WorkerStream, WorkerStreamTable
from slipstream_worker.streams.stream_columns import StreamColumns
from slipstream_worker.tokenizer.client import RenderSource
from slipstream_worker.tokenizer.queue import RenderQueue

logger = logging.getLogger(__name__)

_GOODBYE = Fault("engine", "the server is shutting down")


class Worker:
    """One output worker, between its core and its clients."""

    def __init__(
        self,
        config: WorkerConfig,
        core: CoreLink,
        sockets: ServerSockets,
        front: FrontAcceptor,
        prompts: RenderSource,
        detokenizers: DetokenizerFactory,
        poller: zmq.Poller,
        *,
        answers: AnswerForm | None = None,
        tracer: Tracer | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        """`sockets` are those that `front` accepts on. answers: their form; None: of no format.
        spans: of the requests that are traced; None if none is.
        """
        self._spans = spans
        self._may_return = config.may_return
        self._has_left = False
        self._tracer = tracer
        self._recent = RecentSpans()  # of loop iterations that handled a step
        self._poller = poller
        self._core = core
        self._sockets = sockets
        self._front = front
        self._prompts = prompts
        self._load_notices = LoadNotices(front)
        front.register(poller)
        self.streams = WorkerStreamTable()
        self.columns = StreamColumns(detokenizers.fast_table)
        self.retention = Retention(self.streams, config.grace_s)
        counters = RequestCounters(spans)
        render_queue = RenderQueue[WorkerStream](prompts)
        self.readers = StreamReaders(
            front,
            self.columns,
            detokenizers,
            counters,
            self.retention,
            max_unacked=AUTO_MAX_UNACKED if config.stream_interval == "auto" else None,
        )
        store = StreamStore(self.streams, self.columns, self.readers, self.retention)
        kept_bytes = int(config.response_store_mib * 2**20)
        self.lifecycle = StreamLifecycle(
            core,
            store,
            render_queue,
            counters,
            AnswerKeeper(core, self.columns, detokenizers, kept_bytes),
            min_interval=1 if config.stream_interval == "auto" else config.stream_interval,
        )
        self._embeddings = EmbeddingQueries(core, self.readers, counters)
        core_queries = CoreQueries(AdapterQueries(core, self.readers), self._embeddings)
        self._from_core = CoreMessages(
            config,
            core,
            self.lifecycle,
            store,
            counters,
            detokenizers,
            self._load_notices,
            core_queries,
            answers=answers,
            tracer=tracer,
        )
        self._relays = RelayMaker(
            core, self.streams, self.columns, self.readers, counters, self._recent
        )
        self._relay: StepRelay | None = None  # while all that it relies on is sure to hold
        self._from_clients = ClientMessages(
            config,
            front,
            self.lifecycle,
            store,
            render_queue,
            prompts,
            detokenizers,
            self._load_notices,
            core_queries,
            is_traced=spans is not None,
        )

    @property
    def card(self) -> ModelCard | None:
        """The served model's card; None before the core's first Welcome."""
        return self._from_core.card

    def run_once(self, now: float, arrived: Collection[object] | None = None) -> None:
        """Handle everything that has arrived and send everything that is due.

        arrived: the sockets that the poller has reported as readable; None checks all of them, at
        the cost of a system call each.
        """
        self.retention.now = self._embeddings.now = now
        relay = self._relay
        if relay is not None:
            if arrived is not None and self._turn_in_relay(relay, now, arrived):
                return
            self._set_relay_aside()
        step_before = self._from_core.step
        if arrived is None or self._core.is_among(arrived):
            try:
                self._receive(now)
            except ProtocolError:
                logger.exception("the core broke the protocol; attaching again")
                self._core.attach(now)
        # before the clients' messages: the device may be waiting for it
        self._core.report()
        card = self.card
        if card is None or not self._from_core.is_synced or self._has_left:
            self._front.queue_hellos()
        else:
            if arrived is None or self._front.is_among(arrived):
                for session, body in self._front.receive(now):
                    self._from_clients.handle(session, body, card)
            self._from_clients.flush()
        if arrived is None or self._prompts.is_among(arrived):
            for answer in self._prompts.receive():
                if isinstance(answer, Rendered) and card is not None:
                    self._from_clients.rendered(answer, card)
        self._core.flush()
        tracer = self._tracer
        begin_ns = monotonic_ns() if tracer is not None else 0
        if self.readers.flush() and tracer is not None:
            tracer.add(SpanKind.EMIT, begin_ns, monotonic_ns(), self._from_core.step)
        self.columns.flush_deferred()
        self.lifecycle.keeper.flush()
        core_epoch = self._core.epoch if self._core.is_attached else None
        self._load_notices.flush(now, core_epoch=core_epoch)
        if self._from_core.step != step_before:
            self._recent.add(now, monotonic())
        if self._may_relay:
            self._relay = self._relays.find()

    def _turn_in_relay(self, relay: StepRelay, now: float, arrived: Collection[object]) -> bool:
        """Relay the step that has arrived, and take in what clients have acknowledged. Returns
        whether that was all; if not, the rest is still to be done.
        """
        connection = relay.connection
        if connection.fd in arrived:
            connection.fill()
            messages = connection.messages
            if len(messages) != 1 or connection.num_unsent:
                return False
            found = relay.take(messages[0], now)
            if not found:
                return False
            messages.clear()
            self._from_core.step = relay.step
            if found != TAKEN:
                self._finish_relayed(found, relay.step)
                return False
            if len(arrived) == 1:
                return not self._load_notices.sessions
        if self._load_notices.sessions or self._prompts.is_among(arrived):
            return False
        return not self._front.is_among(arrived) or self._front.take_acks(now)

    def _finish_relayed(self, found: int, step: int) -> None:
        """Note what a relayed step has left to be sent."""
        if found & UNREPORTED:
            self._core.checked(step, is_awaited=True)
        if found & UNSENT:
            self.readers.mark_all_due()

    @property
    def _may_relay(self) -> bool:
        """True if a turn in which only a step arrives has nothing else to do."""
        if self._tracer is not None or self._has_left or not self._from_core.is_synced:
            return False
        waits = self.lifecycle.replaying or self.lifecycle.keeper.has_work
        return not (waits or self._from_clients.has_waiting)

    def _set_relay_aside(self) -> None:
        """Something else than a step is handled next, which may change what the relay relies on."""
        if self._relay is not None:
            self._core.checked(self._from_core.step, is_awaited=False)
            self._relay = None

    def begin_drain(self, end_at: float = inf) -> None:
        """Accept no new requests; running ones continue. end_at: when `end_drain` is called."""
        self._set_relay_aside()
        self._from_clients.is_draining = True
        self._load_notices.begin_drain(end_at)

    def core_ended(self, *, died_within: bool, suspects: tuple[bytes, ...] | None = None) -> None:
        """The core has ended. died_within: of its own doing. suspects: the streams that it was
        computing; None: unknown.
        """
        self._set_relay_aside()
        self._load_notices.core_ended(died_within=died_within, suspects=suspects)
        if died_within:
            self._embeddings.core_ended(suspects)

    def take_inspection(self) -> bool:
        """True if the statistics of the stack are asked for; once for all clients that wait."""
        return self._from_clients.inspections.take_due()

    def inspected(self, statistics: Statistics) -> None:
        """The statistics of the stack."""
        self._set_relay_aside()
        self._from_clients.inspections.answer(statistics)

    def end_drain(self) -> None:
        """Call it at the drain's deadline. Ends the running streams with an error, after releasing
        the text they hold back; with `may_return`, their clients are asked to resume them from the
        next stack.
        """
        self._set_relay_aside()
        if self._may_return:
            self.say_goodbye()
        else:
            self.lifecycle.end_all(_GOODBYE)

    @property
    def num_running(self) -> int:
        """Streams that are to end here and have not ended, and queries for embeddings."""
        return 0 if self._has_left else self.lifecycle.num_running + self._embeddings.num_running

    @property
    def has_unsent(self) -> bool:
        """True if anything is still to be sent to an attached client."""
        return self.readers.has_unsent

    def beat(self, now: float) -> None:
        """Timed work: heartbeats, timeouts, and forgetting streams whose grace time is over."""
        self._set_relay_aside()
        self._core.beat(now)
        self._front.beat(now)
        for answer in self._prompts.beat(now):
            if self.card is not None:
                self._from_clients.rendered(answer, self.card)
        self._from_clients.beat()
        self.lifecycle.keeper.flush()
        self.retention.now = now
        self.lifecycle.beat()

    def numbers(self) -> WorkerNumbers:
        """The counters and gauges as of now."""
        return replace(self.lifecycle.numbers(), recent=self._recent.spans(monotonic()))

    def say_goodbye(self) -> None:
        """Notify the clients that the stack stops, so that they need not wait for a timeout.

        With `may_return` they are no longer served, and clients that attach again are asked to
        wait.
        """
        self._set_relay_aside()
        self._front.refuse_all(_GOODBYE, is_leaving=self._may_return)
        self._has_left = self._may_return

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets. A successor gets all state from the core and the clients."""
        self._core.close()
        self._front.unregister(self._poller)
        self._sockets.close(linger_ms)
        if self._tracer is not None:
            self._tracer.close()
        if self._spans is not None:
            self._spans.close()

    def _receive(self, now: float) -> None:
        tracer, handle = self._tracer, self._from_core.handle
        if tracer is None:
            for message in self._core.receive(now):
                handle(message)
            return
        begin_ns = monotonic_ns()
        for message in self._core.receive(now):
            if isinstance(message, Step):
                tracer.add(SpanKind.DECODE, begin_ns, monotonic_ns(), message.step)
            handle(message)
            begin_ns = monotonic_ns()
