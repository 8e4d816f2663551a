"""The token ids that each stream has received, by handle. A resubmission needs them.

- Adding a message costs the same for one entry as for a thousand: its columns are stored as they
  are, and sorted by stream once many have accumulated, or on lookup.
- Messages of the same streams that a `DeltaRelay` adds share a run, in which their ids lie one
  behind another.
- Only opened handles are kept, so a stream resumed in the middle costs nothing. A handle is opened
  before its first ids arrive.
- Where handles are too far apart for the C (`received_rows.c`), numpy sorts.
- Handles increase. Where they wrap around, pending columns are sorted first, so that a stream does
  not inherit the ids of an earlier one with the same handle.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.compiled import add_received_ids
from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.columns import u32

MOST_BYTES = 2**17  # of unsorted ids
_MOST_MESSAGES = 2**12
_RADIX = 2**16  # numpy sorts 16-bit keys by counting, which is several times quicker


class ReceivedIds:
    """Token ids by client handle."""

    def __init__(self) -> None:
        self._recent: list[tuple[bytes, bytes, bytes]] = []  # handles, ids, counts of a message
        # handles, and ids and counts of the latest messages for them; see `begin_run`
        self.run: tuple[bytes, bytearray, bytearray] | None = None
        self._num_bytes = 0
        self._sorted: dict[int, bytearray] = {}
        self._last_opened = -1

    def open(self, handle: int) -> None:
        """Keep this stream's ids from now on."""
        if handle <= self._last_opened:
            self._sort()
        self._last_opened = max(self._last_opened, handle)
        self._sorted[handle] = bytearray()

    def drop(self, handle: int) -> None:
        """Keep this stream's ids no longer. Idempotent."""
        self._sorted.pop(handle, None)

    def add(self, handles: bytes, token_ids: bytes, counts: bytes = b"") -> None:
        """Add u32 columns in order of arrival. counts: ids to a handle; empty means one each."""
        if self.run is not None:
            self._end_run()
        self._append(handles, token_ids, counts)

    def begin_run(self, handles: bytes) -> tuple[bytes, bytearray, bytearray]:
        """A new `run`. As long as it is that, ids and counts of messages for these handles may be
        added to it, up to MOST_BYTES; no counts where each of its messages has one id of each.
        """
        self._end_run()
        self.run = run = handles, bytearray(), bytearray()
        return run

    def of(self, handle: int) -> bytes | None:
        """The stream's ids as a u32 column; None where they are not kept."""
        if handle not in self._sorted:
            return None
        self._sort()
        return bytes(self._sorted[handle])

    def _append(self, handles: bytes, token_ids: bytes, counts: bytes) -> None:
        self._recent.append((handles, token_ids, counts))
        self._num_bytes += len(token_ids)
        if self._num_bytes >= MOST_BYTES or len(self._recent) >= _MOST_MESSAGES:
            self._sort()

    def _end_run(self) -> None:
        if self.run is not None:
            (handles, ids, counts), self.run = self.run, None
            if ids:
                num_messages = len(counts or ids) // len(handles)
                self._append(handles * num_messages, bytes(ids), bytes(counts))

    def _sort(self) -> None:
        self._end_run()
        recent, self._recent = self._recent, []
        self._num_bytes = 0
        if add_received_ids(self._sorted, recent):
            return
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
