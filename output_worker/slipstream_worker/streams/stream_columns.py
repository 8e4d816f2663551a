"""The tokens of all streams of a worker as numpy columns, by row, and how far they have been sent.

Holds the histories of tokens and log-probabilities, which rows take the fast path, and the cursors
of those rows. What is done for every row of a step or a message is in `row_loops`.

- A row is a small integer that a stream keeps until it is forgotten. Row 0 belongs to no stream,
  and absorbs what arrives for streams that are gone.
- A fast row is one whose output is settled (see `stream_output`): its tokens are only appended to
  the history, a thousand at once, and their text is looked up when they are sent. A token that
  could end the stream, that holds text back or that is not whole makes the row slow: its
  `StreamOutput` then sees every token, until it is settled again and everything released has been
  sent.
- A row with more than MAX_NARROW log-probabilities per token is never fast, because the number of
  its tokens that fit a message differs from the other rows'.
- Both paths produce the same units, and so the same positions that readers know.
- A row of a stream that is read as events is fast while its text is one event of one kind; what is
  harmless then is a matter of its mode, which `follow_mode` keeps up to date.
- `lengths` and `last_ids` repeat what the histories hold, so that a step's tokens are checked and
  sent without looking there.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import numpy as np

from slipstream_ipc.arrays import Bools, Float64s, Int64s, UInt32s, UInt64s
from slipstream_ipc.columns import num_scored, u32
from slipstream_ipc.history.logprob_log import LogprobLog
from slipstream_ipc.history.prompt_logprob_log import PromptLogprobLog
from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.messages import Admit
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_ipc.row_table import RowTable, column
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.validation.sampling_params import stop_strings
from slipstream_worker.detokenizer.text_columns import TextColumns, VocabularyView
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.fast_path import PlainTokens
from slipstream_worker.streams.row_loops import RowLoops, Views, new_row_loops
from slipstream_worker.streams.stream import WorkerStream

logger = logging.getLogger(__name__)


_NO_ROW = 0
_NO_WORDS = np.zeros(0, np.uint64)
_MIN_ROWS = 64


class StreamColumns(RowTable):
    """Columns by row. Those without an underscore may be read from outside."""

    is_fast: Bools = column(np.bool_)
    is_dirty: Bools = column(np.bool_)  # may have something new for its reader
    lengths: Int64s = column(np.int64)  # tokens in its history
    last_ids: UInt32s = column(np.uint32)  # the last of them
    intervals: Int64s = column(np.int64, 1)
    widths: Int64s = column(np.int64)  # log-probabilities per token
    handles: UInt32s = column(np.uint32)  # client handle of its reader
    ports: Int64s = column(np.int64)  # number of the port that sends it; 0: none
    sent_tokens: Int64s = column(np.int64)  # of fast rows
    sent_chars: Int64s = column(np.int64)
    kinds: Int64s = column(np.int64)  # of fast rows: what their text is, see `Deltas.kinds`
    # time of the last delivery, 0.0: none yet (maintained by `latency`)
    delivered_at: Float64s = column(np.float64)
    prompt_lens: Int64s = column(np.int64)
    _max_tokens: Int64s = column(np.int64)
    _firsts: Int64s = column(np.int64)  # of the row's view in `fast`
    # first characters of its stop strings: one `and` with a token's (decision 009)
    _stop_low: UInt64s = column(np.uint64)
    _stop_high: UInt64s = column(np.uint64)
    _sets: Int64s = column(np.int64)  # number of its set of stop strings; 0: not tracked
    _has_detector: Bools = column(np.bool_)  # whether a repetition may end it

    def __init__(self, fast: TextColumns | None) -> None:
        """fast: None if no row is ever fast."""
        super().__init__(_MIN_ROWS)
        self.fast = fast
        self.tokens = TokenLog()
        self.logprobs = LogprobLog()
        self.prompts = PromptLogprobLog()
        self.streams: list[WorkerStream | None] = [None]
        self._free: list[int] = []
        self.max_width = 0  # largest of all rows so far that can be fast
        self.has_logprobs = False  # whether any row so far has had some
        self._latest = NO_ROWS  # rows of the last `append`, …
        self._sorted: bytes | None = None  # … the same in ascending order, computed on demand
        self._modes: dict[int, Hashable] = {}  # by row that is read as events
        self._num_with_detectors = 0
        self._plain = PlainTokens(fast)
        self.loops = self._new_loops()

    @property
    def has_detectors(self) -> bool:
        """True if a repetition may end any row's stream."""
        return self._num_with_detectors > 0

    @property
    def has_events(self) -> bool:
        """True if any row is read as events."""
        return bool(self._modes)

    # ---- a row's life -------------------------------------------------------------------

    def open(self, stream: WorkerStream, admit: Admit) -> None:
        """Assign a row to a stream, and append the outputs that its registration brings."""
        if not self._free:
            self._free.append(len(self.streams))
            self.streams.append(None)
        worker_row = stream.worker_row = self._free.pop()
        self.streams[worker_row] = stream
        if worker_row >= self.num_rows:
            self.grow(worker_row + 1)
            self.loops = self._new_loops()
        self.tokens.open(worker_row)
        outputs = u32(admit.begun.output_ids)
        if len(outputs):
            self.tokens.extend(worker_row, outputs)
            self.last_ids[worker_row] = outputs[-1]
        self.lengths[worker_row] = len(outputs)
        params = admit.spec.params
        width = 0
        if params.logprobs is not None:
            width = 1 + params.logprobs
            # outputs without log-probabilities were delivered by a stack that is gone
            num_known = num_scored(admit)
            stream.logprobs_from = len(outputs) - num_known
            self.logprobs.open(worker_row, params.logprobs, stream.logprobs_from)
            if admit.begun.logprobs is not None and num_known:
                counts = np.array([num_known])
                self.logprobs.append_columns(
                    RowSet(np.array([worker_row])), counts, admit.begun.logprobs
                )
        if params.prompt_logprobs is not None:
            self.prompts.open(worker_row, len(admit.prompt_ids) // 4, params.prompt_logprobs)
            if admit.begun.prompt_logprobs is not None:
                self.prompts.add_columns(worker_row, 0, admit.begun.prompt_logprobs)
        self.widths[worker_row] = width
        self.has_logprobs |= width > 0
        if width <= MAX_NARROW:
            self.max_width = max(self.max_width, width)
        self.intervals[worker_row] = stream.interval
        self.is_dirty[worker_row] = False
        self.sent_tokens[worker_row] = self.sent_chars[worker_row] = 0
        self.delivered_at[worker_row] = 0.0
        self.ports[worker_row] = 0
        self.prompt_lens[worker_row] = len(admit.prompt_ids) // 4
        self._max_tokens[worker_row] = admit.derived.max_tokens
        stops = stop_strings(params)
        self._stop_low[worker_row], self._stop_high[worker_row] = self._plain.first_characters(
            stops
        )
        output = stream.output
        if isinstance(output, AnswerOutput):
            self._plain.add_stops(output.delimiter_ids)
            self._modes[worker_row] = None
        else:
            self._assign_set(worker_row, *self._plain.set_of(_view(admit), stops))
        has_detector = output is not None and output.repetition is not None
        self._has_detector[worker_row] = has_detector
        self._num_with_detectors += has_detector
        self.kinds[worker_row] = 0
        self._plain.add_stops(admit.derived.stop_token_ids)
        self.is_fast[worker_row] = False
        if self.fast is not None:
            self._firsts[worker_row] = self.fast.first(_view(admit))

    def close(self, stream: WorkerStream) -> None:
        """Free the stream's row. Idempotent."""
        worker_row, stream.worker_row = stream.worker_row, _NO_ROW
        if worker_row == _NO_ROW:
            return
        assert stream.registration is not None
        self.streams[worker_row] = None
        self._latest, self._sorted = NO_ROWS, None  # the row may go to another stream
        self._free.append(worker_row)
        self.tokens.drop(worker_row)
        self.logprobs.drop(worker_row)
        self.prompts.drop(worker_row)
        self.is_dirty[worker_row] = self.is_fast[worker_row] = False
        output = stream.output
        if isinstance(output, AnswerOutput):
            self._plain.remove_stops(output.delimiter_ids)
            del self._modes[worker_row]
        self._num_with_detectors -= bool(self._has_detector[worker_row])
        self._plain.remove_stops(stream.registration.derived.stop_token_ids)

    # ---- tokens --------------------------------------------------------------------------

    def num_tokens(self, stream: WorkerStream) -> int:
        """Number of tokens in a stream's history, including those past its end."""
        return self.lengths.item(stream.worker_row)

    def token_ids(self, stream: WorkerStream) -> UInt32s:
        """A stream's history, u32 [num_tokens]."""
        ids: UInt32s = self.tokens.read(stream.worker_row, 0, self.tokens.length(stream.worker_row))
        return ids

    def ids_between(self, worker_row: int, start: int, stop: int) -> list[int]:
        """Read ids of a row's history, from `start` to `stop`."""
        if stop == start + 1 == self.lengths.item(worker_row):
            return [self.last_ids.item(worker_row)]
        if stop == start:
            return []
        ids: list[int] = self.tokens.read(worker_row, start, stop).tolist()
        return ids

    def append(self, worker_rows: RowSet, counts: Int64s | None, token_ids: UInt32s) -> list[int]:
        """Append `counts[i]` new tokens (None: one) to each of these distinct rows.

        counts: i64 [n]. token_ids: u32 [sum of counts]. Returns the indices of the rows whose new
        tokens have to pass through their outputs, ascending.
        """
        if counts is None:
            self.tokens.append(worker_rows, token_ids)
        else:
            self.tokens.append_spans(worker_rows.array, counts, token_ids)
        if worker_rows.version != self._latest.version:
            self._latest, self._sorted = worker_rows, None
        to_check = self.loops.append(worker_rows.array, counts, token_ids)
        if self._num_with_detectors:
            found = self._detect(worker_rows.array, counts, token_ids)
            to_check = sorted({*to_check, *found}) if found else to_check
        return to_check

    def flush_deferred(self) -> None:
        """Do the work that `append` has deferred; called once everything due has been sent."""
        if self.has_logprobs:
            self.logprobs.flush_deferred()

    def in_order(self, worker_rows: bytes) -> RowSet:
        """Return these ascending rows (i64) in the order of the last `append`, if they are the same
        rows: what was appended together is then found at once.
        """
        latest = self._latest
        if self._sorted is None:
            self._sorted = np.sort(latest.array).tobytes()
        return (
            latest if self._sorted == worker_rows else RowSet(np.frombuffer(worker_rows, np.int64))
        )

    def ends(self, worker_rows: RowSet) -> Int64s:
        """Lengths of these rows' core histories, prompts included, i64 [n]."""
        return self.prompt_lens[worker_rows.array] + self.lengths[worker_rows.array]

    # ---- the two ways --------------------------------------------------------------------

    def make_slow(self, stream: WorkerStream, num_tokens: int) -> None:
        """Make the row slow: its output catches up to `num_tokens`, and sees all further tokens."""
        worker_row, output = stream.worker_row, stream.output
        if not self.is_fast.item(worker_row):
            return
        assert self.fast is not None
        assert output is not None
        self.is_fast[worker_row] = False
        sent = TextCursor(0, self.sent_chars.item(worker_row), self.sent_tokens.item(worker_row))
        output.resume_at(sent)
        if num_tokens > sent.num_tokens:
            ids = self.tokens.read(worker_row, sent.num_tokens, num_tokens)
            output.append_whole(self.texts(self.fast, worker_row, ids.tolist()))
        if stream.reader is not None:
            stream.reader.cursor = sent

    def record_harmless(self, stream: WorkerStream, output: StreamOutput, token_id: int) -> None:
        """Record whether this token, after this settled output, is harmless for the row's stop
        strings.
        """
        fast, number = self.fast, self._sets.item(stream.worker_row)
        if fast is None or not number or token_id >= fast.vocab_size:
            return
        if not self._plain.is_known.item(number, token_id):
            at = self._firsts.item(stream.worker_row) + token_id
            is_harmless = fast.lens.item(at) >= 0 and output.is_harmless(fast.texts[at])
            self._plain.record_harmless(number, token_id, is_harmless=is_harmless)

    def follow_mode(self, stream: WorkerStream, output: AnswerOutput) -> None:
        """Note the mode of a settled output that is read as events: which tokens are plain for its
        row, and what their text is.
        """
        worker_row, admit = stream.worker_row, stream.registration
        assert admit is not None
        assert admit.derived.answer is not None
        self.kinds[worker_row] = output.kind
        if self._modes[worker_row] == (mode := output.mode):
            return
        self._modes[worker_row] = mode
        words = self._plain.hazard_characters(output.hazard_chars)
        self._stop_low[worker_row], self._stop_high[worker_row] = words
        stops = stop_strings(admit.spec.params) if output.is_stopped_here else ()
        found = self._plain.set_of(_view(admit), stops, (admit.derived.answer.format, mode))
        self._assign_set(worker_row, *found)

    def make_fast(self, stream: WorkerStream, sent: TextCursor) -> None:
        """Make the row fast if its output is settled, everything released lies before `sent`, and
        its end is not known yet: tokens up to a replayed end take the slow path.
        """
        worker_row, output = stream.worker_row, stream.output
        assert output is not None
        is_open = output.end is None and stream.pending_end is None
        is_whole = is_open and sent.unit == output.log.num_units
        if self.fast is None or not is_whole or self.widths[worker_row] > MAX_NARROW:
            return
        if is_settled(stream, output):
            if isinstance(output, AnswerOutput):
                self.follow_mode(stream, output)
            self.is_fast[worker_row] = True
            self.sent_chars[worker_row] = sent.num_chars
            self.sent_tokens[worker_row] = sent.num_tokens

    def texts(self, fast: TextColumns, worker_row: int, token_ids: Sequence[int]) -> list[str]:
        """The texts of these tokens, which are plain for the row."""
        first, beyond = self._firsts.item(worker_row), fast.vocab_size
        return [fast.texts[first + min(token_id, beyond)] for token_id in token_ids]

    def max_tokens(self, worker_row: int) -> int:
        """The row's limit of tokens."""
        return self._max_tokens.item(worker_row)

    # ---- inside --------------------------------------------------------------------------

    def _assign_set(self, worker_row: int, number: int, was_another: bool) -> None:
        """Give a row a set of stop strings, which other rows may lose."""
        if was_another:
            self._sets[self._sets == number] = 0
        self._sets[worker_row] = number

    def _detect(self, worker_rows: Int64s, counts: Int64s | None, token_ids: UInt32s) -> list[int]:
        """Give the new tokens of fast rows to their repetition detectors; the indices of those that
        they end.
        """
        entries = np.flatnonzero(self._has_detector[worker_rows] & self.is_fast[worker_rows])
        if not len(entries):
            return []
        ends = entries + 1 if counts is None else np.cumsum(counts)[entries]
        begins = ends - (1 if counts is None else counts[entries])
        ids = token_ids.tolist()
        return [
            entry
            for entry, begin, end in zip(
                entries.tolist(), begins.tolist(), ends.tolist(), strict=True
            )
            if self._repeats(worker_rows.item(entry), ids[begin:end])
        ]

    def _repeats(self, worker_row: int, token_ids: Sequence[int]) -> bool:
        """True if a repetition ends this fast row's stream within these new tokens."""
        stream = self.streams[worker_row]
        assert stream is not None
        assert stream.output is not None
        detector = stream.output.repetition
        return detector is not None and detector.ends_within(token_ids)

    def is_plain_for(self, fast: TextColumns, worker_row: int, token_id: int) -> bool:
        """True if the token is whole, ends no stream, and begins no stop string of this row."""
        if token_id > fast.vocab_size:
            token_id = fast.vocab_size
        at = token_id + self._firsts.item(worker_row)
        plain = self._plain
        if not plain.is_plain.item(at):
            return False
        if fast.low.item(at) & self._stop_low.item(worker_row) or fast.high.item(
            at
        ) & self._stop_high.item(worker_row):
            return plain.harmless.item(self._sets.item(worker_row), token_id)
        return True

    def _new_loops(self) -> RowLoops:
        fast, plain = self.fast, self._plain
        views = Views(
            is_fast=self.is_fast,
            is_dirty=self.is_dirty,
            intervals=self.intervals,
            handles=self.handles,
            lengths=self.lengths,
            last_ids=self.last_ids,
            sent_tokens=self.sent_tokens,
            sent_chars=self.sent_chars,
            kinds=self.kinds,
            delivered_at=self.delivered_at,
            max_tokens=self._max_tokens,
            firsts=self._firsts,
            sets=self._sets,
            stop_low=self._stop_low,
            stop_high=self._stop_high,
            is_plain=plain.is_plain,
            low=_NO_WORDS if fast is None else fast.low,
            high=_NO_WORDS if fast is None else fast.high,
            harmless=plain.harmless,
        )
        return new_row_loops(views, fast)


def is_settled(stream: WorkerStream, output: StreamOutput) -> bool:
    """True if a stream's output is settled; False if its detokeniser raises, as the next token
    will.
    """
    try:
        return output.is_settled
    except Exception:
        logger.exception("a stream's detokeniser failed", extra=of_requests(stream.label))
        return False


def _view(admit: Admit) -> VocabularyView:
    if not admit.spec.params.detokenize:
        return VocabularyView.SILENT
    return VocabularyView.SKIPPED if admit.spec.params.skip_special_tokens else VocabularyView.SHOWN
