"""How long ended streams are kept, and what is known of those that are gone."""

from __future__ import annotations

import secrets
from math import inf

import pytest

from slipstream_worker.streams import retention as module
from slipstream_worker.streams.retention import ABORTED, Retention
from slipstream_worker.streams.stream import Stage, WorkerStream, WorkerStreamTable


def ended(streams: WorkerStreamTable, keeping: Retention, num_bytes: int = 100) -> WorkerStream:
    stream = WorkerStream(secrets.token_bytes(16), Stage.ENDED, worker_row=1)
    streams.add(stream)
    keeping.ended(stream, num_bytes)
    return stream


def test_one_that_nobody_acknowledges_keeps_no_others() -> None:
    streams = WorkerStreamTable()
    keeping = Retention(streams, grace_s=60.0)
    stuck = ended(streams, keeping)
    assert stuck.expires_at == inf
    for _ in range(100):
        stream = ended(streams, keeping)
        keeping.expire_at(stream, keeping.now)
        assert keeping.take_due() == [stream]
        keeping.removed(stream)
    assert list(keeping._ended) == [stuck]


def test_the_oldest_that_nobody_waits_for_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ENDED_BYTES", 250)
    streams = WorkerStreamTable()
    keeping = Retention(streams, grace_s=60.0)
    waited_for, *others = [ended(streams, keeping) for _ in range(4)]
    for stream in others:
        keeping.expire_after_grace(stream)
    assert keeping.take_due() == others[:2]
    assert keeping.take_due() == []
    keeping.now = 61.0
    assert keeping.take_due() == others[2:]
    assert waited_for.expires_at == inf


def test_it_is_known_why_a_stream_is_gone() -> None:
    streams = WorkerStreamTable()
    keeping = Retention(streams, grace_s=0.0)
    stream = ended(streams, keeping)
    keeping.expire_after_grace(stream)
    assert keeping.why_gone(stream.stream_id) is None
    keeping.take_due()
    assert keeping.why_gone(stream.stream_id) is not None
    assert keeping.why_gone(stream.stream_id, 1) is None
    other = ended(streams, keeping)
    keeping.aborted(other)
    assert keeping.why_gone(other.stream_id) == ABORTED
    assert keeping.why_gone(secrets.token_bytes(16)) is None
    for moves in (0, 3):
        keeping.add_tombstone(b"16 random bytes.", moves)
    known = [m for m in range(5) if keeping.why_gone(b"16 random bytes.", m) is not None]
    assert known == [0, 3]
