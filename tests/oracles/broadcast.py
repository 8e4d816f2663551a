"""A broadcast that writes every entry in Python."""

from __future__ import annotations

from slipstream.delta_batch import DeltaBatch
from slipstream.http.answers.broadcast import Broadcast, BroadcastStream


class PythonBroadcast(Broadcast):
    """The same bytes to each connection."""

    def _write_batch(self, streams: list[BroadcastStream], batch: DeltaBatch) -> None:
        self._write_entries(streams, batch, range(len(batch.message.texts)))
