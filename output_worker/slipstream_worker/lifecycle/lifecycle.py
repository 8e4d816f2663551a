"""The stages of a stream: submitted, accepted or rejected, running, ended, forgotten.

- Every submitted stream is answered exactly once, and every accepted one ends exactly once.
- A rejected stream is not kept. An ended one is kept for the grace time after its reader has
  acknowledged its end (or after the end, if it has no reader), then forgotten here and in the core;
  earlier if ended streams together take too much memory.
- When a client is gone for good, its streams are aborted and forgotten. So is a stream without a
  listening reader for the grace time. A stream in the background goes on to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from time import monotonic

import numpy as np
from msgspec import structs

from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.history.prediction import FollowedPrediction
from slipstream_ipc.messages import (
    Admit,
    Admitted,
    CancelledState,
    End,
    Fault,
    FinishReason,
    Forget,
    KeptAnswer,
    Withdraw,
)
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.telemetry.statistics import WorkerGauges, WorkerNumbers
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.core_link import CoreLink
from slipstream_worker.lifecycle.answer_keeper import AnswerKeeper
from slipstream_worker.lifecycle.media_store import MediaStore
from slipstream_worker.lifecycle.stream_store import StreamStore
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.retention import ABORTED, request_bytes
from slipstream_worker.streams.slow_path import push_slow
from slipstream_worker.streams.stream import Stage, WorkerStream
from slipstream_worker.tokenizer.queue import RenderQueue

logger = logging.getLogger(__name__)

_RETURN_S = 5.0  # in which the clients of a dead worker have submitted again what is lost
MAX_STRIKES = 3  # crashes of cores after which a stream fails; the last one ran it alone


class StreamLifecycle:
    """Moves all streams of one worker through their stages."""

    def __init__(
        self,
        core: CoreLink,
        store: StreamStore,
        render_queue: RenderQueue[WorkerStream],
        counters: RequestCounters,
        keeper: AnswerKeeper,
        *,
        min_interval: int = 1,
    ) -> None:
        """`min_interval`: lower limit for the streams' intervals, in tokens per delta."""
        self._spans = counters.spans
        self._core = core
        self._streams = store.table
        self._columns = store.columns
        self._readers = store.readers
        self._retention = store.retention
        self._render_queue = render_queue
        self._counters = counters
        self.keeper = keeper
        self.media = MediaStore()
        self._min_interval = min_interval
        self._last_incarnation = -1  # incarnation of the core that sent the suspects counted last
        self._num_ended = 0  # ended streams that are kept
        self._lost_until = 0.0  # lost streams may come back until then
        self.replaying: set[WorkerStream] = set()  # short of their replayed end

    # ---- a stream's stages ---------------------------------------------------------------

    def register(self, stream: WorkerStream, admit: Admit, output: StreamOutput) -> None:
        """Register a stream whose prompt is tokenised, or that an earlier worker has registered."""
        if admit.media:
            media = self.media.hold(stream.stream_id, admit.spec.tenant, admit.media)
            admit = structs.replace(admit, media=media)
        stream.registration = admit
        stream.output = output
        stream.submit = stream.asked = None
        stream.fingerprint = admit.derived.fingerprint
        stream.interval = max(admit.spec.params.stream_interval, self._min_interval)
        stream.strikes = admit.begun.strikes
        stream.struck_at = len(admit.begun.output_ids) // 4
        self._columns.open(stream, admit)
        self._readers.opened(stream)

    def restore(
        self, stream: WorkerStream, admit: Admit, output: StreamOutput, core_row: int
    ) -> None:
        """Take over a stream of an earlier worker; its reader has yet to attach."""
        self._streams.add(stream)
        self.register(stream, admit, output)
        self.keeper.expect_answer(stream)
        self._streams.assign_core_row(stream, core_row)
        self._retention.expire_after_grace(stream)

    def submit(self, stream: WorkerStream) -> None:
        """Submit a stream to the core, unless the tokens it came with have ended it already."""
        assert stream.registration is not None
        assert stream.output is not None
        stream.stage = Stage.SUBMITTED
        if stream.output.end is not None:
            self._readers.accept(stream)
            self._ended(stream)
            return
        self._core.enqueue(stream.registration)
        if stream.is_given_up:
            self.abort(stream)

    def admitted(self, stream: WorkerStream, message: Admitted) -> None:
        """The core runs a stream in this row, or continues it after an attach; or it has begun, and
        found a part of the prompt in its cache.
        """
        self._streams.assign_core_row(stream, message.row)
        _note_cached(stream, message.num_cached_tokens)
        _note_left_out(stream, message.left_out)
        if stream.stage is Stage.ENDED:
            self._streams.ignore_tokens(stream)
            self._report_end(stream)  # it ended while the core was away
        elif stream.stage is Stage.SUBMITTED:
            stream.stage = Stage.RUNNING
            assert stream.registration is not None
            if not stream.registration.begun.was_accepted:
                self._counters.accepted(
                    len(stream.registration.prompt_ids) // 4, num_answers=stream.num_answers
                )
                stream.num_answers = 0
            self._readers.accept(stream)

    def readmission(self, stream: WorkerStream) -> Admit:
        """The registration with which a core that has lost a stream can continue it."""
        assert stream.registration is not None
        begun, num_tokens = stream.registration.begun, self._columns.num_tokens(stream)
        num_cached = begun.num_cached_tokens
        if num_cached is None and num_tokens > len(begun.output_ids) // 4:
            num_cached = 0  # anything else would have been said ahead of the first token
        begun = structs.replace(
            begun,
            num_cached_tokens=num_cached,
            output_ids=pack_u32(self._columns.token_ids(stream)),
            logprobs=self._columns.logprobs.read(
                stream.worker_row, stream.logprobs_from, num_tokens
            ),
            prompt_logprobs=self._columns.prompts.columns(stream.worker_row),
            was_accepted=stream.stage is not Stage.SUBMITTED or begun.was_accepted,
            strikes=stream.strikes,
        )
        return structs.replace(stream.registration, begun=begun)

    def suspect(self, incarnation: int, stream_ids: Sequence[bytes]) -> None:
        """Count a crash against the streams its core was running. incarnation: the next core's."""
        if incarnation == self._last_incarnation:
            return  # repeated after an attach
        self._last_incarnation = incarnation
        for stream_id in stream_ids:
            stream = self._streams.get(stream_id)
            if stream is None or stream.output is None or stream.output.end is not None:
                continue
            num_tokens = self._columns.num_tokens(stream)
            has_progressed = num_tokens > stream.struck_at
            stream.strikes = 1 if has_progressed else stream.strikes + 1
            stream.struck_at = num_tokens
            if stream.strikes >= MAX_STRIKES:
                times = f"{stream.strikes} times in a row"
                self.fail(stream, f"this request crashed the engine {times}, the last time alone")

    def refused(self, stream: WorkerStream, fault: Fault) -> None:
        """The core refused a stream, or had to end it."""
        if stream.stage is Stage.SUBMITTED:
            self.reject(stream, fault)
        elif stream.output is not None and stream.output.end is None:
            self._finish(stream, "error", fault)
            self._ended(stream)

    def reject(self, stream: WorkerStream, fault: Fault) -> None:
        """Reject a stream and drop it."""
        self.count_rejection(stream.label, fault)
        if self._spans is not None:
            self._spans.rejected(stream, fault)
        self._readers.reject(stream, fault)
        self._remove(stream)

    def replaced(self, stream: WorkerStream, client: bytes, handle: int, *, moves: int) -> None:
        """The stream comes back from another replica, or is to begin again: drop the copy that is
        here. client, handle: its new reader. moves: of the new copy.
        """
        self._readers.supersede(stream, client, handle)
        if moves > stream.moves:
            self._retention.add_tombstone(stream.stream_id, stream.moves)
        self.moved_away(stream)

    def moved_away(self, stream: WorkerStream) -> None:
        """The stream goes on at another replica: drop the copy that is here without a trace, since
        a reader that looks for the stream would take it for the whole.
        """
        if stream.stage is not Stage.RENDERING:
            self._core.enqueue(Forget((stream.stream_id,)))
        self._remove(stream)

    def count_rejection(self, label: str, fault: Fault) -> None:
        """Count and log a rejection. The fault's text is for the client: it may quote the
        prompt.
        """
        self._counters.rejected(fault.code)
        level = logging.WARNING if fault.code == "engine" else logging.DEBUG
        logger.log(level, "rejected: %s", fault.code, extra=of_requests(label))

    def push(self, stream: WorkerStream, token_ids: Sequence[int]) -> None:
        """Process new tokens of a running stream, already in its history; they may end it."""
        assert stream.output is not None
        if stream.output.end is None and push_slow(self._columns, stream, token_ids):
            self._ended(stream)
            self._report_end(stream)

    def replay(self, stream: WorkerStream, end: End) -> None:
        """A stream of an earlier worker ended by `end`; its tokens follow and do not imply it."""
        stream.pending_end = end
        self.replaying.add(stream)
        self.push_replayed(stream, np.zeros(0, np.uint32))

    def push_replayed(self, stream: WorkerStream, token_ids: UInt32s) -> None:
        """Append replayed tokens of a stream, up to its replayed end."""
        output, end = stream.output, stream.pending_end
        assert output is not None
        assert end is not None
        token_ids = token_ids[: end.num_tokens - output.num_tokens]
        if output.end is None and len(token_ids):
            worker_row = RowSet(np.array([stream.worker_row]))
            self._columns.append(worker_row, np.array([len(token_ids)]), token_ids)
            if output.push(token_ids.tolist()):
                self._ended(stream)
        if output.end is None and output.num_tokens >= end.num_tokens:
            self._finish(stream, end.reason, end.fault)
            self._ended(stream)

    def abort(self, stream: WorkerStream) -> None:
        """End a stream at its reader's request, whatever its stage."""
        if stream.stage is Stage.RENDERING:
            if stream.submit is not None and stream.submit.was_accepted:
                stream.is_given_up = True  # by another replica or worker: it ends, with its tokens
                return
            self._retention.aborted(stream)
            self.reject(stream, ABORTED)
        elif stream.output is not None and stream.output.end is None:
            if stream.stage is Stage.SUBMITTED:
                self._readers.accept(stream)
            self._end(stream, "abort")

    def cancel(self, stream_id: bytes, scope: bytes = b"") -> CancelledState:
        """Abort the stream of this id, whichever client reads it; returns the state it was in."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return "ended" if self._retention.has_been(stream_id, scope) else "unknown"
        if not stream.is_open_to(scope):
            return "unknown"
        if stream.stage is Stage.ENDED:
            return "ended"
        self.abort(stream)
        return "running"

    def expect_lost_streams(self) -> None:
        """Worker and core have died: their streams come back from their clients."""
        self._lost_until = self._retention.now + _RETURN_S

    def is_undecided(self, stream_id: bytes) -> bool:
        """True if an answer about this stream would soon be outdated: the core has yet to send what
        is kept, its client to submit it again, or its end waits for its prompt.
        """
        if not self.keeper.is_complete:
            return True
        stream = self._streams.get(stream_id)
        if stream is None:
            return self._retention.now < self._lost_until and not self.keeper.has(stream_id)
        owes_end = stream.is_given_up and stream.stage is Stage.RENDERING
        return owes_end and stream.keep is not None

    def recall(self, stream_id: bytes, scope: bytes, *, forget: bool) -> KeptAnswer | None:
        """The answer kept under this id and scope. forget: leave nothing of it, neither the answer
        nor the stream, which is aborted if it still runs.
        """
        stream = self._streams.get(stream_id)
        answer = self.keeper.recall(stream_id, scope, stream)
        if not forget:
            return answer
        if answer is not None:
            self.keeper.forget(stream_id)
        elif stream is None or not self._is_left_of(stream, scope):
            stream = None
        self._retention.deleted(stream_id, scope)
        if stream is not None:
            self._delete(stream)
        return answer

    def _is_left_of(self, stream: WorkerStream, scope: bytes) -> bool:
        """True if this is all that is left here of an answer of this scope."""
        is_kept = stream.keep is not None or self.keeper.has(stream.stream_id)
        return not is_kept and stream.scope == scope

    def _delete(self, stream: WorkerStream) -> None:
        """End a stream, and leave nothing but its tombstone in worker and core, once its reader, if
        it has one, has acknowledged its end.
        """
        self.keeper.cancel(stream)
        stream.is_deleted = True
        self.abort(stream)
        if stream.stage is not Stage.ENDED:
            return  # it was rejected, or ends as soon as it is registered
        if stream.expires_at != inf:  # else its reader has not acknowledged its end
            self._retention.expire_at(stream, self._retention.now)
        # at once, lest another worker be sent it
        moves = pack_u32([stream.moves])
        self._core.enqueue(Forget((stream.stream_id,), has_been=True, moves=moves))

    def fail(self, stream: WorkerStream, why: str) -> None:
        """End a stream whose handling raised, without using its detokeniser again."""
        fault = Fault("engine", why)
        if stream.stage in (Stage.RENDERING, Stage.SUBMITTED):
            self.reject(stream, fault)
        elif stream.output is not None and stream.output.end is None:
            self._columns.make_slow(stream, self._columns.num_tokens(stream))
            stream.output.end_with_error(fault)
            self._ended(stream)
            self._report_end(stream)

    def diverge(self, stream: WorkerStream, why: str) -> None:
        """End a stream of an earlier worker that this one would read otherwise."""
        logger.warning("diverged: %s", why, extra=of_requests(stream.label))
        self._finish(stream, "error", Fault("diverged", why))
        self._ended(stream)
        if not stream.is_counted:  # it has not ended before
            self._report_end(stream)

    def remove_client(self, client: bytes) -> None:
        """A client is gone for good: end the streams that only it could read. Idempotent."""
        for stream in self._readers.remove(client):
            if not stream.needs_reader:
                continue
            if stream.stage is Stage.RENDERING:
                self._remove(stream)
                continue
            if stream.stage is not Stage.ENDED:
                self.abort(stream)
            self._retention.expire_at(stream, self._retention.now)

    def end_all(self, fault: Fault) -> None:
        """End all running streams with a fault, after releasing the text they hold back."""
        for stream in self._streams.all():
            if stream.stage in (Stage.RENDERING, Stage.SUBMITTED):
                self.reject(stream, fault)
            elif stream.output is not None and stream.output.end is None:
                self._end(stream, "error", fault)

    def _end(self, stream: WorkerStream, reason: FinishReason, fault: Fault | None = None) -> None:
        self._finish(stream, reason, fault)
        self._ended(stream)
        self._report_end(stream)

    def _finish(
        self, stream: WorkerStream, reason: FinishReason, fault: Fault | None = None
    ) -> None:
        """End a stream for a reason its tokens do not imply, even if its detokeniser raises."""
        assert stream.output is not None
        self._columns.make_slow(stream, self._columns.num_tokens(stream))
        try:
            stream.output.finish(reason, fault)
        except Exception as error:
            logger.exception("a stream failed at its end", extra=of_requests(stream.label))
            why = f"{type(error).__name__} while ending the stream"
            stream.output.end_with_error(Fault("engine", why))

    def _ended(self, stream: WorkerStream) -> None:
        stream.stage = Stage.ENDED
        if stream.trace is not None:
            stream.trace.ended_at = monotonic()
        self._num_ended += 1
        self.replaying.discard(stream)
        self._streams.ignore_tokens(stream)
        registration, output, worker_row = stream.registration, stream.output, stream.worker_row
        assert registration is not None
        assert output is not None
        if registration.media:  # nothing is computed of them any more
            registration = stream.registration = structs.replace(registration, media=())
            self.media.release(stream.stream_id)
        output.repetition = None  # its memory is not counted
        if output.end is not None and registration.begun.num_cached_tokens:
            num_cached = registration.begun.num_cached_tokens
            output.end = structs.replace(output.end, num_cached_tokens=num_cached)
        columns = self._columns
        if output.end is not None and registration.derived.prediction_ids:
            followed = FollowedPrediction(u32(registration.derived.prediction_ids))
            followed.follow(columns.token_ids(stream)[: output.end.num_tokens])
            output.end = structs.replace(
                output.end,
                num_accepted_prediction_tokens=followed.num_accepted,
                num_rejected_prediction_tokens=followed.num_rejected,
            )
        token_bytes = 16 + 8 * columns.widths.item(worker_row)
        num_tokens = columns.lengths.item(worker_row)
        if not stream.is_counted:
            assert output.end is not None
            self._counters.finished(output.end.reason, max(0, num_tokens - output.end.num_tokens))
        token_bytes += 0 if registration.derived.answer is None else 16
        held_bytes = request_bytes(registration) + token_bytes * num_tokens
        held_bytes += columns.prompts.num_bytes(worker_row)
        self._retention.ended(stream, held_bytes)
        self.keeper.ended(stream)
        self._readers.ended(stream)

    def _report_end(self, stream: WorkerStream) -> None:
        """Report to the core an end that was decided here."""
        assert stream.output is not None
        end = stream.output.end
        assert end is not None
        if end.reason in ("stop", "length", "repetition"):
            if stream.core_row is not None:
                self._core.ended(stream.core_row, end.num_tokens)
        else:
            self._core.enqueue(Withdraw(stream.stream_id, end))

    # ---- time ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return len(self._streams) - self._num_ended

    def numbers(self) -> WorkerNumbers:
        """The counters and gauges as of now."""
        return self._counters.numbers(
            WorkerGauges(
                num_streams=self.num_running,
                num_kept_streams=self._num_ended,
                num_clients=self._readers.num_clients,
                num_kept_answers=self.keeper.num_answers,
                kept_answer_bytes=self.keeper.num_bytes,
                num_pending_spans=0 if self._spans is None else self._spans.num_pending,
            )
        )

    def beat(self) -> None:
        """Dismiss clients that stayed away, and forget streams whose time has come."""
        for client in self._readers.take_gone():
            self.remove_client(client)
        gone = self._retention.take_due()
        for stream in gone:
            if stream.stage is not Stage.ENDED:
                self.abort(stream)
            self._remove(stream)
        if gone:
            ids = tuple([stream.stream_id for stream in gone])
            moves = pack_u32([stream.moves for stream in gone])
            self._core.enqueue(Forget(ids, has_been=True, moves=moves))

    def clear(self) -> None:
        """Forget everything: the core replays it."""
        for stream in self._streams.all():
            self._columns.close(stream)
        self._streams.clear()
        self.replaying.clear()
        self._readers.clear()
        self._retention.clear()
        self.keeper.clear()
        self.media.clear()
        self._num_ended = 0

    def _remove(self, stream: WorkerStream) -> None:
        if self._spans is not None:
            self._spans.removed(stream)
        self._render_queue.withdraw(stream)
        self.replaying.discard(stream)
        self.keeper.removed(stream)
        self._readers.forget(stream)
        self._retention.removed(stream)
        self.media.release(stream.stream_id)
        self._columns.close(stream)
        if stream.stage is Stage.ENDED and self._streams.get(stream.stream_id) is stream:
            self._num_ended -= 1
        self._streams.remove(stream)


def _note_cached(stream: WorkerStream, num_cached: int) -> None:
    """Note what the first computation of a stream's prompt found in the cache; 0 is not known."""
    admit = stream.registration
    if num_cached and admit is not None and admit.begun.num_cached_tokens is None:
        begun = structs.replace(admit.begun, num_cached_tokens=num_cached)
        stream.registration = structs.replace(admit, begun=begun)


def _note_left_out(stream: WorkerStream, left_out: tuple[str, ...]) -> None:
    admit = stream.registration
    if left_out and admit is not None and admit.derived.left_out != left_out:
        derived = structs.replace(admit.derived, left_out=left_out)
        stream.registration = structs.replace(admit, derived=derived)
