"""What each message of the core does.

Owns: the attach to the core (what is stated, what is replayed), and the hot path: a step's tokens
to their streams. Does not know: clients, how a stream's text is made.

Rules:
- After an attach a fresh worker takes what the core replays; any other states its positions.
- An exception while handling one stream ends that stream and nothing else.
- What streams end by is found before any text is made that nothing hangs on (see `stream_columns`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic_ns

import numpy as np
import numpy.typing as npt
from msgspec import structs

from slipstream_ipc.columns import UInt32s, check_step, pack_u32, pack_u64, u32, unpack_short
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import (
    Admitted,
    CoreToWorker,
    Forget,
    Forgotten,
    ModelCard,
    Positions,
    PromptScores,
    Refusal,
    Refused,
    Registered,
    Step,
    Suspects,
    SyncDone,
    Unknown,
    Welcome,
)
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.telemetry.trace import Span, Tracer
from slipstream_worker.clients.deltas_scalar import FEW
from slipstream_worker.clients.latency import Counters
from slipstream_worker.clients.readers import Readers
from slipstream_worker.core_link import CoreHop
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.lifecycle.lifecycle import Lives
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.retention import Keeping
from slipstream_worker.streams.stream import Stage, Stream, StreamTable
from slipstream_worker.streams.stream_columns import StreamColumns

logger = logging.getLogger(__name__)

_POSITIONS_A_MESSAGE = 16384

Int64s = npt.NDArray[np.int64]


class FromCore:
    """Handles the core's messages. `card` is set by the first Welcome."""

    def __init__(
        self,
        core: CoreHop,
        lives: Lives,
        streams: StreamTable,
        columns: StreamColumns,
        readers: Readers,
        keeping: Keeping,
        counters: Counters,
        detokenizers: DetokenizerFactory,
        *,
        tokenizer: str,
        tracer: Tracer | None = None,
    ) -> None:
        """`tokenizer`: where clients find it."""
        self._tracer = tracer
        self._core = core
        self._lives = lives
        self._streams = streams
        self._columns = columns
        self._readers = readers
        self._keeping = keeping
        self._counters = counters
        self._detokenizers = detokenizers
        self._tokenizer = tokenizer
        self.card: ModelCard | None = None
        self.is_synced = False
        self.step = 0  # the last one whose tokens came

    def handle(self, message: CoreToWorker) -> None:
        """Do what a message says; ProtocolError where it says what no core may say."""
        lives = self._lives
        match message:
            case Step():
                self._step(message)
            case Admitted():
                stream = self._streams.get(message.stream_id)
                if stream is None:
                    self._core.state(Forget((message.stream_id,)))
                else:
                    lives.admitted(stream, message.row)
            case Welcome():
                self._attached(message)
            case Registered():
                self._registered(message)
            case Refused():
                stream = self._streams.get(message.stream_id)
                if stream is not None:
                    lives.refused(stream, message.fault)
            case Unknown():
                self._readmit(message)
            case PromptScores():
                self._prompt(message)
            case Forgotten():
                self._keeping.bury(message.stream_ids)
            case Suspects():
                lives.suspect(message.incarnation, message.stream_ids)
            case SyncDone():
                self.is_synced = True
                self._core.is_fresh = False
            case Refusal():
                logger.error("the core refuses us: %s", message.fault.message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker")

    def _attached(self, welcome: Welcome) -> None:
        self.card = structs.replace(welcome.model, path=self._tokenizer)
        self._core.restart()
        self._streams.displace_all()
        if not self.is_synced:
            # we attached fresh, perhaps not for the first time: the core replays everything
            self._core.is_fresh = True
            self._lives.clear()
            return
        known = [stream for stream in self._streams.all() if stream.output is not None]
        for cut in range(0, max(len(known), 1), _POSITIONS_A_MESSAGE):
            part = known[cut : cut + _POSITIONS_A_MESSAGE]
            histories = [self._columns.token_ids(stream) for stream in part]
            self._core.state(
                Positions(
                    tuple(stream.stream_id for stream in part),
                    pack_u32([len(history) for history in histories]),
                    pack_u64([history_digest(history) for history in histories]),
                    cut + _POSITIONS_A_MESSAGE >= len(known),
                )
            )

    def _registered(self, message: Registered) -> None:
        """A stream of the life before this one."""
        admit = message.registration
        lives = self._lives
        if self._streams.get(admit.stream_id) is not None:
            return
        try:
            output = open_output(admit, self._detokenizers)
        except Exception:
            logger.exception("a stream cannot be taken up again")
            self._core.state(Forget((admit.stream_id,)))
            return
        stream = Stream(admit.stream_id, Stage.RUNNING, is_counted=message.is_over)
        lives.take_up(stream, admit, output, message.row)
        # its tokens are yet to come; where an abort or an error ended it, they come before that end
        if message.end is not None:
            lives.replay(stream, message.end)

    def _readmit(self, message: Unknown) -> None:
        """The core knows nothing of these: give it all we have of those that go on."""
        for stream_id in message.stream_ids:
            stream = self._streams.get(stream_id)
            if stream is not None and stream.stage is not Stage.ENDED:
                self._core.state(self._lives.readmission(stream))

    def _prompt(self, message: PromptScores) -> None:
        """Some of the log-probabilities of a prompt; its reader gets them when they are whole."""
        stream = self._streams.get(message.stream_id)
        if stream is None or not self._columns.prompts.add_columns(
            stream.line, message.start, message.logprobs
        ):
            return
        reader = stream.reader
        if reader is not None and reader.is_listening:
            self._readers.port(reader.client).state_prompt(stream, reader.handle)

    def _step(self, step: Step) -> None:
        """New tokens of many streams: the hot path."""
        tracer = self._tracer
        begin_ns = monotonic_ns() if tracer is not None else 0
        self.step = step.step
        if self._is_for_few(step):
            self._step_few(step, begin_ns)
            self._core.checked(step.step)
            return
        if step.counts or step.starts or step.logprobs is not None:
            check_step(step)
        lives, columns = self._lives, self._columns
        rows = u32(step.rows, "rows")
        token_ids = u32(step.token_ids, "token_ids", None if step.counts else len(rows))
        lines = self._streams.lines_of(rows)
        counts = u32(step.counts).astype(np.int64) if step.counts else None
        if counts is not None:
            self._check_spans(lines, counts, u32(step.starts))
        if step.logprobs is not None:  # passes over nobody's line
            columns.logprobs.append_columns(lines, counts, step.logprobs)
        if np.count_nonzero(lines.array) != len(lines):
            is_known = lines.array > 0
            num_tokens = len(token_ids)
            token_ids = token_ids[is_known if counts is None else np.repeat(is_known, counts)]
            lines = RowSet(lines.array[is_known])
            counts = counts if counts is None else counts[is_known]
            self._counters.num_overrun_tokens += num_tokens - len(token_ids)
        if lives.replaying:
            lines, counts, token_ids = self._take_replayed(lines, counts, token_ids)
        if len(lines):
            needs_care = columns.append(lines, counts, token_ids)
            if tracer is not None:
                tracer.add(Span.STOP_CHECK, begin_ns, begin_ns := monotonic_ns(), step.step)
            self._push(lines, counts, token_ids, np.flatnonzero(needs_care))
            if tracer is not None:
                tracer.add(Span.DETOKENISE, begin_ns, monotonic_ns(), step.step)
            self._readers.has_news(lines.array)
        self._core.checked(step.step)

    def _is_for_few(self, step: Step) -> bool:
        """Whether it is one token of each of a few streams, well-formed, and nothing besides."""
        num_bytes = len(step.rows)
        return (
            num_bytes <= 4 * FEW
            and num_bytes == len(step.token_ids)
            and not num_bytes % 4
            and not step.counts
            and not step.starts
            and step.logprobs is None
            and not self._lives.replaying
        )

    def _step_few(self, step: Step, begin_ns: int) -> None:
        """The same the scalar way, see `deltas_scalar`."""
        columns, tracer = self._columns, self._tracer
        lines = self._streams.few_lines_of(unpack_short(step.rows))
        ids = unpack_short(step.token_ids)
        if not all(lines):
            known = [(line, token_id) for line, token_id in zip(lines, ids, strict=True) if line]
            self._counters.num_overrun_tokens += len(ids) - len(known)
            lines, ids = [line for line, _ in known], tuple([token_id for _, token_id in known])
        care = columns.append_few(lines, ids)
        if tracer is not None:
            tracer.add(Span.STOP_CHECK, begin_ns, begin_ns := monotonic_ns(), step.step)
        for at in care:
            self._push_one(lines[at], ids[at : at + 1])
        if tracer is not None:
            tracer.add(Span.DETOKENISE, begin_ns, monotonic_ns(), step.step)
        self._readers.has_news(lines)

    def _push_one(self, line: int, token_ids: Sequence[int]) -> None:
        stream = self._columns.streams[line]
        assert stream is not None
        try:
            self._lives.push(stream, token_ids)
        except Exception as error:
            logger.exception("a stream failed")
            self._lives.fail(stream, f"{type(error).__name__} while its output was handled")

    def _push(
        self, lines: RowSet, counts: Int64s | None, token_ids: UInt32s, entries: Int64s
    ) -> None:
        """Look at the tokens of these entries one by one."""
        if not len(entries):
            return
        if counts is None:
            begins, ends = entries, entries + 1
        else:
            ends = np.cumsum(counts)[entries]
            begins = ends - counts[entries]
        ids = token_ids.tolist()
        some = zip(lines.array[entries].tolist(), begins.tolist(), ends.tolist(), strict=True)
        for line, begin, end in some:
            self._push_one(line, ids[begin:end])

    def _take_replayed(
        self, lines: RowSet, counts: Int64s | None, token_ids: UInt32s
    ) -> tuple[RowSet, Int64s | None, UInt32s]:
        """Take in the tokens of streams with a replayed end; what belongs to the others."""
        streams = self._columns.streams
        if counts is None:
            counts = np.ones(len(lines), np.int64)
        ends = np.cumsum(counts).tolist()
        is_other = np.ones(len(lines), np.bool_)
        for i, line in enumerate(lines.tolist()):
            stream = streams[line]
            if stream is not None and stream in self._lives.replaying:
                is_other[i] = False
                begin = ends[i - 1] if i else 0
                self._lives.push_replayed(stream, token_ids[begin : ends[i]])
        return (
            RowSet(lines.array[is_other]),
            counts[is_other],
            token_ids[np.repeat(is_other, counts)],
        )

    def _check_spans(self, lines: RowSet, counts: Int64s, starts: UInt32s) -> None:
        """ProtocolError unless every span begins where our copy ends, and has tokens in it."""
        have = self._columns.ends(lines)
        wrong = np.flatnonzero(((lines.array > 0) & (starts != have)) | (counts == 0))
        if len(wrong):
            at = int(wrong[0])
            raise ProtocolError(
                f"{counts[at]} tokens from {starts[at]} on, of a stream of {have[at]}"
            )
