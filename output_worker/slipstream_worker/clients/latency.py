"""Counts requests and tokens, and measures how long readers wait: time to first token, gaps between
deltas, time per token, end-to-end time.

- The time per token is that between the first delta and the end, over the tokens after the first
  delta, which may hold several. vLLM divides by the tokens after the first one, the same number
  where the first delta holds one token.

- Consecutive messages to exactly the same rows (the same set, see
  `WorkerStreamTable.worker_rows_of`) are counted once for all rows, which have waited equally long.
  The time is written to the columns when another kind of message leaves or the rows change
  (`DeliveryPace.flush_deferred`).
- Only streams submitted to this process have a time to first token and an end-to-end time; streams
  taken over from an earlier worker have gaps from their second delta on.
- An end that the core already knew when it replayed the stream was counted by the earlier worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream_ipc.row_set import RowSet
from slipstream_ipc.telemetry.histogram import HistogramBuilder
from slipstream_ipc.telemetry.statistics import WorkerCounters, WorkerGauges, WorkerNumbers
from slipstream_worker.clients.deltas import BuiltDeltas, SlowEntries
from slipstream_worker.clients.deltas_scalar import BuiltScalarDeltas, Span
from slipstream_worker.request_spans import RequestSpans
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

Int64s = npt.NDArray[np.int64]


class RequestCounters:
    """The counters of one worker. Those without an underscore are incremented by their users."""

    def __init__(self, spans: RequestSpans | None = None) -> None:
        """spans: of the requests that are traced; None if none is."""
        self._spans = spans
        self.num_accepted = 0
        self.num_prompt_tokens = 0
        self.num_messages = 0
        self.num_deltas = 0
        self.num_delivered_tokens = 0
        self.num_overrun_tokens = 0
        self.itl_s = HistogramBuilder()
        self._finished: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._ttft_s = HistogramBuilder()
        self._tpot_s = HistogramBuilder()
        self._e2e_s = HistogramBuilder()

    def accepted(self, num_prompt_tokens: int) -> None:
        """The core has accepted a request."""
        self.num_accepted += 1
        self.num_prompt_tokens += num_prompt_tokens

    def rejected(self, code: str) -> None:
        """A request was rejected."""
        self._rejected[code] = self._rejected.get(code, 0) + 1

    def finished(self, reason: str, num_cut: int) -> None:
        """A stream has ended; `num_cut` of its tokens lie past its end."""
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self.num_overrun_tokens += num_cut

    def first(self, stream: WorkerStream, num_tokens: int, now: float) -> None:
        """A stream's first tokens were sent."""
        stream.first_at, stream.first_tokens = now, num_tokens
        if stream.arrived_at:
            self._ttft_s.add(max(0.0, now - stream.arrived_at))

    def last(self, stream: WorkerStream, now: float) -> None:
        """A stream's end was sent, perhaps again."""
        assert stream.output is not None
        assert stream.output.end is not None
        num_later = stream.output.end.num_tokens - stream.first_tokens
        took_s = now - stream.first_at
        if stream.first_at and num_later > 0 and took_s > 0:
            self._tpot_s.add(took_s / num_later)
        if stream.arrived_at:
            self._e2e_s.add(max(0.0, now - stream.arrived_at))
        if self._spans is not None:
            self._spans.end_sent(stream, now)
        stream.arrived_at = stream.first_at = 0.0

    def numbers(self, gauges: WorkerGauges) -> WorkerNumbers:
        """All counters and histograms, with these gauges."""
        spans = self._spans
        return WorkerNumbers(
            gauges,
            WorkerCounters(
                num_accepted=self.num_accepted,
                num_prompt_tokens=self.num_prompt_tokens,
                num_messages=self.num_messages,
                num_deltas=self.num_deltas,
                num_delivered_tokens=self.num_delivered_tokens,
                num_overrun_tokens=self.num_overrun_tokens,
                finished=self._finished.copy(),
                rejected=self._rejected.copy(),
                ttft_s=self._ttft_s.histogram(),
                itl_s=self.itl_s.histogram(),
                tpot_s=self._tpot_s.histogram(),
                e2e_s=self._e2e_s.histogram(),
                num_exported_spans=0 if spans is None else spans.num_exported,
                num_lost_spans=0 if spans is None else spans.num_lost,
            ),
        )


