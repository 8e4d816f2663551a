"""The memory of prefixes against ordered dictionaries, its loops in C and in numpy alike."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles.prefix_memory import ReferenceTable

from slipstream import compiled
from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.prefix_memory import SET_SIZE, PrefixMemory
from slipstream.client.placing.prompt_keys import text_key
from slipstream.client.placing.rendezvous import mix64

MASK = 2**64 - 1
SALTS = [0, 1, 2**64 - 1]
CHAINS = st.lists(st.integers(-40, 40), max_size=12, unique=True)
OPERATIONS = st.lists(st.tuples(CHAINS, st.sampled_from(SALTS), st.booleans()), max_size=40)


class DictTable:
    """Sets of entries as ordered dictionaries."""

    def __init__(self, num_sets: int) -> None:
        self.sets: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(num_sets)]

    def remember(self, chain: list[int], salt: int, now: float) -> None:
        """Put the hashes in, the longest beginning's first."""
        for value in reversed(chain):
            entries, tag = self._at(value, salt)
            entries[tag] = now
            entries.move_to_end(tag)
            if len(entries) > SET_SIZE:
                entries.popitem(last=False)

    def known(self, chain: list[int], salt: int, since: float) -> int:
        """The number of hashes of the longest beginning sent after `since`."""
        depths = [0]
        for depth, value in enumerate(chain, 1):
            entries, tag = self._at(value, salt)
            if entries.get(tag, since) > since:
                depths.append(depth)
        return max(depths)

    def _at(self, value: int, salt: int) -> tuple[OrderedDict[int, float], int]:
        tag = int(mix64(np.array([(value & MASK) ^ salt], np.uint64))[0])
        return self.sets[tag % len(self.sets)], tag


@given(OPERATIONS, st.sampled_from([1, 2, 4]))
def test_both_tables_are_dictionaries_in_order_of_use(
    operations: list[tuple[list[int], int, bool]], num_sets: int
) -> None:
    tables: list[Any] = [ReferenceTable, compiled]
    oracle = DictTable(num_sets)
    columns = [
        (np.zeros((num_sets, SET_SIZE), np.uint64), np.full((num_sets, SET_SIZE), -np.inf))
        for _ in tables
    ]
    for now, (values, salt, is_update) in enumerate(operations):
        chain = np.array(values, np.int64)
        if is_update:
            oracle.remember(values, salt, now)
        since = [float("-inf"), now / 2, now - 1.0]
        expected = [oracle.known(values, salt, time) for time in since]
        for table, (tags, times) in zip(tables, columns, strict=True):
            if is_update:
                table.remember_chain(tags, times, chain, salt, float(now))
            assert table.known_depths(tags, times, chain, [salt] * len(since), since) == expected
    for tags, times in columns:
        assert (tags == columns[0][0]).all()
        assert (times == columns[0][1]).all()


def test_beginnings_are_known_of_the_member_they_were_sent_to() -> None:
    memory = PrefixMemory(2**10)
    one, other = MemberLoad(b"one"), MemberLoad(b"other")
    memory.remember(text_key(b"a" * 5000, b"m"), one, 1.0)
    longer = text_key(b"a" * 9000, b"m")
    assert memory.known(longer, [one, other]) == [9 * 128, 0]
    assert memory.known(text_key(b"a" * 1024 + b"b" * 5000, b"m"), [one]) == [256]
    assert memory.known(text_key(b"", b"m"), [one]) == [0]
    one.note_load(10.0, running=0, queued_tokens=0, kept_since_s=9.5)
    assert memory.known(longer, [one]) == [9 * 128]
    one.note_load(10.0, running=0, queued_tokens=0, kept_since_s=8.5)
    assert memory.known(longer, [one]) == [0]


def test_a_capacity_is_a_power_of_two() -> None:
    for capacity in (0, 4, 12, 24):
        with pytest.raises(ValueError, match="power of two"):
            PrefixMemory(capacity)


def test_the_table_in_c_refuses_what_does_not_fit() -> None:
    tags, times = np.zeros((2, SET_SIZE), np.uint64), np.zeros((2, SET_SIZE))
    chain = np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="full sets"):
        compiled.known_depths(tags, times[:1], chain, [1], [0.0])
    with pytest.raises(ValueError, match="full sets"):
        compiled.remember_chain(np.zeros((3, SET_SIZE), np.uint64), np.zeros((3, 8)), chain, 1, 0.0)
    with pytest.raises(ValueError, match="8 bytes"):
        compiled.known_depths(tags, times, np.zeros(3, np.int8), [1], [0.0])
    with pytest.raises(TypeError):
        compiled.known_depths(tags, times, chain, [1], [])
    with pytest.raises(TypeError):
        compiled.known_depths(tags, times, chain, ["1"], [0.0])
    with pytest.raises(OverflowError):
        compiled.remember_chain(tags, times, chain, -1, 0.0)
    with pytest.raises(TypeError):
        compiled.remember_chain(tags, times, chain, 1)
