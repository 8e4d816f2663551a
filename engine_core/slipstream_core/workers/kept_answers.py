"""The kept answers of all workers, held for their successors. Pure.

A worker decides what is kept and keeps within the bound itself; here the bound only protects the
core, which gives up the oldest beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream_ipc.messages import KEPT_ENTRY_BYTES, KeptEntry


class KeptAnswersByWorker:
    """Kept answers by stream id, oldest first, with the worker that each belongs to."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_id: dict[bytes, tuple[bytes, KeptEntry]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """The size of the held answers."""
        return self._num_bytes

    def of_worker(self, worker: bytes) -> dict[bytes, KeptEntry]:
        """A worker's answers by stream id, oldest first."""
        return {id_: entry for id_, (owner, entry) in self._by_id.items() if owner == worker}

    def put(self, worker: bytes, entry: KeptEntry) -> None:
        """Hold an answer. Idempotent; ignored where the id is another worker's."""
        owner, _ = self._by_id.get(entry.stream_id, (worker, None))
        if owner != worker:
            return
        self.drop(worker, [entry.stream_id])
        self._by_id[entry.stream_id] = worker, entry
        self._num_bytes += _num_bytes(entry)
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._by_id))
            self._num_bytes -= _num_bytes(self._by_id.pop(oldest)[1])

    def drop(self, worker: bytes, stream_ids: Iterable[bytes]) -> None:
        """Drop those of these answers that are the worker's."""
        for stream_id in stream_ids:
            owner, entry = self._by_id.get(stream_id, (b"", None))
            if entry is not None and owner == worker:
                del self._by_id[stream_id]
                self._num_bytes -= _num_bytes(entry)


def _num_bytes(entry: KeptEntry) -> int:
    return len(entry.answer) + KEPT_ENTRY_BYTES
