"""The simulated replica: its queue, its cache and its clock."""

from __future__ import annotations

import pytest

from slipstream.fleet.member_load import MemberLoad
from slipstream_bench.fleet.chat_workload import CHUNK, ChatWorkload
from slipstream_bench.fleet.replica import (
    CACHE_CHUNKS,
    SLICE_S,
    SimulatedReplica,
    SimulatedRequest,
)


def _request(workload, conversation, now=0.0):
    key, answer_len = workload.turn(conversation)
    sent = MemberLoad(b"r").note_sent(key.prompt_len, now)
    return SimulatedRequest(conversation, key, answer_len, 0, 0, now, sent)


def _run(replica, seconds, begin=0.0):
    ended = []
    for step in range(round(seconds / SLICE_S)):
        replica.run(begin + step * SLICE_S, lambda request, now: ended.append((request, now)))
    return ended


def test_a_request_takes_its_prompt_and_its_answer():
    workload, replica = ChatWorkload(1, is_popular=False), SimulatedReplica(b"r")
    request = _request(workload, workload.conversation())
    replica.submit(request)
    assert replica.queued_tokens == request.key.prompt_len
    [(ended, now)] = _run(replica, 60.0)
    assert ended is request
    assert request.started_at == pytest.approx(request.key.prompt_len / 20_000, abs=SLICE_S)
    assert now == pytest.approx(request.answer_len * 0.01204, abs=3 * SLICE_S)
    assert replica.queued_tokens == replica.num_running == 0


def test_the_next_turn_finds_the_one_before_in_the_cache():
    workload, replica = ChatWorkload(1, is_popular=False), SimulatedReplica(b"r")
    conversation = workload.conversation()
    replica.submit(_request(workload, conversation))
    _run(replica, 60.0)
    prior_len = conversation.length
    request = _request(workload, conversation)
    replica.submit(request)
    assert request.expected == request.key.prompt_len - prior_len // CHUNK * CHUNK
    _run(replica, 0.1, 60.0)
    assert request.cached == prior_len // CHUNK * CHUNK


def test_the_cache_is_bounded_and_tells_how_long_it_keeps():
    workload, replica = ChatWorkload(1, is_popular=False), SimulatedReplica(b"r")
    load = MemberLoad(b"r")
    first = _request(workload, workload.conversation())
    replica.submit(first)
    _run(replica, 60.0)
    replica.tell(load, 60.0)
    assert load.kept_since == float("-inf")
    assert replica.cached_tokens(first.key.chunks)
    for number in range(1, 1 + CACHE_CHUNKS // 4):
        replica.submit(_request(workload, workload.conversation()))
        _run(replica, 1.0, 60.0 + number)
    replica.tell(load, 60.0 + number)
    assert load.kept_since > 0.0
    assert replica.cached_tokens(first.key.chunks[-1:]) == 0


def test_a_lost_replica_gives_back_what_it_computed():
    workload, replica = ChatWorkload(1, is_popular=False), SimulatedReplica(b"r")
    request = _request(workload, workload.conversation())
    replica.submit(request)
    _run(replica, 0.5)
    assert replica.lose_all() == [request]
    assert 0 < request.produced < request.answer_len
    assert replica.num_running == replica.cached_tokens(request.key.chunks) == 0
