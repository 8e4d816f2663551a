"""A set of fixed size that forgets the oldest."""

from __future__ import annotations

import secrets
import tracemalloc

from slipstream_worker.streams.tombstones import Tombstones


def test_the_latest_are_known_and_nobody_else():
    stones = Tombstones(64)
    ids = [secrets.token_bytes(16) for _ in range(1000)]
    for at, stream_id in enumerate(ids):
        assert stream_id not in stones
        stones.add(stream_id)
        assert all(known in stones for known in ids[max(0, at - 63) : at + 1])
        assert not any(old in stones for old in ids[: max(0, at - 127)])


def test_adding_again_changes_nothing():
    stones = Tombstones(4)
    ids = [bytes([number]) * 16 for number in range(4)]
    for stream_id in ids:
        stones.add(stream_id)
    for _ in range(100):
        stones.add(ids[-1])
    assert all(stream_id in stones for stream_id in ids)


def test_its_memory_does_not_grow():
    stones = Tombstones(2**10)
    tracemalloc.start()
    try:
        for _ in range(5000):
            stones.add(secrets.token_bytes(16))
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20_000):
            stones.add(secrets.token_bytes(16))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096


def test_the_most_moves_of_an_id_are_known_as_long_as_the_id():
    stones = Tombstones(4)
    for number in range(40):
        stream_id = bytes([number]) * 16
        assert stones.moves_of(stream_id) == -1
        for moves in (2, 2**32 - 1, 7):
            stones.add(stream_id, moves)
        stones.add(bytes([100 + number]) * 16)
        assert stones.moves_of(stream_id) == 2**32 - 1
        assert stones.moves_of(bytes([100 + number]) * 16) == 0