class DeliveryPace:
    """Times of the last delivery to each stream that one client reads."""

    def __init__(self, columns: StreamColumns, counters: RequestCounters) -> None:
        self._columns = columns
        self._counters = counters
        self._worker_rows: RowSet | None = None  # of the last message, if it had fast rows alone
        self._at = 0.0  # when it was sent; not in the columns yet

    def left(self, built: BuiltDeltas | BuiltScalarDeltas, now: float) -> None:
        """Count a message that was sent. Call it before the message is committed."""
        counters, message = self._counters, built.message
        counters.num_messages += 1
        counters.num_deltas += len(message.handles) // 4
        counters.num_delivered_tokens += len(message.token_ids) // 4
        if isinstance(built, BuiltScalarDeltas):
            self.flush_deferred()
            self._few(built.fast, now)
        elif self._went_to(built.fast) and not built.slow.new_cursors:
            counters.itl_s.add(now - self._at, len(built.fast))
            self._at = now
        else:
            self.flush_deferred()
            self._many(built.fast, built.fast_tokens, now)
            if built.slow.new_cursors:
                self.flush_deferred()
        if built.slow.new_cursors:
            self._slow(built.slow, now)

    def flush_deferred(self) -> None:
        """Write the common time of the last message's rows to the columns."""
        if self._worker_rows is not None:
            self._columns.delivered_at[self._worker_rows.array] = self._at
            self._worker_rows = None

    def _went_to(self, worker_rows: RowSet) -> bool:
        """Whether the last message had exactly these rows."""
        return self._worker_rows is not None and self._worker_rows.version == worker_rows.version

    def _many(self, worker_rows: RowSet, counts: Int64s, now: float) -> None:
        """counts: tokens of each row in the message, [n]."""
        if not len(worker_rows):
            return
        before = self._columns.delivered_at.take(worker_rows.array)
        first = before.item(0)
        if first and (before == first).all():
            self._counters.itl_s.add(now - first, len(worker_rows))
        else:
            is_first = before == 0.0
            new, num_tokens = worker_rows.array[is_first].tolist(), counts[is_first].tolist()
            for worker_row, num in zip(new, num_tokens, strict=True):
                self._first(worker_row, num, now)
            self._counters.itl_s.add_all(now - before[~is_first])
        self._worker_rows, self._at = worker_rows, now

    def _few(self, spans: Sequence[Span], now: float) -> None:
        delivered_at, itl_s = self._columns.cells.delivered_at, self._counters.itl_s
        last, num = 0.0, 0  # rows in a run with the same last delivery
        for worker_row, _, num_tokens in spans:
            before = delivered_at[worker_row]
            delivered_at[worker_row] = now
            if not before:
                self._first(worker_row, num_tokens, now)
            elif before == last:
                num += 1
            else:
                if num:
                    itl_s.add(now - last, num)
                last, num = before, 1
        if num:
            itl_s.add(now - last, num)

    def _slow(self, slow: SlowEntries, now: float) -> None:
        delivered_at, counters = self._columns.cells.delivered_at, self._counters
        last, num = 0.0, 0  # as above
        for (stream, _), (worker_row, start, num_tokens) in zip(
            slow.new_cursors, slow.spans, strict=True
        ):
            if not num_tokens:
                continue
            before = delivered_at[worker_row]
            delivered_at[worker_row] = now
            if not before:
                if not start:
                    counters.first(stream, num_tokens, now)
            elif before == last:
                num += 1
            else:
                if num:
                    counters.itl_s.add(now - last, num)
                last, num = before, 1
        if num:
            counters.itl_s.add(now - last, num)
        for stream in slow.ended:
            counters.last(stream, now)

    def _first(self, worker_row: int, num_tokens: int, now: float) -> None:
        """The first delta of a fast row in this process."""
        stream = self._columns.streams[worker_row]
        if stream is not None and not self._columns.cells.sent_tokens[worker_row]:
            self._counters.first(stream, num_tokens, now)
