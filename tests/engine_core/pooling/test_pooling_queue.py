"""Which sequences a step takes: all of them once, in turns, within its bounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.pooling.pooling_queue import PoolingQuery, PoolingQueue
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Pool

WORKER = b"worker-0"


def query(
    number: int, lens: list[int], *, tenant: bytes = b"", call: bytes = b"", strikes: int = 0
) -> PoolingQuery:
    ids = np.arange(sum(lens), dtype=np.uint32) + 1000 * number
    pool = Pool(
        number,
        number.to_bytes(16, "big"),
        pack_u32(ids),
        pack_u32(lens),
        0,
        None,
        call,
        tenant,
        strikes,
    )
    return PoolingQuery(WORKER, pool)


def taken(queue: PoolingQueue) -> list[tuple[int, int]]:
    step = queue.next_step()
    return [] if step is None else [(each.pool.number, index) for each, index in step.entries]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=5),
            st.integers(0, 2),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.integers(1, 20),
    st.integers(1, 6),
)
def test_every_sequence_is_computed_once(
    asked: list[tuple[list[int], int, int, bool]], max_tokens: int, max_sequences: int
) -> None:
    queue = PoolingQueue(max_tokens, max_sequences)
    queries = [
        query(at, lens, tenant=b"%d" % tenant, call=b"%d" % call, strikes=int(is_suspect))
        for at, (lens, tenant, call, is_suspect) in enumerate(asked)
    ]
    for each in queries:
        queue.add(each)
        queue.add(each)  # asked again: the same one
    assert queue.num_tokens == sum(sum(lens) for lens, *_ in asked)
    found: Counter[tuple[int, int]] = Counter()
    while (step := queue.next_step()) is not None:
        entries = [(each.pool.number, index) for each, index in step.entries]
        found.update(entries)
        if any(each.pool.strikes for each, _ in step.entries):
            assert len({number for number, _ in entries}) == 1
        else:
            assert len(entries) == 1 or step.num_tokens <= max_tokens
            assert len(entries) <= max_sequences
    expected = [(at, index) for at, (lens, *_) in enumerate(asked) for index in range(len(lens))]
    assert found == Counter(expected)
    assert queue.num_tokens == 0


def test_calls_take_turns_within_a_tenant() -> None:
    queue = PoolingQueue(2, 8)
    queue.add(query(1, [1] * 6, call=b"long"))
    queue.add(query(2, [1], call=b"short"))
    assert taken(queue) == [(1, 0), (2, 0)]
    assert taken(queue) == [(1, 1), (1, 2)]


def test_tenants_take_turns_however_many_calls_they_have() -> None:
    queue = PoolingQueue(4, 8)
    for number in range(6):
        queue.add(query(number, [1], tenant=b"many", call=b"%d" % number))
    queue.add(query(9, [1, 1], tenant=b"few", call=b"x"))
    assert taken(queue) == [(0, 0), (9, 0), (1, 0), (9, 1)]


def test_a_sequence_longer_than_a_step_is_a_step_of_its_own() -> None:
    queue = PoolingQueue(4, 8)
    queue.add(query(1, [3, 9, 1]))
    assert [taken(queue) for _ in range(4)] == [[(1, 0)], [(1, 1)], [(1, 2)], []]


def test_what_is_not_asked_any_more_is_not_computed() -> None:
    queue = PoolingQueue(100, 8)
    first, second = query(1, [2, 2]), query(2, [3])
    queue.add(first)
    queue.add(second)
    queue.drop_number(WORKER, 1)
    assert taken(queue) == [(2, 0)]
    assert queue.num_queries == 1
    queue.drop_of(WORKER)
    assert queue.num_queries == 0
    assert second.is_over


def test_suspects_come_first_and_alone() -> None:
    queue = PoolingQueue(100, 8)
    queue.add(query(1, [1]))
    queue.add(query(2, [1, 1], strikes=1))
    queue.add(query(3, [1], strikes=1))
    assert [taken(queue) for _ in range(3)] == [[(2, 0), (2, 1)], [(3, 0)], [(1, 0)]]
