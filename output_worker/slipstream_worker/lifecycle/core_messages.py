"""Handles the core's messages: the attach, and each step's tokens (the hot path).

- After an attach a fresh worker takes over what the core replays; any other sends its positions.
- An exception while handling one stream ends that stream and no other.
- Tokens are checked for ends before text is built that no check needs (see `stream_columns`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, monotonic_ns

import numpy as np
from msgspec import structs

from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.columns import check_step, pack_u32, pack_u64, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.formats.table import stop_token_ids
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import (
    AdapterOutcome,
    AdmissionRefused,
    Admitted,
    AttachRefused,
    ComputedPromptLogprobs,
    CoreToWorker,
    FirstToken,
    Forget,
    Forgotten,
    Gauge,
    Kept,
    ModelCard,
    Pooled,
    Positions,
    Registered,
    ServedAdapters,
    Step,
    Suspects,
    SyncDone,
    UnknownKept,
    UnknownToCore,
    Welcome,
)
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.telemetry.trace import SpanKind, Tracer
from slipstream_worker.clients.core_queries import CoreQueries
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.load_notices import LoadNotices
from slipstream_worker.config import WorkerConfig
from slipstream_worker.core_link import CoreLink
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.lifecycle.lifecycle import StreamLifecycle
from slipstream_worker.lifecycle.stream_store import StreamStore
from slipstream_worker.output.answer_reading import UnknownFormat
from slipstream_worker.streams.registration import open_output, output_without_text
from slipstream_worker.streams.stream import Stage, WorkerStream
from slipstream_worker.streams.stream_trace import StreamTrace

logger = logging.getLogger(__name__)

_POSITIONS_PER_MESSAGE = 16384
_READMISSION_S = 2.0  # in which a worker has found a new core and told it of its streams


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of answers, which clients see on the model's card. format: its name in the table of
    formats; empty: unknown. eos_token_ids: by which the tokenizer ends answers, beside the model's
    own. why_no_images: as in TokenizerReady.
    """

    format: str = ""
    eos_token_ids: tuple[int, ...] = ()
    why_no_images: str = ""


