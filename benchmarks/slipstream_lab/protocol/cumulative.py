"""A cumulative transport from core to worker: every step carries each stream's whole history.

Two codecs replace the product's, one at each end. `WholeHistories` sends, for every row of a step,
all of its output ids and logprobs; `OnlyNew` decodes them all and passes on what the worker has not
had. Everything else in both processes is unchanged, and so are the answers. `Counted` is the
product's own codec, which counts what it sends, for comparison.

A worker that attaches again is not supported: benchmarks do not break links.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from slipstream_ipc.arrays import Int64s
from slipstream_ipc.columns import pack_f32, pack_u32, u32
from slipstream_ipc.history.logprob_log import LogprobLog
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import (
    CORE_HOP_VERSION,
    Admit,
    Admitted,
    Control,
    CoreToWorker,
    Frame,
    LogprobColumns,
    Step,
    WorkerToCore,
)
from slipstream_ipc.messages.budgets import MAX_CORE_MESSAGE_BYTES
from slipstream_ipc.transport.codec import Codec


class SentSteps(Struct):
    """Columns with an entry per message of tokens."""

    sent_s: list[float]  # time.perf_counter
    num_bytes: list[int]
    num_tokens: list[int]  # new tokens

    def bytes_per_token(self, begin_s: float, end_s: float) -> float | None:
        """Over the messages of that time; None without any."""
        times = np.array(self.sent_s)
        inside = (begin_s <= times) & (times <= end_s)
        num_tokens = int(np.array(self.num_tokens)[inside].sum())
        return float(np.array(self.num_bytes)[inside].sum()) / num_tokens if num_tokens else None


class Counted(Codec[CoreToWorker, WorkerToCore]):
    """A core's codec that counts the messages of tokens."""

    def __init__(self) -> None:
        super().__init__(Frame[WorkerToCore], MAX_CORE_MESSAGE_BYTES, version=CORE_HOP_VERSION)
        self.sent = SentSteps([], [], [])
        self._encode_uncounted = self.encode
        self.encode = self._encode

    def _encode(self, frame: Frame[CoreToWorker] | Frame[Control]) -> bytes:
        data = self._encode_uncounted(self._as_sent(frame))
        if isinstance(frame.body, Step):
            self.sent.sent_s.append(time.perf_counter())
            self.sent.num_bytes.append(len(data))
            self.sent.num_tokens.append(len(frame.body.token_ids) // 4)
        return data

    def _as_sent(
        self, frame: Frame[CoreToWorker] | Frame[Control]
    ) -> Frame[CoreToWorker] | Frame[Control]:
        return frame


class WholeHistories(Counted):
    """A core's codec that sends everything again at each step. Set `histories` before serving."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: tuple[TokenLog, LogprobLog] | None = None
        self._prompt_lens: dict[bytes, int] = {}  # prompt lengths of streams without a row
        self._starts = np.zeros(64, np.int64)  # index of each row's first output

    def decode(self, data: bytes) -> Frame[WorkerToCore]:
        """The frame in `data`."""
        frame = super().decode(data)
        if isinstance(frame.body, Admit):
            self._prompt_lens[frame.body.stream_id] = len(frame.body.prompt_ids) // 4
        return frame

    def _as_sent(
        self, frame: Frame[CoreToWorker] | Frame[Control]
    ) -> Frame[CoreToWorker] | Frame[Control]:
        body = frame.body
        if isinstance(body, Admitted):
            if body.stream_id in self._prompt_lens:  # it is said again, with the cached tokens
                self._starts = _with_room(self._starts, body.row)
                self._starts[body.row] = self._prompt_lens.pop(body.stream_id)
        elif isinstance(body, Step):
            whole: Frame[CoreToWorker] = Frame(frame.epoch, frame.seq, frame.ack, self._whole(body))
            return whole
        return frame

    def _whole(self, step: Step) -> Step:
        assert self.histories is not None
        tokens, logprobs = self.histories
        rows = u32(step.rows).astype(np.int64)
        starts = self._starts[rows]
        counts = tokens.lengths(rows) - starts
        columns = None
        if step.logprobs is not None:
            columns = logprobs.columns(rows, starts, counts)
        token_ids = tokens.gather(rows, starts, counts)
        return Step(
            step.step, step.rows, pack_u32(token_ids), pack_u32(counts), pack_u32(starts), columns
        )


class OnlyNew(Codec[WorkerToCore, CoreToWorker]):
    """A worker's codec that receives whole histories and keeps what is new."""

    def __init__(self) -> None:
        super().__init__(Frame[CoreToWorker], MAX_CORE_MESSAGE_BYTES, version=CORE_HOP_VERSION)
        self._have = np.zeros(64, np.int64)  # outputs already received, by row

    def decode(self, data: bytes) -> Frame[CoreToWorker]:
        """The frame in `data`, with a Step cut to what is new."""
        frame = super().decode(data)
        body = frame.body
        if isinstance(body, Admitted):
            self._have = _with_room(self._have, body.row)
            self._have[body.row] = 0
        elif isinstance(body, Step):
            return Frame(frame.epoch, frame.seq, frame.ack, self._cut(body))
        return frame

    def _cut(self, step: Step) -> Step:
        rows = u32(step.rows).astype(np.int64)
        whole = u32(step.counts).astype(np.int64)
        have = self._have[rows]
        self._have[rows] = whole
        ends = np.cumsum(whole)
        new = _Spans(ends - whole + have, whole - have)
        columns = None if step.logprobs is None else _cut_logprobs(step.logprobs, new)
        each_one = bool((new.counts == 1).all())
        return Step(
            step.step,
            step.rows,
            pack_u32(u32(step.token_ids)[new.places()]),
            b"" if each_one else pack_u32(new.counts),
            b"" if each_one else pack_u32(u32(step.starts) + have),
            columns,
        )


class _Spans(NamedTuple):
    """For each entry, `counts` indices from `starts` on."""

    starts: Int64s
    counts: Int64s

    def places(self) -> Int64s:
        """The indices of all entries, concatenated."""
        ends = np.cumsum(self.counts)
        return np.arange(int(ends[-1])) + np.repeat(self.starts - ends + self.counts, self.counts)


def _cut_logprobs(columns: LogprobColumns, new: _Spans) -> LogprobColumns:
    assert not columns.widths, "all requests of a load ask for the same log-probabilities"
    places = new.places()
    shape = (-1, columns.width)
    values = np.frombuffer(columns.values, "<f4").reshape(shape)[places]
    ids = u32(columns.ids).reshape(shape)[places]
    return LogprobColumns(
        columns.width, pack_f32(values), pack_u32(ids), pack_u32(u32(columns.ranks)[places])
    )


def _with_room(column: Int64s, row: int) -> Int64s:
    if row < len(column):
        return column
    return np.pad(column, (0, max(row + 1, 2 * len(column)) - len(column)))
