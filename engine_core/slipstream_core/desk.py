"""The core's side of its workers: admits streams, ends them, replays them, forgets them.

Owns: what each message of a worker does to streams, histories and the scheduler. Does not know:
when steps run, what tokens mean.

Rules (STREAMS I-IV):
- Every message is a state: said twice, it changes nothing the second time.
- A worker that attaches fresh is sent every registration and history it owns; one that is not
  states its positions and is sent what lies behind them; what it does not state it has forgotten,
  and so does the core. Then comes SyncDone.
- A stream is refused before it has a row, or it runs. What was accepted once passes the bound on
  those that wait.
- A stream may be admitted again at any time, by a worker that has more of it or less: the same
  request goes on, another one under its id is a conflict.
- A stream with a grammar is taken when its grammar is compiled, which happens elsewhere: until then
  it is on hold, known to nobody. An attach forgets what is on hold, as the worker asks again.
- What the core before this one was computing when it died from within is told to every worker that
  attaches, until it has admitted those streams again; whoever was in that place twice without
  progress runs on probation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from slipstream_core.admission import Admission, is_same, new_request, wants_prompt
from slipstream_core.columns import NO_ROW
from slipstream_core.grammar.compiler import Compiled, GrammarCompiler
from slipstream_core.grammar.rows import GrammarRows
from slipstream_core.grammar.state import GrammarState
from slipstream_core.in_flight import InFlightNote
from slipstream_core.port import CoreAcceptor, Port, Receipt
from slipstream_core.scheduler import Scheduler
from slipstream_core.streams import Stream, StreamTable
from slipstream_ipc.accept import Session
from slipstream_ipc.columns import UInt32s, check_report, u32, u64
from slipstream_ipc.cursors import Cursors
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.link import WINDOW
from slipstream_ipc.log import PagedLog, history_digest
from slipstream_ipc.logprob_log import LogprobLog
from slipstream_ipc.messages import (
    Admit,
    Admitted,
    End,
    Fault,
    Forget,
    Hello,
    ModelCard,
    Positions,
    PromptScores,
    Refused,
    Registered,
    Report,
    Suspects,
    SyncDone,
    Unknown,
    Withdraw,
    WorkerToCore,
)
from slipstream_ipc.prompt_log import PromptLog
from slipstream_ipc.wide_logprobs import Candidates

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]

_MAY_OWE = WINDOW // 4  # messages of a worker


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
        admission: Admission,
        grammars: GrammarRows,
        compiler: GrammarCompiler,
        note: InFlightNote | None,
        incarnation: int,
        suspects: tuple[bytes, ...],
    ) -> None:
        """`suspects` are what the core before this one, the `incarnation`-th, was computing."""
        self._acceptor = acceptor
        self._card = card
        self._scheduler = scheduler
        self._tokens = tokens
        self._logprobs = logprobs
        self._admission = admission
        self._grammars = grammars
        self._compiler = compiler
        self._on_hold: dict[bytes, tuple[bytes, Admit]] = {}  # worker and registration, by id
        self._note = note
        self._num_in_flight = 0  # steps
        self._incarnation = incarnation
        self._suspects = suspects
        self._streams = StreamTable()
        self._cursors = Cursors()
        self._prompts = PromptLog()
        self._ports: dict[bytes, Port] = {}

    @property
    def num_streams(self) -> int:
        """Streams not yet forgotten."""
        return len(self._streams)

    def stream_id(self, row: int) -> bytes:
        """Of the stream that has this row."""
        stream = self._streams.at(row)
        assert stream is not None
        return stream.registration.stream_id

    @property
    def acked(self) -> Int64s:
        """Positions acknowledged by each row's worker, by row."""
        return self._cursors.acked

    @property
    def awaits_check(self) -> bool:
        """Whether a worker has yet to check what it was sent."""
        return any(port.awaits_check for port in self._ports.values())

    def receive(self, now: float) -> None:
        """Handle everything that has arrived. A bad message costs its sender the session alone.

        While a step is in flight, what it samples will tell the worker that its reports have come.
        """
        may_owe = _MAY_OWE if self._num_in_flight else 0
        for session, body in self._acceptor.receive(now, may_owe=may_owe):
            try:
                self._handle(session, body)
            except ProtocolError:
                logger.exception("worker %r broke the protocol; told to attach", session.identity)
                self._acceptor.reattach(session)
        for compiled in self._compiler.take():
            self._compiled(compiled)

    def publish(self, completed_step: int) -> bool:
        """Send every worker some of what is new; whether there is more that could be sent."""
        is_more = False
        for port in self._ports.values():
            port.completed_step = completed_step
            is_more |= port.publish()
        return is_more

    def scored(
        self, rows: Sequence[int], starts: Sequence[int], pieces: Sequence[Candidates]
    ) -> None:
        """Log-probabilities of these rows' prompts, from position `starts[i]` on."""
        for row, start, piece in zip(rows, starts, pieces, strict=True):
            stream = self._streams.at(row) if row != NO_ROW else None
            if stream is not None and self._prompts.add(row, start, piece):
                self._scheduler.has_prompt_logprobs(row)
                self._state_prompt(self._ports[stream.worker], stream)

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

    def launching(self, step: int, rows: Int64s) -> None:
        """These rows are in the step that is launched next."""
        self._num_in_flight += 1
        if self._note is not None:
            self._note.launch(step, self._streams.ids, rows)

    def collected(self, step: int) -> None:
        """The outcome of this step is taken in."""
        self._num_in_flight -= 1
        if self._note is not None:
            self._note.collect(step)

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
                self._release([body.stream_id], session.identity)
                stream = self._owned(session.identity, body.stream_id)
                if stream is not None:
                    self._end(stream, body.end)
            case Forget():
                self._release(body.stream_ids, session.identity)
                for stream_id in body.stream_ids:
                    stream = self._owned(session.identity, stream_id)
                    if stream is not None:
                        self._forget(stream)
            case Positions():
                self._resume(session.identity, body)
            case _:
                raise ProtocolError(f"{type(body).__name__} is not for a core")

    def _owned(self, worker: bytes, stream_id: bytes) -> Stream | None:
        """A stream of this worker; one of another's is none of its business."""
        stream = self._streams.get(stream_id)
        return stream if stream is not None and stream.worker == worker else None

    def _attach(self, session: Session[Receipt]) -> None:
        port = self._ports.get(session.identity)
        if port is None:
            port = Port(self._acceptor, self._tokens, self._logprobs, self._cursors)
            self._ports[session.identity] = port
        self._release([*self._on_hold], session.identity)
        owned = self._streams.of_worker(session.identity)
        port.attach(session, [stream.row for stream in owned])
        self._acceptor.welcome(session, self._card)
        # of those that are here again, the strike is in their registration
        suspects = tuple(id_ for id_ in self._suspects if self._streams.get(id_) is None)
        if suspects:
            port.state(Suspects(self._incarnation, suspects))
        if not session.fresh:
            return  # it states its positions next
        for stream in owned:
            port.state(Registered(stream.row, stream.registration, stream.end))
            self._state_prompt(port, stream)
            # outputs that it was admitted with are in its registration
            num_outputs = len(stream.registration.output_ids) // 4
            self._send_from(port, stream, stream.prompt_len + num_outputs)
        port.state(SyncDone())

    def _admit(self, worker: bytes, admit: Admit) -> None:
        port = self._ports[worker]
        if port.stated is not None:
            port.stated.add(admit.stream_id)
        known = self._streams.get(admit.stream_id)
        if known is not None:
            if known.worker != worker or not is_same(known.registration, admit):
                fault = Fault("conflict", "this stream id is taken by another request")
                port.state(Refused(admit.stream_id, fault))
                return
            if not self._is_ahead_of(known, admit):
                self._admit_again(port, known, admit)
                return
            self._forget(known)
        held = self._on_hold.get(admit.stream_id)
        if held is not None and (held[0] != worker or not is_same(held[1], admit)):
            fault = Fault("conflict", "this stream id is taken by another request")
            port.state(Refused(admit.stream_id, fault))
            return
        num_waiting = self._scheduler.num_waiting + len(self._on_hold)
        fault_or_none = self._admission.objection(admit, num_waiting)
        if fault_or_none is not None:
            self._on_hold.pop(admit.stream_id, None)
            port.state(Refused(admit.stream_id, fault_or_none))
        elif admit.params.structured_outputs is None:
            self._take(port, worker, admit)
        else:
            self._on_hold[admit.stream_id] = worker, admit
            self._compiler.submit(admit)

    def _compiled(self, compiled: Compiled) -> None:
        """A grammar is compiled, or cannot be."""
        worker, admit = self._on_hold.get(compiled.admit.stream_id, (b"", None))
        if admit is not compiled.admit:
            return  # let go meanwhile, or said again
        del self._on_hold[admit.stream_id]
        if compiled.fault is not None:
            self._ports[worker].state(Refused(admit.stream_id, compiled.fault))
        else:
            self._take(self._ports[worker], worker, admit, compiled.state)

    def _release(self, stream_ids: Iterable[bytes], worker: bytes) -> None:
        """Nothing is asked for any more of what a worker has on hold of these."""
        for stream_id in stream_ids if self._on_hold else ():
            if stream_id in self._on_hold and self._on_hold[stream_id][0] == worker:
                del self._on_hold[stream_id]

    def _take(
        self, port: Port, worker: bytes, admit: Admit, grammar: GrammarState | None = None
    ) -> None:
        """A stream that nothing is to be said against gets a row, and waits to be computed."""
        prompt, outputs = u32(admit.prompt_ids), u32(admit.output_ids)
        stream = self._streams.add(admit, worker)
        self._tokens.open(stream.row)
        self._tokens.extend(stream.row, prompt)
        self._tokens.extend(stream.row, outputs)
        position = len(prompt) + len(outputs)
        if admit.params.logprobs is not None:
            self._logprobs.open(stream.row, admit.params.logprobs, position)
        if wants_prompt(admit):
            assert admit.params.prompt_logprobs is not None
            self._prompts.open(stream.row, len(prompt), admit.params.prompt_logprobs)
        if grammar is not None:
            self._grammars.add(stream.row, grammar, stream.prompt_len)
        port.state(Admitted(admit.stream_id, stream.row))
        self._send_from(port, stream, position)
        self._scheduler.add(new_request(stream))

    def _is_ahead_of(self, stream: Stream, admit: Admit) -> bool:
        """Whether a worker has all that we have of a running stream, and more."""
        num_here = self._tokens.length(stream.row) - stream.prompt_len
        outputs = u32(admit.output_ids, "output_ids")
        if stream.is_over or len(outputs) <= num_here:
            return False
        return np.array_equal(self._outputs(stream, num_here), outputs[:num_here])

    def _admit_again(self, port: Port, stream: Stream, admit: Admit) -> None:
        """Go on with a stream that is here, from where its worker says it is."""
        outputs = u32(admit.output_ids, "output_ids")
        if self._cursors.is_open(stream.row):  # an admission said twice
            port.state(Admitted(admit.stream_id, stream.row))
        else:
            self._go_on(port, stream, len(outputs), history_digest(outputs))

    def _report(self, worker: bytes, report: Report) -> None:
        check_report(report)
        self._ports[worker].checked_step = report.step
        if not report.rows:
            return
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
        stated = set() if port.stated is None else port.stated
        stated.update(positions.stream_ids)
        for stream_id, length, digest in zip(positions.stream_ids, lengths, digests, strict=True):
            stream = self._owned(worker, stream_id)
            if stream is None:
                unknown.append(stream_id)
                continue
            self._go_on(port, stream, length, digest)
        if unknown:
            port.state(Unknown(tuple(unknown)))
        if positions.last:
            for stream in self._streams.of_worker(worker):
                if stream.registration.stream_id not in stated:
                    self._forget(stream)  # the word of it was lost with the link
            port.stated = None
            port.state(SyncDone())

    def _go_on(self, port: Port, stream: Stream, num_outputs: int, digest: int) -> None:
        """Send what lies behind the outputs that a worker has, if they are ours."""
        num_here = self._tokens.length(stream.row) - stream.prompt_len
        admit = stream.registration
        # log-probabilities of what it was admitted with are not here to be sent
        lacks = admit.params.logprobs is not None and num_outputs < len(admit.output_ids) // 4
        is_longer = num_outputs > num_here
        if is_longer or lacks or digest != history_digest(self._outputs(stream, num_outputs)):
            fault = Fault("diverged", "the core's history of this stream is another one")
            self._end(stream, End("error", num_outputs, fault=fault))
            port.state(Refused(admit.stream_id, fault))  # however it ended before: nothing is sent
            return
        stream_id = stream.registration.stream_id
        if stream.end is not None and stream.end.fault is not None:
            port.state(Refused(stream_id, stream.end.fault))
            return
        port.state(Admitted(stream_id, stream.row))
        self._state_prompt(port, stream)
        self._send_from(port, stream, stream.prompt_len + num_outputs)

    def _outputs(self, stream: Stream, num: int) -> UInt32s:
        return self._tokens.read(stream.row, stream.prompt_len, stream.prompt_len + num)

    def _send_from(self, port: Port, stream: Stream, position: int) -> None:
        port.open(stream.row, position, logprobs=stream.registration.params.logprobs is not None)

    def _state_prompt(self, port: Port, stream: Stream) -> None:
        """Send what was computed of a prompt, if all of it was; no token leaves before it."""
        for start, columns in self._prompts.pieces(stream.row):
            port.state(PromptScores(stream.registration.stream_id, start, columns))

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
            self._grammars.drop(stream.row)
            self._ports[stream.worker].close(stream.row)

    def _forget(self, stream: Stream) -> None:
        self._stop(stream)
        self._tokens.drop(stream.row)
        self._logprobs.drop(stream.row)
        self._prompts.drop(stream.row)
        self._streams.remove(stream)
