"""Which tokens may end a stream by what its worker finds, against a look at each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.admits import admit_of

from slipstream_core.workers.possible_ends import PossibleEnds
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, RepetitionDetection, SamplingParams
from slipstream_ipc.row_set import RowSet

ROWS = 5
ANY = [
    SamplingParams(stop="\n"),
    SamplingParams(stop=("a", "b")),
    SamplingParams(repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3)),
]
IDS = st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1))
STOP_IDS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 200_000)), max_size=3).map(tuple)
PARAMS = st.one_of(st.just(SamplingParams()), st.just(SamplingParams()), st.sampled_from(ANY))
STREAMS = st.none() | st.tuples(PARAMS, STOP_IDS)


def _admit(params: SamplingParams, stop_token_ids: tuple[int, ...]) -> Admit:
    return admit_of(bytes(16), pack_u32([1]), params, stop_token_ids, 0, 10)


@given(st.data())
def test_it_is_what_each_row_says(data: st.DataObject) -> None:
    possible_ends = PossibleEnds(rows=1)
    streams: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}
    rows = RowSet(np.arange(ROWS))
    for _ in range(data.draw(st.integers(1, 8))):
        row, stream = data.draw(st.integers(0, ROWS - 1)), data.draw(STREAMS)
        if stream is None:
            possible_ends.drop(row)
            streams.pop(row, None)
        else:
            possible_ends.add(row, _admit(*stream))
            streams[row] = stream
        if possible_ends.num_rows < ROWS:
            possible_ends.grow(ROWS)
        counts = data.draw(st.none() | st.lists(st.integers(1, 3), min_size=ROWS, max_size=ROWS))
        num = ROWS if counts is None else sum(counts)
        ids = data.draw(st.lists(IDS, min_size=num, max_size=num))
        own = np.repeat(np.arange(ROWS), 1 if counts is None else counts).tolist()
        expected = any(
            streams[row][0] != SamplingParams() or token_id in streams[row][1]
            for row, token_id in zip(own, ids, strict=True)
            if row in streams
        )
        if counts is not None:  # rows of a step of several tokens to each have no set of their own
            rows = RowSet(np.arange(ROWS))
        found = possible_ends.are_among(
            rows, None if counts is None else np.array(counts), np.array(ids, np.uint32)
        )
        assert found == expected


def test_nothing_is_left_of_streams_that_are_over() -> None:
    possible_ends = PossibleEnds()
    for row in range(3):
        possible_ends.add(row, _admit(SamplingParams(), (7, row)))
    for row in range(3):
        possible_ends.drop(row)
        possible_ends.drop(row)
    assert not possible_ends._num_rows_of
    assert not possible_ends._is_stop_id.any()
