"""How long ended streams are kept, and what is known of those that are gone."""

from __future__ import annotations

import secrets
from math import inf

import pytest

from slipstream_ipc.messages import RequestSpec, SamplingParams
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
    other = WorkerStream(secrets.token_bytes(16), Stage.RENDERING)
    keeping.aborted(other)
    assert keeping.why_gone(other.stream_id) == ABORTED
    assert keeping.why_gone(secrets.token_bytes(16)) is None
    keeping.add_tombstone(b"16 random bytes.", 3)
    known = [m for m in range(5) if keeping.why_gone(b"16 random bytes.", m) is not None]
    assert known == [0, 1, 2, 3]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_only_its_own_scope_is_told_that_a_stream_is_gone(*, is_aborted: bool) -> None:
    streams = WorkerStreamTable()
    keeping = Retention(streams, grace_s=0.0)
    stream = ended(streams, keeping)
    stream.asked = RequestSpec(SamplingParams(), scope=b"one")
    if is_aborted:
        keeping.aborted(stream)
    else:
        keeping.expire_after_grace(stream)
        keeping.take_due()
    assert keeping.why_gone(stream.stream_id) is not None, "whoever submits it is told"
    assert keeping.has_been(stream.stream_id, b"one")
    assert not keeping.has_been(stream.stream_id, b"other")
    assert not keeping.has_been(stream.stream_id)


def test_of_an_earlier_workers_streams_only_those_without_a_scope_are_told() -> None:
    keeping = Retention(WorkerStreamTable(), grace_s=0.0)
    keeping.add_tombstone(b"f" * 16)
    assert keeping.has_been(b"f" * 16)
    assert not keeping.has_been(b"f" * 16, b"one")


def test_a_stream_that_is_left_and_come_back_to_very_often_costs_no_more() -> None:
    streams = WorkerStreamTable()
    keeping = Retention(streams, grace_s=60.0)
    stream, other = ended(streams, keeping), ended(streams, keeping)
    keeping.expire_after_grace(other)
    for _ in range(10_000):
        keeping.expire_after_grace(stream)
        stream.expires_at = inf
    assert len(keeping._expiring) < 2000
    keeping.now = 61.0
    assert keeping.take_due() == [other]


def test_one_that_goes_on_has_time_to_be_come_back_to() -> None:
    streams = WorkerStreamTable()
    keeping = Retention(streams, grace_s=0.0)
    running = WorkerStream(secrets.token_bytes(16), Stage.RUNNING, worker_row=1)
    streams.add(running)
    keeping.expire_after_grace(running)
    assert keeping.take_due() == []
    keeping.now = module.MIN_UNREAD_S
    assert keeping.take_due() == [running]
