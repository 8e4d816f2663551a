"""A step's rows, divided among the workers that own them."""

from __future__ import annotations

import numpy as np
from tests.helpers.admits import admit_of

from slipstream_core.workers.stream_table import CoreStreamTable
from slipstream_ipc.messages import Admit, SamplingParams
from slipstream_ipc.row_set import RowSet


def admit(number: int) -> Admit:
    return admit_of(number.to_bytes(16, "big"), bytes(4), SamplingParams(), (), 0, 9)


def row_set(*rows: int) -> RowSet:
    return RowSet(np.array(rows, np.int64))


def test_rows_are_divided_by_owner_and_unchanged_sets_are_kept() -> None:
    table = CoreStreamTable()
    streams = [table.add(admit(number), b"ab"[number % 2 :][:1]) for number in range(70)]
    rows = row_set(*range(70))
    parts = dict(table.divided(rows))
    assert [part.tolist() for part in parts.values()] == [[*range(0, 70, 2)], [*range(1, 70, 2)]]
    assert dict(table.divided(rows))[b"a"] is parts[b"a"]
    fewer = dict(table.divided(row_set(*range(69))))
    assert fewer[b"a"] is parts[b"a"], "its rows are the same"
    assert fewer[b"b"].tolist() == [*range(1, 69, 2)]
    table.remove(streams[1])
    assert table.add(admit(99), b"a").row == 1
    again = dict(table.divided(rows))
    assert again[b"a"].tolist() == [0, *range(1, 2), *range(2, 70, 2)]
    assert again[b"b"].tolist() == [*range(3, 70, 2)]


def test_a_row_in_a_new_life_makes_another_set() -> None:
    table = CoreStreamTable()
    first, _ = table.add(admit(1), b"a"), table.add(admit(2), b"b")
    rows = row_set(0, 1)
    before = dict(table.divided(rows))
    table.remove(first)
    table.add(admit(3), b"a")
    after = dict(table.divided(rows))
    assert after[b"a"].tolist() == [0]
    assert after[b"a"].version != before[b"a"].version
    assert after[b"b"] is before[b"b"]
