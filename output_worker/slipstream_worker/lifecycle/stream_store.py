"""Groups what a worker knows of its streams, for the parts that share it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.streams.retention import Retention
from slipstream_worker.streams.stream import WorkerStreamTable
from slipstream_worker.streams.stream_columns import StreamColumns


@dataclass(frozen=True, slots=True)
class StreamStore:
    """The streams, their tokens by row, their readers, and for how long each is kept."""

    table: WorkerStreamTable
    columns: StreamColumns
    readers: StreamReaders
    retention: Retention
