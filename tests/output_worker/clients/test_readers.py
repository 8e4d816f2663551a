"""Which clients' ports are due when rows have new tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.helpers.admits import admit_of

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Rejected, SamplingParams
from slipstream_ipc.row_set import RowSet
from slipstream_worker.clients import readers
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.retention import Retention
from slipstream_worker.streams.stream import ResumePoint, Stage, WorkerStream, WorkerStreamTable
from slipstream_worker.streams.stream_columns import StreamColumns

FACTORY = TableDetokenizerFactory(
    TokenTable(mode="bytelevel", pieces=[b"", b"a", b"\xc3", b"\xa9"], special=[])
)
START = ResumePoint(0, 0)


class Front:
    """An acceptor that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def send(self, session: Any, body: Any, receipt: Any) -> bool:
        self.sent.append((session.identity, body))
        return True


class World:
    def __init__(self, num_clients: int) -> None:
        self.front: Any = Front()
        self.columns = StreamColumns(FACTORY.fast_table)
        retention = Retention(WorkerStreamTable(), 60.0)
        self.readers = StreamReaders(
            self.front, self.columns, FACTORY, RequestCounters(), retention, max_unacked=None
        )
        self.streams = [self.attached(b"%d" % number) for number in range(num_clients)]
        self.readers.flush()

    def attached(self, client: bytes) -> WorkerStream:
        """A client's only stream."""
        link = SimpleNamespace(has_credit=True, num_unacked=0, take_receipts=list)
        session: Any = SimpleNamespace(identity=client, is_open=True, link=link)
        self.readers.attach_client(session)
        admit = admit_of(client, pack_u32([1]), SamplingParams(), (), 0, 100)
        stream = WorkerStream(client, Stage.RUNNING, registration=admit)
        stream.output = open_output(admit, FACTORY)
        self.columns.open(stream, admit)
        self.readers.read(stream, client, 7, START)
        return stream

    def step(self, numbers: list[int], token_id: int) -> list[bytes]:
        """A token of these streams; the clients that are sent something."""
        rows = RowSet(np.array([self.streams[n].worker_row for n in numbers], np.int64))
        for at in self.columns.append(rows, None, np.full(len(rows), token_id, np.uint32)):
            stream = self.streams[numbers[at]]
            self.columns.make_slow(stream, self.columns.num_tokens(stream) - 1)
            assert stream.output is not None
            stream.output.push([token_id])
        self.readers.mark_due(rows.array)
        self.front.sent.clear()
        self.readers.flush()
        return sorted(client for client, _ in self.front.sent)


@pytest.mark.parametrize("num_clients", [3, 20])
def test_clients_with_news_are_sent_it(num_clients: int) -> None:
    world = World(num_clients)
    assert world.step([0, 2], 1) == [b"0", b"2"]
    assert world.step([1], 1) == [b"1"]
    gone = world.streams[2]
    assert world.readers.remove(b"2") == [gone]
    assert world.step([1, 2], 1) == [b"1"]
    world.readers.read(gone, b"0", 8, START)  # another client takes it over
    assert world.step([2], 1) == [b"0"]


def test_a_stream_is_fast_from_its_first_token() -> None:
    world = World(1)
    [stream] = world.streams
    assert world.columns.is_fast[stream.worker_row]
    assert world.step([0], 1) == [b"0"]
    assert world.columns.is_fast[stream.worker_row]
    assert world.step([0], 2) == []
    assert not world.columns.is_fast[stream.worker_row]
    assert world.step([0], 3) == [b"0"]
    assert world.columns.is_fast[stream.worker_row]


def test_an_output_that_cannot_be_made_again_ends_its_reader_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It failed as the stream ended, outside of what a stream's own failure is caught by."""
    world = World(2)
    stream = world.streams[0]
    world.readers.read(stream, b"1", 8, ResumePoint(5, 5))  # of which this worker has nothing yet

    def broken(*_: Any) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "no")

    monkeypatch.setattr(readers, "locate", broken)
    world.front.sent.clear()
    world.readers.ended(stream)
    world.readers.flush()
    [rejected] = [body for client, body in world.front.sent if client == b"1"]
    assert isinstance(rejected, Rejected)
    assert (rejected.handle, rejected.fault.code) == (8, "engine")
    assert stream.reader is None
    assert world.step([1], 1) == [b"1"]
