"""Converts the columns of messages to numpy views and back, and checks that their lengths agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.arrays import Float32s, UInt32s
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    MAX_CALLS,
    TEXT_KINDS,
    Admit,
    Deltas,
    LogprobColumns,
    Report,
    Step,
)

_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")
_U64 = np.dtype("<u8")

_KINDS = (0, *sorted(TEXT_KINDS))


def pack_u32(values: npt.ArrayLike) -> bytes:
    """A u32 column of integers in [0, 2**32)."""
    return np.asarray(values).astype(_U32, copy=False).tobytes()


def pack_f32(values: npt.ArrayLike) -> bytes:
    """An f32 column."""
    return np.asarray(values).astype(_F32, copy=False).tobytes()


def pack_u64(values: npt.ArrayLike) -> bytes:
    """A u64 column."""
    return np.asarray(values, np.uint64).astype(_U64, copy=False).tobytes()


def u32(column: bytes, name: str = "column", length: int | None = None) -> UInt32s:
    """A read-only view of a u32 column. Raises: ProtocolError unless it has `length` entries."""
    if len(column) % 4 if length is None else len(column) != 4 * length:
        _check_length(column, name, -1 if length is None else length)
    return np.frombuffer(column, _U32)


def f32(column: bytes, name: str = "column", length: int | None = None) -> Float32s:
    """A read-only view of an f32 column. Raises: ProtocolError unless it has `length` entries."""
    return _view(column, _F32, name, length)


def u64(column: bytes, name: str = "column", length: int | None = None) -> npt.NDArray[np.uint64]:
    """A read-only view of a u64 column. Raises: ProtocolError unless it has `length` entries."""
    return _view(column, _U64, name, length)


def check_report(report: Report) -> None:
    """Raise ProtocolError if a Report's columns do not fit each other."""
    if report.rows or report.num_tokens:  # most reports have none
        u32(report.num_tokens, "num_tokens", len(u32(report.rows, "rows")))


def check_step(step: Step) -> None:
    """Raise ProtocolError if a Step's columns do not fit each other."""
    total = num_rows = len(step.rows) // 4
    _check_length(step.rows, "rows", num_rows)
    if step.counts:
        total = int(u32(step.counts, "counts", num_rows).sum())
        _check_length(step.starts, "starts", num_rows)
    else:
        _check_length(step.starts, "starts without counts", 0)
    _check_length(step.token_ids, "token_ids", total)
    if step.logprobs is not None:
        _check_logprobs(step.logprobs, step.counts, num_rows)


def check_entry(logprobs: LogprobColumns, num_tokens: int, width: int) -> None:
    """Raise ProtocolError unless there is one entry, of `num_tokens` with `width` values each."""
    if logprobs.width != width or logprobs.widths:
        raise ProtocolError(f"logprobs.width: got {logprobs.width}, expected {width}")
    _check_logprobs(logprobs, pack_u32([num_tokens]), 1)


def check_even(columns: LogprobColumns, num_tokens: int) -> None:
    """Raise ProtocolError unless these are the columns of so many tokens of one width."""
    num_values = num_tokens * columns.width
    _check_length(columns.values, "logprobs.values", num_values)
    _check_length(columns.ids, "logprobs.ids", num_values)
    _check_length(columns.ranks, "logprobs.ranks", num_tokens)


def num_scored(admit: Admit) -> int:
    """The number of a registration's last output tokens that have log-probabilities."""
    if admit.begun.logprobs is None:
        return 0
    return min(len(admit.begun.logprobs.ranks), len(admit.begun.output_ids)) // 4


def check_deltas(deltas: Deltas) -> None:
    """Raise ProtocolError if the columns of Deltas do not fit each other."""
    num = len(deltas.texts)
    u32(deltas.handles, "handles", num)
    u32(deltas.chars, "chars", num)
    u32(deltas.tokens, "tokens", num)
    total = int(u32(deltas.counts, "counts", num).sum()) if deltas.counts else num
    u32(deltas.token_ids, "token_ids", total)
    ended = u32(deltas.ended, "ended", len(deltas.ends))
    if len(ended) and int(ended[-1]) >= num:
        raise ProtocolError(f"ended: index {int(ended[-1])} of {num} entries")
    if (ended[1:] <= ended[:-1]).any():
        raise ProtocolError("ended: indices must increase")
    if deltas.logprobs is not None:
        _check_logprobs(deltas.logprobs, deltas.counts, num)
    if deltas.kinds or deltas.event_entries or deltas.events:
        _check_events(deltas, num)


def _check_events(deltas: Deltas, num: int) -> None:
    kinds = u32(deltas.kinds, "kinds", num if deltas.kinds else 0)
    entries = u32(deltas.event_entries, "event_entries", len(deltas.events))
    if len(entries) and int(entries[-1]) >= num:
        raise ProtocolError(f"event_entries: index {int(entries[-1])} of {num} entries")
    if (entries[1:] <= entries[:-1]).any():
        raise ProtocolError("event_entries: indices must increase")
    if not np.isin(kinds & 0xFF, _KINDS).all() or (kinds >> 8 >= MAX_CALLS).any():
        raise ProtocolError(f"kinds: got {kinds.max()}, expected kinds of text and calls")
    if len(kinds) and kinds[entries].any():
        raise ProtocolError("kinds: not 0 for an entry with events of its own")


def _check_logprobs(columns: LogprobColumns, counts: bytes, num_entries: int) -> None:
    per_entry = u32(counts, "counts", num_entries) if counts else None
    if columns.widths:
        widths = u32(columns.widths, "widths", num_entries)
        of_entry = np.ones(num_entries, _U32) if per_entry is None else per_entry
        total = int((of_entry.astype(np.int64) * widths).sum())
        num_ranks = int(of_entry[widths > 0].sum())
    else:
        if not 0 <= columns.width < 2**32:
            raise ProtocolError(f"logprobs.width: got {columns.width}, expected a u32")
        num_tokens = num_entries if per_entry is None else int(per_entry.sum())
        total = num_tokens * columns.width
        num_ranks = num_tokens if columns.width else 0
    _check_length(columns.values, "logprobs.values", total)
    _check_length(columns.ids, "logprobs.ids", total)
    _check_length(columns.ranks, "logprobs.ranks", num_ranks)


def _view(column: bytes, dtype: np.dtype[Any], name: str, length: int | None) -> npt.NDArray[Any]:
    size = dtype.itemsize
    _check_length(column, name, len(column) // size if length is None else length, size)
    return np.frombuffer(column, dtype)


def _check_length(column: bytes, name: str, length: int, size: int = 4) -> None:
    """Raise ProtocolError unless a column has `length` entries of `size` bytes."""
    if len(column) == length * size:
        return
    if len(column) % size:
        raise ProtocolError(f"{name}: {len(column)} bytes, expected a multiple of {size}")
    raise ProtocolError(f"{name}: {len(column) // size} entries, expected {length}")
