"""Counts requests and tokens, and measures how long readers wait: time to first token, gaps between
deltas, time per token, end-to-end time.

- The time per token is that between the first delta and the end, over the tokens after the first
  delta, which may hold several. vLLM divides by the tokens after the first one, the same number
  where the first delta holds one token.
- Only streams submitted to this process have a time to first token and an end-to-end time; streams
  taken over from an earlier worker have gaps from their second delta on.
- An end that the core already knew when it replayed the stream was counted by the earlier worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from slipstream_ipc.telemetry.histogram import BriefHistogramBuilder, HistogramBuilder, bounds
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_ANSWERS,
    BOUNDS_TOKENS,
    WorkerCounters,
    WorkerGauges,
    WorkerNumbers,
)
from slipstream_worker.clients.deltas import BuiltDeltas, SlowEntries
from slipstream_worker.request_spans import RequestSpans
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns


class RequestCounters:
    """The counters of one worker. Those without an underscore are incremented by their users."""

    def __init__(self, spans: RequestSpans | None = None) -> None:
        """spans: of the requests that are traced; None if none is."""
        self.spans = spans
        self.num_accepted = 0
        self.num_prompt_tokens = 0
        self.sent = array("q", [0, 0, 0])  # messages, deltas and tokens
        self.num_overrun_tokens = 0
        self.itl_s = HistogramBuilder()
        self._finished: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        self._ttft_s = HistogramBuilder()
        self._tpot_s = HistogramBuilder()
        self._e2e_s = HistogramBuilder()
        self._decode_s = BriefHistogramBuilder()
        self._prompt_tokens = BriefHistogramBuilder(BOUNDS_TOKENS)
        self._generation_tokens = BriefHistogramBuilder(BOUNDS_TOKENS)
        self._max_tokens = BriefHistogramBuilder()
        self._num_answers = BriefHistogramBuilder(BOUNDS_ANSWERS)

    def accepted(self, num_prompt_tokens: int, *, num_answers: int) -> None:
        """The core has accepted a stream. num_answers: of its request; 0 for all but one of them.

        Counted here since a worker that dies before is sent the whole request again.
        """
        self.num_accepted += 1
        self.num_prompt_tokens += num_prompt_tokens
        if num_answers:
            self._num_answers.add(num_answers)

    def rejected(self, code: str) -> None:
        """A request was rejected."""
        self._rejected[code] = self._rejected.get(code, 0) + 1

    def finished(self, reason: str, num_cut: int) -> None:
        """A stream has ended; `num_cut` of its tokens lie past its end."""
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self.num_overrun_tokens += num_cut

    def embedded(self, num_tokens: Sequence[int], took_s: float) -> None:
        """A query is answered with the vectors of inputs of so many tokens, each a request."""
        self.num_accepted += len(num_tokens)
        self.num_prompt_tokens += sum(num_tokens)
        self._finished["stop"] = self._finished.get("stop", 0) + len(num_tokens)
        for num in num_tokens:
            self._prompt_tokens.add(num)
            self._e2e_s.add(max(0.0, took_s))

    def delivered(self, columns: StreamColumns, built: BuiltDeltas, now: float) -> None:
        """Count a message that was sent, and move the cursors."""
        message, fast, slow = built.message, built.fast, built.slow
        sent = self.sent
        sent[0] += 1
        sent[1] += len(message.handles) // 4
        sent[2] += len(message.token_ids) // 4
        if fast.rows:
            rows, starts, counts, num_chars = fast.rows, fast.starts, fast.counts, fast.num_chars
            buckets, total = self.itl_s.buckets, self.itl_s.total
            first = columns.loops.sent(rows, starts, counts, num_chars, now, bounds, buckets, total)
            for worker_row, num_tokens in first:
                stream = columns.streams[worker_row]
                if stream is not None:
                    self.first(stream, num_tokens, now)
        if slow.new_cursors:
            self._slow_delivered(columns, slow, now)
            slow.commit(columns)

    def _slow_delivered(self, columns: StreamColumns, slow: SlowEntries, now: float) -> None:
        delivered_at = columns.delivered_at
        for (stream, _), (worker_row, start, num_tokens) in zip(
            slow.new_cursors, slow.spans, strict=True
        ):
            if not num_tokens:
                continue
            before = delivered_at.item(worker_row)
            delivered_at[worker_row] = now
            if before:
                self.itl_s.add(now - before)
            elif not start:
                self.first(stream, num_tokens, now)
        for stream in slow.ended:
            self.last(stream, now)

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
            self._decode_s.add(max(0.0, took_s) if stream.first_at else 0.0)
            self._generation_tokens.add(stream.output.end.num_tokens)
            if (request := stream.registration) is not None:
                self._prompt_tokens.add(len(request.prompt_ids) // 4)
                self._max_tokens.add(request.derived.max_tokens)
        if self.spans is not None:
            self.spans.end_sent(stream, now)
        stream.arrived_at = stream.first_at = 0.0

    def numbers(self, gauges: WorkerGauges) -> WorkerNumbers:
        """All counters and histograms, with these gauges."""
        spans = self.spans
        return WorkerNumbers(
            gauges,
            WorkerCounters(
                num_accepted=self.num_accepted,
                num_prompt_tokens=self.num_prompt_tokens,
                num_messages=self.sent[0],
                num_deltas=self.sent[1],
                num_delivered_tokens=self.sent[2],
                num_overrun_tokens=self.num_overrun_tokens,
                finished=self._finished.copy(),
                rejected=self._rejected.copy(),
                ttft_s=self._ttft_s.histogram(),
                itl_s=self.itl_s.histogram(),
                tpot_s=self._tpot_s.histogram(),
                e2e_s=self._e2e_s.histogram(),
                num_exported_spans=0 if spans is None else spans.num_exported,
                num_lost_spans=0 if spans is None else spans.num_lost,
                decode_s=self._decode_s.histogram(),
                prompt_tokens=self._prompt_tokens.histogram(),
                generation_tokens=self._generation_tokens.histogram(),
                max_tokens=self._max_tokens.histogram(),
                num_answers=self._num_answers.histogram(),
            ),
        )
