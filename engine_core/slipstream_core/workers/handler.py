"""Handles the messages of all workers: attach, admit, report, withdraw, forget, positions.

- Every message is a state: receiving it twice changes nothing.
- A worker that attaches fresh is sent every registration and history that it owns. Any other states
  its positions and is sent what lies behind them; the core forgets the streams it does not state.
  SyncDone follows in both cases.
- A stream is either refused before it has a row, or it runs. A stream that was accepted once may
  exceed the bound on waiting requests.
- A stream may be admitted again at any time, by a worker with more of its history or less. The same
  request goes on; a different request under its id is a conflict.
- A stream whose grammar is not compiled, or that finds no room for its log-probabilities, is
  pending until then. An attach drops pending streams, as the worker asks again.
- A stream whose answer is to be kept is not forgotten before the answer is here, or was given up:
  until then its `keep` stays in its registration.
- The streams that the previous core was computing when it died from within are sent to every worker
  that attaches, until they are admitted again. A stream that was in such a step twice without
  progress runs alone, as a suspect.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import Any

import numpy as np
from msgspec.structs import replace

from slipstream_core.scheduler.scheduling import Scheduling
from slipstream_core.workers.adapter_changes import AdapterChanges, DoneChange, with_number
from slipstream_core.workers.admission import Admission, WaitingLoad, has_other_adapter, is_same
from slipstream_core.workers.crash_note_writer import Succession
from slipstream_core.workers.kept_answers import KeptAnswersByWorker
from slipstream_core.workers.pending import PendingAdmissions
from slipstream_core.workers.sender import CoreAcceptor, Receipt, WorkerSender
from slipstream_core.workers.stream_table import CoreStream
from slipstream_core.workers.streams import StreamManager
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.columns import check_report, pack_u32, u32, u64
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import (
    WANTS_LOAD,
    AdapterChange,
    AdmissionRefused,
    Admit,
    AreAdaptersKnown,
    DropKept,
    End,
    Fault,
    Forget,
    Forgotten,
    Gauge,
    Hello,
    Keep,
    KeptIds,
    ModelCard,
    Positions,
    Registered,
    Report,
    ServedAdapters,
    Suspects,
    SyncDone,
    UnknownKept,
    UnknownToCore,
    Withdraw,
    WorkerToCore,
)
from slipstream_ipc.transport.link import MAY_OWE
from slipstream_ipc.transport.router import Session
from slipstream_ipc.transport.shared_prompts import registrations_of

logger = logging.getLogger(__name__)


_MAX_FORGOTTEN = 2**14  # ids that outlive their worker, about 1 MB
_FORGOTTEN_PER_MESSAGE = 4096
_TELLS_WITHIN_S = 1.0  # how long the answer to a change waits for clients that do not say a word


class WorkerHandler:
    """Handles all workers of one core."""

    def __init__(
        self,
        acceptor: CoreAcceptor,
        card: ModelCard,
        scheduler: Scheduling[Any],
        manager: StreamManager,
        *,
        admission: Admission,
        pending: PendingAdmissions,
        changes: AdapterChanges,
        held: KeptAnswersByWorker,
        succession: Succession,
    ) -> None:
        self._acceptor = acceptor
        self._card = card
        self._scheduler = scheduler
        self._manager = manager
        self._store = manager.store
        self._streams, self._cursors = manager.store.table, manager.store.cursors
        self._senders = manager.senders  # by identity of the worker
        self._admission = admission
        self._pending = pending
        self._changes = changes
        self._adapters = changes.adapters
        self._num_changes = 0
        self._unaware = set[bytes]()  # workers that have not said that the last change is known
        self._untold: deque[tuple[float, DoneChange]] = deque()  # answered by then at the latest
        self._held = held
        self._succession = succession
        self._note = succession.note
        self._num_in_flight = 0  # steps in flight
        self._now = 0.0  # monotonic, of the last `receive`
        self._serves_since_s = 0.0  # the same of the first one
        self._forgotten: deque[tuple[bytes, int]] = deque(maxlen=_MAX_FORGOTTEN)

    @property
    def num_pending(self) -> int:
        """Registrations that wait for their images, their grammar, or for room for their
        log-probabilities.
        """
        return len(self._pending)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that those have to compute."""
        return self._pending.num_tokens

    @property
    def gauge_readers(self) -> list[Session[Receipt]]:
        """The sessions of workers that want a Gauge."""
        return [each for each in self._acceptor.sessions if each.wants & WANTS_LOAD]

    def send_gauge(self, session: Session[Receipt], gauge: Gauge) -> None:
        """Send the core's load to a worker, unless its connection is full."""
        self._acceptor.send_unnumbered(session, gauge)

    @property
    def num_streams(self) -> int:
        """Streams not yet forgotten."""
        return len(self._streams)

    def stream_id(self, row: int) -> bytes:
        """The id of the stream on this row."""
        stream = self._streams.at(row)
        assert stream is not None
        return stream.registration.stream_id

    @property
    def acked(self) -> Int64s:
        """Positions that each row's worker has acknowledged, by row."""
        return self._cursors.acked

    @property
    def num_unchecked(self) -> int:
        """Steps up to the last one with tokens that may end a stream, of which a worker has yet to
        report its check.
        """
        num = 0
        for sender in self._senders.values():
            num = max(num, sender.num_unchecked)
        return num

    def receive(self, now: float, arrived: Container[object] | None = None) -> None:
        """Handle everything that has arrived; a malformed message ends only its sender's session.

        While a step is in flight, receipts may be delayed: the tokens of that step carry them.
        arrived: what a poller has reported; None asks the sockets.
        """
        self._now = now
        self._serves_since_s = self._serves_since_s or now
        if arrived is None or self._acceptor.is_among(arrived):
            may_owe = MAY_OWE if self._num_in_flight else 0
            if not self._acceptor.take_acks(now, may_owe=may_owe):
                self._receive(now, may_owe)
        elif not self._num_in_flight:
            self._acceptor.acknowledge()
        if self._changes.has_jobs:
            self._finish_changes(now)
        if self._untold:
            self._answer_changes(now)
        if not self._pending.has_any:
            return
        for ready in self._pending.ready():
            if ready.fault is not None:
                self._senders[ready.worker].enqueue(
                    AdmissionRefused(ready.admit.stream_id, ready.fault, ready.admit.begun.moves)
                )
            else:
                self._manager.add_stream(ready.worker, ready.admit, ready.grammar, now, ready.media)

    def _finish_changes(self, now: float) -> None:
        """Tell all workers of the adapters that have changed, then those that asked."""
        for done in self._changes.take_done(now):
            if done.has_changed:
                self._num_changes += 1
                self._card = replace(self._card, adapters=self._adapters.served)
                for worker, sender in self._senders.items():
                    if sender.is_attached:
                        self._unaware.add(worker)
                        sender.enqueue(self._served_adapters())
            self._untold.append((now + _TELLS_WITHIN_S, done))

    def _served_adapters(self) -> ServedAdapters:
        records = self._changes.records.all
        return ServedAdapters(self._card.adapters, self._num_changes, records)

    def _answer_changes(self, now: float) -> None:
        """Answer changes once all workers and their clients know of them, or some do not say so."""
        away = [it for it in self._unaware if not self._senders[it].is_attached]
        self._unaware.difference_update(away)
        while self._untold and (not self._unaware or now >= self._untold[0][0]):
            _, done = self._untold.popleft()
            for worker, number in done.askers.items():
                self._senders[worker].enqueue(with_number(done.outcome, number))

    def _receive(self, now: float, may_owe: int) -> None:
        for session, body in self._acceptor.receive(now, may_owe=may_owe):
            try:
                if isinstance(body, Report):
                    self._report(session.identity, body)
                else:
                    self._handle(session, body)
            except ProtocolError:
                logger.exception(
                    "worker %r broke the protocol; asked to attach again", session.identity
                )
                self._acceptor.reattach(session)

    def publish(self, completed_step: int) -> bool:
        """Send every worker some of its news; return True if more could be sent now."""
        is_more = False
        for sender in self._senders.values():
            sender.completed_step = completed_step
            is_more |= sender.publish()
        return is_more

    def take_acknowledgements(self) -> bool:
        """Take in what workers have acknowledged since the last `publish`; return True if there is
        anything.
        """
        is_any = False
        for sender in self._senders.values():
            is_any |= sender.take_acknowledgements()
        return is_any

    def launching(self, step: int, rows: Int64s) -> None:
        """Note that these rows are in the step that is launched next."""
        self._num_in_flight += 1
        self._adapters.launched_step = step
        if self._note is not None:
            self._note.launch(step, self._streams.ids, rows)

    def collected(self, step: int) -> None:
        """The outcome of this step is known."""
        self._num_in_flight -= 1
        self._adapters.collected_step = step
        if self._note is not None:
            self._note.collect(step)

    def beat(self, now: float) -> None:
        """Ping silent workers."""
        self._acceptor.beat(now)
        self._changes.beat(now)
        for session in self._acceptor.take_lost():
            logger.warning("worker %r is gone; its streams are kept", session.identity)

    def _handle(self, session: Session[Receipt], body: WorkerToCore) -> None:
        match body:
            case Hello():
                self._attach(session)
            case Admit():
                for admit in registrations_of(body):
                    self._admit(session.identity, admit)
            case Withdraw():
                self._pending.drop_of(session.identity, [body.stream_id])
                stream = self._owned(session.identity, body.stream_id)
                if stream is not None:
                    self._manager.end(stream, body.end)
            case Forget():
                self._pending.drop_of(session.identity, body.stream_ids)
                for stream_id in body.stream_ids:
                    stream = self._owned(session.identity, stream_id)
                    if stream is not None and body.has_been:
                        self._forget(stream)
                    elif stream is not None:
                        self._manager.forget(stream)
                if body.has_been:
                    self._forgotten.extend(_with_moves(body))
            case KeptIds():
                self._compare_kept(session.identity, body)
            case Positions():
                self._resume(session.identity, body)
            case Keep():
                for entry in body.entries:
                    self._held.put(session.identity, entry)
                self._settle(session.identity, [entry.stream_id for entry in body.entries])
            case DropKept():
                self._held.drop(session.identity, body.stream_ids)
                self._settle(session.identity, body.stream_ids)
            case AreAdaptersKnown():
                if body.number == self._num_changes:
                    self._unaware.discard(session.identity)
            case AdapterChange():
                outcome = self._changes.ask(session.identity, body)
                if outcome is not None:
                    self._senders[session.identity].enqueue(outcome)
            case _:
                raise ProtocolError(f"a core does not accept {type(body).__name__}")

    def _owned(self, worker: bytes, stream_id: bytes) -> CoreStream | None:
        """The worker's stream, or None if it is unknown or another worker's."""
        stream = self._streams.get(stream_id)
        return stream if stream is not None and stream.worker == worker else None

    def _forget(self, stream: CoreStream) -> None:
        """Forget a stream that its worker no longer keeps, once its answer is here."""
        if stream.registration.spec.keep is None:
            self._manager.forget(stream)
        else:
            self._manager.stop(stream)
            stream.is_left = True

    def _settle(self, worker: bytes, stream_ids: Iterable[bytes]) -> None:
        """The answers of these streams are here, or are not to be kept."""
        for stream_id in stream_ids:
            stream = self._owned(worker, stream_id)
            if stream is None or stream.registration.spec.keep is None:
                continue
            admit = stream.registration
            stream.registration = replace(admit, spec=replace(admit.spec, keep=None))
            if stream.is_left:
                self._manager.forget(stream)

    def _compare_kept(self, worker: bytes, stated: KeptIds) -> None:
        """Drop the answers that a worker does not keep, and ask for those that are not here."""
        held, kept = self._held.of_worker(worker), set(stated.stream_ids)
        unstated = [stream_id for stream_id in held if stream_id not in kept]
        sender = self._senders[worker]
        if stated.is_complete:
            self._held.drop(worker, unstated)
        else:
            sender.replay_kept([held[stream_id] for stream_id in unstated])
        kept.update(stated.owed)
        owned = [stream.registration for stream in self._streams.of_worker(worker)]
        self._settle(worker, [it.stream_id for it in owned if it.stream_id not in kept])
        unknown = tuple([id_ for id_ in stated.stream_ids if id_ not in held])
        if unknown:
            sender.enqueue(UnknownKept(unknown))

    def _attach(self, session: Session[Receipt]) -> None:
        sender = self._senders.get(session.identity)
        if sender is None:
            sender = WorkerSender(
                self._acceptor,
                self._store,
            )
            self._senders[session.identity] = sender
        self._pending.drop_of(session.identity)
        self._unaware.discard(session.identity)  # its Welcome has them
        owned = self._streams.of_worker(session.identity)
        sender.attach(session, [stream.row for stream in owned])
        self._acceptor.welcome(session, self._card)
        if self._changes.records.all:
            sender.enqueue(self._served_adapters())
        # streams that were admitted again have the strike in their registration
        before = self._succession
        suspects = tuple(id_ for id_ in before.suspects if self._streams.get(id_) is None)
        if suspects or before.predecessor_ended_s:
            times = before.predecessor_ended_s, self._serves_since_s
            sender.enqueue(Suspects(before.incarnation, suspects, *times))
        if not session.fresh:
            return  # the worker states its positions next
        for stream in owned:
            stream.is_left = False
            registered = Registered(stream.row, stream.registration, stream.end, stream.is_over)
            sender.enqueue(registered)
            self._manager.send_prompt_logprobs(stream)
            self._manager.send_times(stream)
            # the outputs of the registration need not be sent
            num_outputs = len(stream.registration.begun.output_ids) // 4
            self._manager.send_from(stream, stream.prompt_len + num_outputs)
        forgotten = tuple(self._forgotten)
        for begin in range(0, len(forgotten), _FORGOTTEN_PER_MESSAGE):
            part = forgotten[begin : begin + _FORGOTTEN_PER_MESSAGE]
            ids = tuple([stream_id for stream_id, _ in part])
            sender.enqueue(Forgotten(ids, pack_u32([moves for _, moves in part])))
        sender.enqueue(SyncDone())
        sender.replay_kept(list(self._held.of_worker(session.identity).values()))

    def _admit(self, worker: bytes, admit: Admit) -> None:
        sender = self._senders[worker]
        if sender.stated_ids is not None:
            sender.stated_ids.add(admit.stream_id)
        known, moves = self._streams.get(admit.stream_id), admit.begun.moves
        if known is not None and known.worker == worker and known.registration.begun.moves < moves:
            self._manager.forget(known)  # its Forget was lost with the link
            known = None
        if known is not None and known.worker == worker and has_other_adapter(known, admit):
            self._manager.forget(known)  # the worker has made it anew, of what is served now
            known = None
        if known is not None:
            if known.worker != worker or not is_same(known.registration, admit):
                fault = Fault("conflict", "this stream id is used by another request")
                sender.enqueue(AdmissionRefused(admit.stream_id, fault, moves))
                return
            if not self._is_ahead_of(known, admit):
                self._admit_again(sender, known, admit)
                return
            self._manager.forget(known)
        pending = self._pending.get(admit.stream_id)
        if pending is not None and (pending[0] != worker or not is_same(pending[1], admit)):
            fault = Fault("conflict", "this stream id is used by another request")
            sender.enqueue(AdmissionRefused(admit.stream_id, fault, moves))
            return
        fault_or_none = self._admission.objection(admit, self._waiting(admit.spec.tenant))
        if fault_or_none is not None:
            self._pending.drop(admit.stream_id)
            sender.enqueue(AdmissionRefused(admit.stream_id, fault_or_none, moves))
        elif self._pending.is_ready(admit) and self._pending.reserve(admit):
            self._manager.add_stream(worker, admit, None, self._now)
        else:
            self._pending.put(worker, admit)

    def _waiting(self, tenant: bytes) -> WaitingLoad:
        scheduler, pending = self._scheduler, self._pending
        num, num_tokens = scheduler.waiting_of(tenant)
        num_held, held_tokens = pending.of_tenant(tenant)
        return WaitingLoad(
            scheduler.num_waiting + len(pending),
            scheduler.num_waiting_tokens + pending.num_tokens,
            num + num_held,
            num_tokens + held_tokens,
        )

    def _is_ahead_of(self, stream: CoreStream, admit: Admit) -> bool:
        """True if a registration has all of a running stream's outputs, and more."""
        num_here = self._manager.num_outputs(stream)
        outputs = u32(admit.begun.output_ids, "output_ids")
        if stream.is_over or len(outputs) <= num_here:
            return False
        return np.array_equal(self._manager.outputs(stream, num_here), outputs[:num_here])

    def _admit_again(self, sender: WorkerSender, stream: CoreStream, admit: Admit) -> None:
        """Go on with a known stream from the position in its worker's registration."""
        outputs = u32(admit.begun.output_ids, "output_ids")
        if self._cursors.is_open(stream.row):  # a repeated admission
            self._manager.send_admitted(stream)
        else:
            self._resume_stream(sender, stream, len(outputs), history_digest(outputs))

    def _report(self, worker: bytes, report: Report) -> None:
        has_ends = bool(report.rows or report.num_tokens)  # most have none
        if has_ends:
            check_report(report)
        self._senders[worker].checked(report.step)
        if not has_ends:
            return
        for row in u32(report.rows).tolist():
            stream = self._streams.at(row)
            if stream is None or stream.worker != worker:
                raise ProtocolError(f"row {row} does not belong to this worker")
            self._manager.stop(stream)

    def _resume(self, worker: bytes, positions: Positions) -> None:
        """Go on from the positions that a worker states."""
        sender = self._senders[worker]
        num = len(positions.stream_ids)
        lengths = u32(positions.lengths, "lengths", num).tolist()
        digests = u64(positions.digests, "digests", num).tolist()
        unknown = []
        stated_ids = set() if sender.stated_ids is None else sender.stated_ids
        stated_ids.update(positions.stream_ids)
        for stream_id, length, digest in zip(positions.stream_ids, lengths, digests, strict=True):
            stream = self._owned(worker, stream_id)
            if stream is None:
                unknown.append(stream_id)
                continue
            self._resume_stream(sender, stream, length, digest)
        if unknown:
            sender.enqueue(UnknownToCore(tuple(unknown)))
        if positions.last:
            for stream in self._streams.of_worker(worker):
                if stream.registration.stream_id not in stated_ids:
                    if stream.is_over:
                        admit = stream.registration
                        self._forgotten.append((admit.stream_id, admit.begun.moves))
                    self._forget(stream)  # its Forget was lost with the link
            sender.stated_ids = None
            sender.enqueue(SyncDone())

    def _resume_stream(
        self, sender: WorkerSender, stream: CoreStream, num_outputs: int, digest: int
    ) -> None:
        """Send what follows the worker's `num_outputs` outputs, if `digest` matches the history."""
        num_here = self._manager.num_outputs(stream)
        admit = stream.registration
        # the core has no log-probabilities of outputs that came with the registration
        lacks = (
            admit.spec.params.logprobs is not None
            and num_outputs < len(admit.begun.output_ids) // 4
        )
        is_longer = num_outputs > num_here
        if (
            is_longer
            or lacks
            or digest != history_digest(self._manager.outputs(stream, num_outputs))
        ):
            fault = Fault("diverged", "the core has another history of this stream")
            self._manager.end(stream, End("error", num_outputs, fault=fault))
            # even where the stream ended before: none of its history can be sent
            sender.enqueue(AdmissionRefused(admit.stream_id, fault, admit.begun.moves))
            return
        self._manager.send_admitted(stream)
        self._manager.send_prompt_logprobs(stream)
        self._manager.send_times(stream)
        self._manager.send_from(stream, stream.prompt_len + num_outputs)
        if stream.end is not None and stream.end.fault is not None:
            self._manager.send_fault(stream, stream.end.fault)


def _with_moves(forget: Forget) -> Iterator[tuple[bytes, int]]:
    """The streams of the message, each with its moves."""
    num = len(forget.stream_ids)
    moves = u32(forget.moves, "moves", num).tolist() if forget.moves else [0] * num
    return zip(forget.stream_ids, moves, strict=True)
