"""Ragged log-probability histories against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.logprob_log import LogprobLog
from slipstream_core.runner.plan import Logprobs
from slipstream_ipc.columns import f32, u32
from slipstream_ipc.cursors import Portion

NUM_ROWS = 5


def portion(rows: list[int], starts: list[int], counts: list[int]) -> Portion:
    columns = [np.array(c, np.int64) for c in (rows, starts, counts)]
    return Portion(*columns, np.zeros(len(rows), np.int64))


@settings(max_examples=150, deadline=None)
@given(
    wanted=st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=NUM_ROWS, max_size=NUM_ROWS),
    bases=st.lists(st.integers(0, 70), min_size=NUM_ROWS, max_size=NUM_ROWS),
    steps=st.lists(st.sets(st.integers(0, NUM_ROWS - 1), min_size=1), min_size=1, max_size=80),
    data=st.data(),
)
def test_columns_equal_lists(
    wanted: list[int | None], bases: list[int], steps: list[set[int]], data: st.DataObject
) -> None:
    log = LogprobLog()
    for row, k in enumerate(wanted):
        if k is not None:
            log.open(row, k, bases[row])
    expected: list[list[tuple[list[float], list[int], int]]] = [[] for _ in wanted]
    counter = 0
    for step in steps:
        rows = np.array(sorted(step))
        num = len(rows) + 2  # the step sampled others, too
        values = np.arange(counter, counter + num * 5, dtype=np.float32).reshape(num, 5)
        ids = values.astype(np.uint32) + 7
        ranks = np.arange(counter, counter + num, dtype=np.uint32)
        counter += num * 5
        index = np.arange(len(rows)) + 1
        log.append(rows, Logprobs(values, ids, ranks), index)
        for row, at in zip(rows.tolist(), index.tolist(), strict=True):
            k = wanted[row]
            if k is not None:
                entry = (values[at, : k + 1].tolist(), ids[at, : k + 1].tolist(), int(ranks[at]))
                expected[row].append(entry)
    rows_out, starts, counts = [], [], []
    for row in range(NUM_ROWS):
        have = len(expected[row]) if wanted[row] is not None else 3
        if not have:
            continue
        start = data.draw(st.integers(0, have - 1))
        rows_out.append(row)
        starts.append(bases[row] + start)
        counts.append(data.draw(st.integers(1, have - start)))
    if not rows_out:
        return
    columns = log.columns(portion(rows_out, starts, counts))
    widths = [0 if wanted[row] is None else 1 + wanted[row] for row in rows_out]
    if not any(widths):
        assert columns is None
        return
    assert columns is not None
    if columns.widths:
        assert u32(columns.widths).tolist() == widths
    else:
        assert {columns.width} == set(widths)
    flat = []
    for row, start, count in zip(rows_out, starts, counts, strict=True):
        if wanted[row] is not None:
            flat += expected[row][start - bases[row] :][:count]
    assert f32(columns.values).tolist() == [v for values, _, _ in flat for v in values]
    assert u32(columns.ids).tolist() == [i for _, ids, _ in flat for i in ids]
    assert u32(columns.ranks).tolist() == [rank for _, _, rank in flat]


def test_a_dropped_row_can_be_opened_again_at_another_width() -> None:
    log = LogprobLog()
    row = np.array([3])
    log.open(3, 1, 10)
    log.append(row, Logprobs(np.ones((1, 4), np.float32), np.ones((1, 4), np.uint32), row), row * 0)
    log.drop(3)
    assert log.columns(portion([3], [10], [1])) is None
    log.open(3, 3, 0)
    log.append(row, Logprobs(np.ones((1, 4), np.float32), np.ones((1, 4), np.uint32), row), row * 0)
    columns = log.columns(portion([3], [0], [1]))
    assert columns is not None
    assert columns.width == 4
