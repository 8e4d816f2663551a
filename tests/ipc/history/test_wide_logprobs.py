"""Very wide log-probabilities, and prompts', against plain lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_ipc.columns import f32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history import prompt_logprob_log
from slipstream_ipc.history.logprob_log import LogprobLog, Logprobs
from slipstream_ipc.history.prompt_logprob_log import PromptLogprobLog
from slipstream_ipc.history.wide_logprobs import MAX_NARROW, Candidates
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.row_set import RowSet

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


def candidates(first: int, num: int, width: int) -> Candidates:
    values = (first + np.arange(num * width, dtype=np.float32)).reshape(num, width)
    return Candidates(values, values.astype(np.uint32), np.arange(num, dtype=np.uint32) + first)


def values_of(columns: LogprobColumns) -> list[float]:
    found: list[float] = f32(columns.values).tolist()
    assert u32(columns.ids).tolist() == found
    return found


@settings(max_examples=60, deadline=None)
@given(
    wanted=st.lists(
        st.sampled_from([None, 0, 2, MAX_NARROW - 1, MAX_NARROW, 200]), min_size=4, max_size=4
    ),
    steps=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=12),
    data=st.data(),
)
def test_wide_and_narrow_rows_side_by_side(
    wanted: list[int | None], steps: list[set[int]], data: st.DataObject
) -> None:
    """The core's side: what a step gives; then the worker's: what messages carry."""
    core, worker = LogprobLog(), LogprobLog()
    for row, k in enumerate(wanted):
        if k is not None:
            core.open(row, k, 0)
            worker.open(row, k, 0)
    expected: list[list[float]] = [[] for _ in wanted]
    lengths, sent = [0] * 4, [0] * 4
    first = 0
    for step in steps:
        rows = np.array(sorted(step))
        whole = candidates(first, len(rows), 300)
        first += 10_000
        columns = Logprobs(whole.values[:, :MAX_NARROW], whole.ids[:, :MAX_NARROW], whole.ranks)
        core.append(RowSet(rows), columns, np.arange(len(rows)))
        for at in np.flatnonzero(core.is_wide(rows)).tolist():
            core.append_wide(int(rows[at]), whole[at : at + 1])
        for at, row in enumerate(rows.tolist()):
            lengths[row] += 1
            k = wanted[row]
            if k is not None:
                expected[row] += whole.values[at, : 1 + k].tolist()
        if data.draw(st.booleans()):
            some = [row for row in range(4) if lengths[row] > sent[row]]
            starts = np.array([sent[row] for row in some], np.int64)
            counts = np.array([lengths[row] - sent[row] for row in some], np.int64)
            message = core.columns(np.array(some, np.int64), starts, counts)
            if message is not None:
                worker.append_columns(RowSet(np.array(some, np.int64)), counts, message)
            sent = lengths.copy()
    for row, k in enumerate(wanted):
        for log, length in ((core, lengths[row]), (worker, sent[row])):
            found = log.read(row, 0, length)
            if k is None:
                assert found is None
            else:
                assert found is not None
                assert found.width == 1 + k
                assert values_of(found) == expected[row][: length * (1 + k)]
        core.drop(row)
        worker.drop(row)
    assert core.num_pages_used == worker.num_pages_used == 0
    assert not core.has_wide


def test_a_wide_row_costs_what_it_holds() -> None:
    log = LogprobLog()
    log.open(0, 32_000, 0)
    log.append_wide(0, candidates(0, 2, 32_001))
    assert log.num_pages_used == 0
    held = log._wide._rows[0]
    assert held.width * held.ends[-1] == 2 * 32_001
    with pytest.raises(IndexError):
        log.read(0, 1, 3)


@settings(max_examples=60, deadline=None)
@given(
    prompt_len=st.integers(1, 30),
    k=st.sampled_from([0, 3, 100]),
    cuts=st.lists(st.integers(0, 29), max_size=6),
    restart_at=st.integers(0, 6),
    budget=st.sampled_from([1, 100, 5000]),
)
def test_a_prompt_in_pieces_is_the_prompt(
    prompt_len: int, k: int, cuts: list[int], restart_at: int, budget: int
) -> None:
    whole = candidates(0, prompt_len - 1, 1 + k)
    ends = sorted({min(cut, prompt_len - 1) for cut in cuts} | {0, prompt_len - 1})
    spans = list(pairwise(ends))
    sender, receiver = PromptLogprobLog(), PromptLogprobLog()
    for log in (sender, receiver):
        log.open(5, prompt_len, k)
    for start, stop in spans[:restart_at]:  # some of it, then all of it anew
        sender.add(5, start, whole[start:stop])
    for number, (start, stop) in enumerate(spans):
        assert sender.columns(5) is None or restart_at >= len(spans)
        assert sender.add(5, start, whole[start:stop]) == (
            number == len(spans) - 1 and restart_at < len(spans)
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_logprob_log, "MESSAGE_BUDGET_BYTES", budget)
        pieces = list(sender.pieces(5))
    assert pieces[0][0] == 0
    for start, columns in [*pieces[: len(pieces) // 2], *pieces, *pieces]:
        receiver.add_columns(5, start, columns)
    found = receiver.columns(5)
    assert found is not None
    assert values_of(found) == whole.values.reshape(-1).tolist()
    assert u32(found.ranks).tolist() == whole.ranks.tolist()
    assert receiver.num_bytes(5) == 8 * (prompt_len - 1) * (1 + k)
    receiver.drop(5)
    receiver.drop(5)
    assert receiver.columns(5) is None
    assert not list(receiver.pieces(5))


def test_a_piece_that_fits_nowhere_breaks_the_protocol() -> None:
    log = PromptLogprobLog()
    log.open(0, 10, 1)
    log.add(0, 0, candidates(0, 4, 2))
    for start, num in ((3, 1), (5, 1), (4, 6)):
        with pytest.raises(ProtocolError, match="of which 4 are here"):
            log.add(0, start, candidates(0, num, 2))
    other = PromptLogprobLog()
    other.open(0, 5, 2)
    other.add(0, 0, candidates(0, 4, 3))
    [(start, columns)] = other.pieces(0)
    with pytest.raises(ProtocolError, match=r"logprobs\.width"):
        log.add_columns(0, start, columns)
    assert not log.add_columns(7, 0, columns)  # of a row that asked for none
