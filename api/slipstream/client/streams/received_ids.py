"""The token ids that each stream has received, kept until it is over: what a resubmission needs.

Owns: those ids, by the streams' handles. Does not know: streams, their ends, what ids mean.

Rules:
- Taking in a message costs the same for one entry and for a thousand: its columns are put aside as
  they are, and sorted by stream when many have come together, or when somebody asks.
- Only a stream that was opened is kept, so that one that began in the middle costs nothing. What
  comes for a handle comes after it was opened.
- Handles grow. Where they begin anew, what was put aside is sorted first, or a stream could inherit
  the ids of an earlier one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_ipc.columns import UInt32s, u32

_MOST_BYTES = 2**17  # of ids put aside
_MOST_MESSAGES = 2**12
_RADIX = 2**16  # numpy sorts 16-bit keys by counting, which is several times quicker


class ReceivedIds:
    """Ids by handle."""

    def __init__(self) -> None:
        self._recent: list[tuple[bytes, bytes, bytes]] = []  # handles, ids, counts of a message
        self._num_bytes = 0
        self._sorted: dict[int, bytearray] = {}
        self._last_opened = -1

    def open(self, handle: int) -> None:
        """Keep this stream's ids from now on."""
        if handle <= self._last_opened:
            self._sort()
        self._last_opened = handle
        self._sorted[handle] = bytearray()

    def drop(self, handle: int) -> None:
        """Keep this stream's ids no longer. Idempotent."""
        self._sorted.pop(handle, None)

    def add(self, handles: bytes, token_ids: bytes, counts: bytes = b"") -> None:
        """Columns of ids received, in their order; `counts` to a handle, empty: one each."""
        self._recent.append((handles, token_ids, counts))
        self._num_bytes += len(token_ids)
        if self._num_bytes >= _MOST_BYTES or len(self._recent) >= _MOST_MESSAGES:
            self._sort()

    def of(self, handle: int) -> bytes | None:
        """The stream's ids, a u32 column; None where they are not kept."""
        if handle not in self._sorted:
            return None
        self._sort()
        return bytes(self._sorted[handle])

    def _sort(self) -> None:
        recent, self._recent = self._recent, []
        self._num_bytes = 0
        handles = u32(b"".join([message[0] for message in recent]))
        if any(counts for _, _, counts in recent):
            handles = np.repeat(handles, np.concatenate([_counts(each) for each in recent]))
        if not len(handles):
            return
        order = _order(handles)
        handles = handles[order]
        ids = memoryview(u32(b"".join([message[1] for message in recent]))[order].tobytes())
        begins = np.flatnonzero(np.diff(handles, prepend=handles[0] ^ 1))
        ends = 4 * np.append(begins[1:], len(handles))
        for handle, begin, end in zip(
            handles[begins].tolist(), (4 * begins).tolist(), ends.tolist(), strict=True
        ):
            kept = self._sorted.get(handle)
            if kept is not None:
                kept += ids[begin:end]


def _counts(message: tuple[bytes, bytes, bytes]) -> UInt32s:
    handles, _, counts = message
    return u32(counts) if counts else np.ones(len(handles) // 4, np.uint32)


def _order(handles: UInt32s) -> npt.NDArray[np.intp]:
    low = handles.min()
    if int(handles.max()) - int(low) < _RADIX:
        return np.argsort((handles - low).astype(np.uint16), kind="stable")
    return np.argsort(handles, kind="stable")
