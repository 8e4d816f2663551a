"""The loops over the rows of a step and of a message, in numpy."""

from __future__ import annotations

import numpy as np

from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.columns import pack_u32
from slipstream_worker.detokenizer.text_columns import TextColumns
from slipstream_worker.streams.row_loops import Buffer, Entries, Views


class ReferenceLoops:
    """The loops in numpy."""

    def __init__(self, views: Views, fast: TextColumns | None) -> None:
        self._views = views
        self._fast = fast

    def append(self, rows: Buffer, counts: Buffer | None, token_ids: Buffer) -> list[int]:
        views, fast = self._views, self._fast
        counts = np.ones(len(rows), np.int64) if counts is None else counts
        ends = np.cumsum(counts)
        lengths = views.lengths[rows] + counts
        views.lengths[rows] = lengths
        views.last_ids[rows] = token_ids[ends - 1]
        views.is_dirty[rows] = True
        if fast is None:
            return list(range(len(rows)))
        of_token = np.repeat(rows, counts)
        ids = np.minimum(token_ids, fast.vocab_size)
        at = ids + views.firsts[of_token]
        is_plain = views.is_plain[at]
        shared = views.low[at] & views.stop_low[of_token]
        shared |= views.high[at] & views.stop_high[of_token]
        is_plain &= (shared == 0) | views.harmless[views.sets[of_token], ids]
        needs_check = ~views.is_fast[rows] | (lengths >= views.max_tokens[rows])
        if len(rows):
            needs_check |= ~np.logical_and.reduceat(is_plain, ends - counts)
        return np.flatnonzero(needs_check).tolist()

    def due(self, rows: Buffer, urgent: bool) -> tuple[bytes, bytes, list[int]]:
        views = self._views
        rows = _i64(rows)
        rows = rows[views.is_dirty[rows]]
        is_fast = views.is_fast[rows]
        fast, slow = rows[is_fast], rows[~is_fast]
        sent = views.sent_tokens[fast]
        new = views.lengths[fast] - sent
        is_due = sent == 0
        if not urgent:
            is_due |= new >= views.intervals[fast]
        is_due &= new > 0
        new = new[is_due]
        counts = b"" if (new == 1).all() else pack_u32(new)
        return fast[is_due].tobytes(), counts, slow.tolist()

    def entries(self, rows: Buffer, counts: bytes, token_ids: bytes | None) -> Entries:
        views, fast = self._views, self._fast
        assert fast is not None or not len(rows)
        rows = _i64(rows)
        ids = views.last_ids[rows] if token_ids is None else _u32(token_ids)
        texts, begin = list[str](), 0
        if fast is not None:
            each = _counts(counts, len(rows))
            at = (np.minimum(ids, fast.vocab_size) + np.repeat(views.firsts[rows], each)).tolist()
            for count in each.tolist():
                texts.append("".join([fast.texts[one] for one in at[begin : begin + count]]))
                begin += count
        lens = np.fromiter(map(len, texts), np.int64, len(texts))
        kinds = np.where(lens > 0, views.kinds[rows], 0)
        return (
            pack_u32(views.handles[rows]),
            pack_u32(views.sent_chars[rows]),
            pack_u32(views.sent_tokens[rows]),
            texts,
            pack_u32(ids),
            pack_u32(lens),
            pack_u32(kinds) if kinds.any() else b"",
        )

    def sent(
        self,
        rows: Buffer,
        starts: bytes,
        counts: bytes,
        num_chars: bytes,
        now: float,
        bounds: Buffer,
        buckets: Buffer,
        total: Buffer,
    ) -> list[tuple[int, int]]:
        views, rows = self._views, _i64(rows)
        each = _counts(counts, len(rows))
        before = views.delivered_at[rows]
        is_first = (before == 0.0) & (views.sent_tokens[rows] == 0)
        first = list(zip(rows[is_first].tolist(), each[is_first].tolist(), strict=True))
        gaps = now - before[before != 0.0]
        waited = np.frombuffer(buckets, np.int64)
        waited += np.bincount(np.searchsorted(bounds, gaps), minlength=len(waited))
        total[0] += float(gaps.sum())
        ends = _u32(starts) + each
        views.delivered_at[rows] = now
        views.sent_tokens[rows] = ends
        views.sent_chars[rows] += _u32(num_chars)
        views.is_dirty[rows] = views.lengths[rows] > ends
        return first


def _i64(rows: Buffer) -> Int64s:
    return np.frombuffer(rows, np.int64)


def _u32(column: bytes) -> UInt32s:
    return np.frombuffer(column, np.uint32)


def _counts(counts: bytes, num: int) -> Int64s:
    return _u32(counts).astype(np.int64) if counts else np.ones(num, np.int64)
