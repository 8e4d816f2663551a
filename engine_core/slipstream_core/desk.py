"""The core's side of its workers: admits streams, ends them, replays them, forgets them.

Owns: what each message of a worker does to streams, histories and the scheduler. Does not know:
when steps run, what tokens mean.

Rules (STREAMS I-IV):
- Every message is a state: said twice, it changes nothing the second time.
- A worker that attaches fresh is sent every registration and history it owns; one that is not
  states its positions and is sent what lies behind them; what it does not state it has forgotten,
  and so does the core. Then comes SyncDone.
- A stream is refused before it has a row, or it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from slipstream_core.columns import NewRequest
from slipstream_core.logprob_log import LogprobLog
from slipstream_core.port import CoreAcceptor, Port, Receipt
from slipstream_core.scheduler import Scheduler
from slipstream_core.streams import Stream, StreamTable
from slipstream_ipc.accept import Session
from slipstream_ipc.columns import UInt32s, check_report, u32, u64
from slipstream_ipc.cursors import Cursors
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.log import PagedLog, history_digest
from slipstream_ipc.messages import (
    Admit,
    Admitted,
    End,
    Fault,
    Forget,
    Hello,
    ModelCard,
    Positions,
    Refused,
    Registered,
    Report,
    SyncDone,
    Unknown,
    Withdraw,
    WorkerToCore,
)

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]


class Desk:
    """All workers of one core. Implements the engine's `Readers`."""

    def __init__(
        self,
        acceptor: CoreAcceptor,
        card: ModelCard,
        scheduler: Scheduler,
        tokens: PagedLog,
        logprobs: LogprobLog,
        *,
        max_waiting: int,
        fits: Callable[[int], bool],
    ) -> None:
        """`fits(n)`: whether the cache could ever hold a request of n tokens."""
        self._acceptor = acceptor
        self._card = card
        self._scheduler = scheduler
        self._tokens = tokens
        self._logprobs = logprobs
        self._max_waiting = max_waiting
        self._fits = fits
        self._streams = StreamTable()
        self._cursors = Cursors()
        self._ports: dict[bytes, Port] = {}

    @property
    def num_streams(self) -> int:
        """Streams not yet forgotten."""
        return len(self._streams)

    @property
    def acked(self) -> Int64s:
        """Positions acknowledged by each row's worker, by row."""
        return self._cursors.acked

    @property
    def awaits_check(self) -> bool:
        """Whether a worker has yet to check what it was sent."""
        return any(port.awaits_check for port in self._ports.values())

    def receive(self, now: float) -> None:
        """Handle everything that has arrived. A bad message costs its sender the session alone."""
        for session, body in self._acceptor.receive(now):
            try:
                self._handle(session, body)
            except ProtocolError:
                logger.exception("worker %r broke the protocol; told to attach", session.identity)
                self._acceptor.reattach(session)

    def publish(self, completed_step: int) -> None:
        """Send every worker what is new and what credit allows."""
        for port in self._ports.values():
            port.completed_step = completed_step
            port.publish()

    def mark(self, rows: Int64s) -> None:
        """These rows have new tokens."""
        if len(self._ports) == 1:
            next(iter(self._ports.values())).mark(rows)
            return
        for row in rows.tolist():
            stream = self._streams.at(row)
            if stream is not None:
                self._ports[stream.worker].mark(np.array([row]))

    def end_by_fault(self, rows: Sequence[int], why: str) -> None:
        """The streams of these rows end with an error of ours."""
        for row in rows:
            stream = self._streams.at(row)
            if stream is None or stream.is_over:
                continue
            fault = Fault("engine", why)
            num_tokens = self._tokens.length(row) - stream.prompt_len
            self._end(stream, End("error", num_tokens, fault=fault))
            self._ports[stream.worker].state(Refused(stream.registration.stream_id, fault))

    def beat(self, now: float) -> None:
        """Ping silent workers."""
        self._acceptor.beat(now)
        for session in self._acceptor.take_lost():
            logger.warning("worker %r is gone; its streams wait for it", session.identity)

    def _handle(self, session: Session[Receipt], body: WorkerToCore) -> None:
        match body:
            case Hello():
                self._attach(session)
            case Admit():
                self._admit(session.identity, body)
            case Report():
                self._report(session.identity, body)
            case Withdraw():
                stream = self._streams.get(body.stream_id)
                if stream is not None:
                    self._end(stream, body.end)
            case Forget():
                for stream_id in body.stream_ids:
                    stream = self._streams.get(stream_id)
                    if stream is not None:
                        self._forget(stream)
            case Positions():
                self._resume(session.identity, body)
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for a core")

    def _attach(self, session: Session[Receipt]) -> None:
        port = self._ports.get(session.identity)
        if port is None:
            port = Port(self._acceptor, self._tokens, self._logprobs, self._cursors)
            self._ports[session.identity] = port
        owned = self._streams.of_worker(session.identity)
        port.attach(session, [stream.row for stream in owned])
        self._acceptor.welcome(session, self._card)
        if not session.fresh:
            return  # it states its positions next
        for stream in owned:
            port.state(Registered(stream.row, stream.registration, stream.end))
            # outputs that it was admitted with are in its registration
            num_outputs = len(stream.registration.output_ids) // 4
            self._send_from(port, stream, stream.prompt_len + num_outputs)
        port.state(SyncDone())

    def _admit(self, worker: bytes, admit: Admit) -> None:
        port = self._ports[worker]
        known = self._streams.get(admit.stream_id)
        if known is not None:
            if known.registration != admit or known.worker != worker:
                fault = Fault("conflict", "this stream id is taken by another request")
                port.state(Refused(admit.stream_id, fault))
            else:
                port.state(Admitted(admit.stream_id, known.row))
            return
        prompt = u32(admit.prompt_ids, "prompt_ids")
        outputs = u32(admit.output_ids, "output_ids")
        fault_or_none = self._objection(admit, prompt, outputs)
        if fault_or_none is not None:
            port.state(Refused(admit.stream_id, fault_or_none))
            return
        stream = self._streams.add(admit, worker)
        self._tokens.open(stream.row)
        self._tokens.extend(stream.row, prompt)
        self._tokens.extend(stream.row, outputs)
        position = len(prompt) + len(outputs)
        if admit.params.logprobs is not None:
            self._logprobs.open(stream.row, admit.params.logprobs, position)
        port.state(Admitted(admit.stream_id, stream.row))
        self._send_from(port, stream, position)
        self._scheduler.add(_scheduling(stream))

    def _objection(self, admit: Admit, prompt: UInt32s, outputs: UInt32s) -> Fault | None:
        """Why a stream cannot be taken; the worker has checked its fields already."""
        total, num_outputs = len(prompt) + admit.max_tokens, len(outputs)
        largest = int(max(prompt.max(initial=0), outputs.max(initial=0)))
        if largest >= self._card.vocab_size:
            why = f"token id {largest}, allowed: [0, {self._card.vocab_size})"
            return Fault("bad_request", why, "prompt_token_ids")
        if not len(prompt) or total > self._card.max_model_len:
            why = f"{total} tokens, allowed: a prompt, and {self._card.max_model_len} in all"
            return Fault("bad_request", why, "prompt")
        if num_outputs >= admit.max_tokens:
            why = f"{num_outputs} tokens are there already, allowed: fewer than {admit.max_tokens}"
            return Fault("bad_request", why, "output_ids")
        if not self._fits(total):
            why = f"prompt and max_tokens: {total} tokens would never fit into the cache"
            return Fault("bad_request", why, "max_tokens")
        if not num_outputs and self._scheduler.num_waiting >= self._max_waiting:
            return Fault("overloaded", f"{self._max_waiting} requests wait already")
        return None

    def _report(self, worker: bytes, report: Report) -> None:
        check_report(report)
        self._ports[worker].checked_step = report.step
        for row in u32(report.rows).tolist():
            stream = self._streams.at(row)
            if stream is None or stream.worker != worker:
                raise ProtocolError(f"row {row} is none of this worker's")
            self._stop(stream)

    def _resume(self, worker: bytes, positions: Positions) -> None:
        """Go on from where a worker says it is."""
        port = self._ports[worker]
        num = len(positions.stream_ids)
        lengths = u32(positions.lengths, "lengths", num).tolist()
        digests = u64(positions.digests, "digests", num).tolist()
        unknown = []
        port.stated.update(positions.stream_ids)
        for stream_id, length, digest in zip(positions.stream_ids, lengths, digests, strict=True):
            stream = self._streams.get(stream_id)
            if stream is None:
                unknown.append(stream_id)
                continue
            start = stream.prompt_len
            has = start + length <= self._tokens.length(stream.row)
            if not has or digest != history_digest(
                self._tokens.read(stream.row, start, start + length)
            ):
                fault = Fault("diverged", "the core's history of this stream is another one")
                self._end(stream, End("error", length, fault=fault))
            if stream.end is not None and stream.end.fault is not None:
                port.state(Refused(stream_id, stream.end.fault))
                continue
            port.state(Admitted(stream_id, stream.row))
            self._send_from(port, stream, start + length)
        if unknown:
            port.state(Unknown(tuple(unknown)))
        if positions.last:
            for stream in self._streams.of_worker(worker):
                if stream.registration.stream_id not in port.stated:
                    self._forget(stream)  # the word of it was lost with the link
            port.stated.clear()
            port.state(SyncDone())

    def _send_from(self, port: Port, stream: Stream, position: int) -> None:
        port.open(stream.row, position, logprobs=stream.registration.params.logprobs is not None)

    def _end(self, stream: Stream, end: End) -> None:
        """End a stream for a reason that its tokens do not imply."""
        if stream.end is None:
            stream.end = end
        self._stop(stream)

    def _stop(self, stream: Stream) -> None:
        """Compute and send nothing more of a stream."""
        if not stream.is_over:
            stream.is_over = True
            self._scheduler.remove(stream.row)
            self._ports[stream.worker].close(stream.row)

    def _forget(self, stream: Stream) -> None:
        self._stop(stream)
        self._tokens.drop(stream.row)
        self._logprobs.drop(stream.row)
        self._streams.remove(stream)


def _scheduling(stream: Stream) -> NewRequest:
    """What the scheduler needs of a registration."""
    admit = stream.registration
    params = admit.params
    return NewRequest(
        row=stream.row,
        prompt_len=stream.prompt_len,
        max_tokens=admit.max_tokens,
        priority=admit.priority,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=admit.seed,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        min_tokens=params.min_tokens,
        stop_token_ids=admit.stop_token_ids,
        worker_ends=bool(admit.stop_token_ids or params.stop),
    )