class CoreMessages:
    """Handles the core's messages. `card` is set by the first Welcome."""

    def __init__(
        self,
        config: WorkerConfig,
        core: CoreLink,
        lifecycle: StreamLifecycle,
        store: StreamStore,
        counters: RequestCounters,
        detokenizers: DetokenizerFactory,
        load_notices: LoadNotices,
        core_queries: CoreQueries,
        *,
        answers: AnswerForm | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """answers: their form; None: of no format."""
        self._spans = counters.spans
        self._predecessor_ended_s = config.predecessor_ended_s
        # when the core before this one ended, and this one could be attached to; 0.0: unknown
        self._core_ended_s = self._core_serves_since_s = 0.0
        self._tracer = tracer
        self._core = core
        self._lifecycle = lifecycle
        self._streams = store.table
        self._columns = store.columns
        self._readers = store.readers
        self._retention = store.retention
        self._counters = counters
        self._detokenizers = detokenizers
        self._load_notices = load_notices
        self._core_queries = core_queries
        self._adapters = core_queries.adapters
        self._tokenizer = config.tokenizer
        self._answers = answers or AnswerForm()
        self.card: ModelCard | None = None
        self.is_synced = False
        self.step = 0  # number of the latest step received

    def handle(self, message: CoreToWorker) -> None:
        """Handle a message. Raises ProtocolError if a core may not send it."""
        if isinstance(message, Step):
            self._step(message)
            return
        if isinstance(message, Gauge):
            self._load_notices.measured(message)
            return
        self._core.acknowledge_now()
        lifecycle = self._lifecycle
        match message:
            case Admitted():
                stream = self._streams.get(message.stream_id)
                if stream is None:
                    self._core.enqueue(Forget((message.stream_id,)))
                elif stream.moves == message.moves:
                    lifecycle.admitted(stream, message)
                else:
                    self._replace(stream, message.moves)
            case Welcome():
                self._attached(message)
            case Registered():
                self._registered(message)
            case AdmissionRefused():
                stream = self._streams.get(message.stream_id)
                if stream is not None and stream.moves == message.moves:
                    lifecycle.refused(stream, message.fault)
                elif stream is not None:
                    self._replace(stream, message.moves)
            case UnknownToCore():
                self._readmit(message)
            case ComputedPromptLogprobs():
                self._prompt(message)
            case Forgotten():
                self._add_tombstones(message)
            case Kept():
                lifecycle.keeper.take(message)
            case UnknownKept():
                lifecycle.keeper.send_again(message.stream_ids)
            case Suspects():
                self._core_ended_s = message.predecessor_ended_s
                self._core_serves_since_s = message.serves_since_s
                lifecycle.suspect(message.incarnation, message.stream_ids)
            case FirstToken():
                stream = self._streams.get(message.stream_id)
                if stream is not None and stream.trace is not None:
                    stream.trace.note_first_token(message)
            case ServedAdapters():
                self._serve_adapters(message)
            case AdapterOutcome():
                self._adapters.answered(message)
            case Pooled():
                self._core_queries.embeddings.answered(message)
            case SyncDone():
                if self._spans is not None and not self.is_synced and self._predecessor_ended_s:
                    self._note_takeover(self._predecessor_ended_s)
                if not self.is_synced and self._have_both_died:
                    lifecycle.expect_lost_streams()
                self.is_synced = True
                self._core.is_fresh = False
            case AttachRefused():
                logger.error("the core refused the attach: %s", message.fault.message)
            case _:
                raise ProtocolError(f"a worker does not accept {type(message).__name__}")

    def _attached(self, welcome: Welcome) -> None:
        answers = self._answers
        stops = stop_token_ids(answers.format, dict(self._detokenizers.delimiter_ids))
        eos = (*welcome.model.eos_token_ids, *answers.eos_token_ids, *stops)
        before = self.card
        media = welcome.model.media
        if media is not None and not media.why_not and answers.why_no_images:
            media = structs.replace(media, why_not=answers.why_no_images)
        num_ids = welcome.model.vocab_size  # of which a tokenizer may have more than the model
        self.card = structs.replace(
            welcome.model,
            path=self._tokenizer,
            eos_token_ids=tuple(dict.fromkeys(each for each in eos if each < num_ids)),
            answer_format=answers.format,
            max_kept_bytes=self._lifecycle.keeper.max_answer_bytes,
            media=media,
        )
        if self._spans is not None:
            self._spans.model = self.card.name
        self._core.restart()
        self._core_queries.attached()
        if before is not None and before.adapters != self.card.adapters:
            self._adapters.tell(self.card.adapters)  # a core that was replaced may lack some
        self._streams.clear_core_rows()
        if not self.is_synced:
            # a fresh attach, perhaps not the first one: the core replays everything
            self._core.is_fresh = True
            self._lifecycle.clear()
            return
        self._lifecycle.keeper.attached()
        known = [stream for stream in self._streams.all() if stream.output is not None]
        for cut in range(0, max(len(known), 1), _POSITIONS_PER_MESSAGE):
            part = known[cut : cut + _POSITIONS_PER_MESSAGE]
            histories = [self._columns.token_ids(stream) for stream in part]
            self._core.enqueue(
                Positions(
                    tuple(stream.stream_id for stream in part),
                    pack_u32([len(history) for history in histories]),
                    pack_u64([history_digest(history) for history in histories]),
                    cut + _POSITIONS_PER_MESSAGE >= len(known),
                )
            )

    def _serve_adapters(self, served: ServedAdapters) -> None:
        """Requests find these from now on."""
        if self.card is not None:
            self.card = structs.replace(self.card, adapters=served.adapters)
        self._adapters.tell(served.adapters, served.number, served.records)

    def _registered(self, message: Registered) -> None:
        """A stream that an earlier worker registered."""
        admit = message.registration
        lifecycle = self._lifecycle
        if self._streams.get(admit.stream_id) is not None:
            return
        unknown: UnknownFormat | None = None
        try:
            output = open_output(admit, self._detokenizers)
        except UnknownFormat as error:
            unknown, output = error, output_without_text()
        except Exception:
            logger.exception("a stream cannot be restored", extra=of_requests(admit.spec.label))
            self._core.enqueue(Forget((admit.stream_id,)))
            return
        stream = WorkerStream(admit.stream_id, Stage.RUNNING, is_counted=message.is_over)
        if self._spans is not None and admit.begun.times is not None:
            stream.trace = StreamTrace(admit.begun.times, is_reported=message.is_over)
        lifecycle.restore(stream, admit, output, message.row)
        # its tokens follow, up to this end if an abort or an error ended it
        if unknown is not None:
            lifecycle.diverge(stream, f"the stream cannot be read any more: {unknown}")
        elif message.end is not None:
            lifecycle.replay(stream, message.end)

    def _readmit(self, message: UnknownToCore) -> None:
        """The core does not know these streams: register again those that still run."""
        for stream_id in message.stream_ids:
            stream = self._streams.get(stream_id)
            if stream is not None and stream.stage is not Stage.ENDED:
                self._core.enqueue(self._lifecycle.readmission(stream))
                if stream.trace is not None:
                    stream.trace.note_event(monotonic(), "core replaced", self._core_ended_s)

    def _replace(self, stream: WorkerStream, moves: int) -> None:
        """The core has answered for an older copy of a stream: it came back with more moves, and
        the messages that say so may have been lost with a link.
        """
        if moves < stream.moves and stream.stage is Stage.SUBMITTED:
            self._core.enqueue(self._lifecycle.readmission(stream))

    def _add_tombstones(self, message: Forgotten) -> None:
        num = len(message.stream_ids)
        moves = u32(message.moves, "moves", num).tolist() if message.moves else [0] * num
        for stream_id, its_moves in zip(message.stream_ids, moves, strict=True):
            self._retention.add_tombstone(stream_id, its_moves)

    @property
    def _have_both_died(self) -> bool:
        """True if the worker before this one died before it could tell this core of its streams, as
        it would have after the death of the core before.
        """
        if not (self._predecessor_ended_s and self._core_ended_s):
            return False
        return self._predecessor_ended_s < self._core_serves_since_s + _READMISSION_S

    def _note_takeover(self, since: float) -> None:
        """Note in traces that this worker has taken over the streams of one that ended at
        `since`.
        """
        now = monotonic()
        for stream in self._streams.all():
            if stream.trace is not None and stream.stage is not Stage.ENDED:
                stream.trace.note_event(now, "worker replaced", since)

    def _prompt(self, message: ComputedPromptLogprobs) -> None:
        """Part of a prompt's log-probabilities; the reader gets them once they are complete."""
        stream = self._streams.get(message.stream_id)
        if stream is None or stream.moves != message.moves:
            return
        row, prompts = stream.worker_row, self._columns.prompts
        if not prompts.add_columns(row, message.start, message.logprobs):
            return
        reader = stream.reader
        if reader is not None and reader.is_listening:
            self._readers.port(reader.client).enqueue_prompt_logprobs(stream, reader.handle)

    def _step(self, step: Step) -> None:
        """New tokens of many streams: the hot path."""
        tracer = self._tracer
        begin_ns = monotonic_ns() if tracer is not None else 0
        self.step = step.step
        if step.counts or step.starts or step.logprobs is not None:
            check_step(step)
        lifecycle, columns = self._lifecycle, self._columns
        worker_rows, has_all = self._streams.worker_rows_of(step.rows)
        num = None if step.counts else len(worker_rows)
        token_ids = u32(step.token_ids, "token_ids", num)
        counts = u32(step.counts).astype(np.int64) if step.counts else None
        if counts is not None:
            self._check_spans(worker_rows, counts, u32(step.starts))
        if step.logprobs is not None:  # skips row 0
            columns.logprobs.append_columns(worker_rows, counts, step.logprobs)
        if not has_all:
            is_known = worker_rows.array > 0
            num_tokens = len(token_ids)
            token_ids = token_ids[is_known if counts is None else np.repeat(is_known, counts)]
            worker_rows = RowSet(worker_rows.array[is_known])
            counts = counts if counts is None else counts[is_known]
            self._counters.num_overrun_tokens += num_tokens - len(token_ids)
        if lifecycle.replaying:
            worker_rows, counts, token_ids = self._take_replayed(worker_rows, counts, token_ids)
        if len(worker_rows):
            to_check = columns.append(worker_rows, counts, token_ids)
            if tracer is not None:
                tracer.add(SpanKind.STOP_CHECK, begin_ns, begin_ns := monotonic_ns(), step.step)
            if to_check:
                self._push(worker_rows, counts, token_ids, to_check)
            if tracer is not None:
                tracer.add(SpanKind.DETOKENISE, begin_ns, monotonic_ns(), step.step)
            self._readers.mark_due(worker_rows.array)
        # a stream with too many unacknowledged tokens is not scheduled: several are not left to owe
        self._core.checked(step.step, is_awaited=step.is_awaited or bool(step.counts))

    def _push_one(self, worker_row: int, token_ids: Sequence[int]) -> None:
        stream = self._columns.streams[worker_row]
        assert stream is not None
        try:
            self._lifecycle.push(stream, token_ids)
        except Exception as error:
            logger.exception("a stream failed", extra=of_requests(stream.label))
            self._lifecycle.fail(stream, f"{type(error).__name__} while processing its output")

    def _push(
        self,
        worker_rows: RowSet,
        counts: Int64s | None,
        token_ids: UInt32s,
        entries: Sequence[int],
    ) -> None:
        """Pass the tokens of these entries through their streams' outputs."""
        if counts is None:
            rows, ids = worker_rows.array.take(entries).tolist(), token_ids.take(entries).tolist()
            for worker_row, token_id in zip(rows, ids, strict=True):
                self._push_one(worker_row, (token_id,))
            return
        ends = np.cumsum(counts)
        for entry in entries:
            end = ends.item(entry)
            own = token_ids[end - counts.item(entry) : end].tolist()
            self._push_one(worker_rows.array.item(entry), own)

    def _take_replayed(
        self, worker_rows: RowSet, counts: Int64s | None, token_ids: UInt32s
    ) -> tuple[RowSet, Int64s | None, UInt32s]:
        """Process the tokens of streams with a replayed end; returns what belongs to the others."""
        streams = self._columns.streams
        if counts is None:
            counts = np.ones(len(worker_rows), np.int64)
        ends = np.cumsum(counts).tolist()
        is_other = np.ones(len(worker_rows), np.bool_)
        for i, worker_row in enumerate(worker_rows.tolist()):
            stream = streams[worker_row]
            if stream is not None and stream in self._lifecycle.replaying:
                is_other[i] = False
                begin = ends[i - 1] if i else 0
                self._lifecycle.push_replayed(stream, token_ids[begin : ends[i]])
        return (
            RowSet(worker_rows.array[is_other]),
            counts[is_other],
            token_ids[np.repeat(is_other, counts)],
        )

    def _check_spans(self, worker_rows: RowSet, counts: Int64s, starts: UInt32s) -> None:
        """Raise ProtocolError unless every span has tokens and begins where our copy ends."""
        have = self._columns.ends(worker_rows)
        wrong = np.flatnonzero(((worker_rows.array > 0) & (starts != have)) | (counts == 0))
        if len(wrong):
            at = int(wrong[0])
            raise ProtocolError(
                f"{counts[at]} tokens from position {starts[at]} on, expected {have[at]}"
            )
