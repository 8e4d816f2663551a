"""Rows sampled from slices, by ranks that are threads here, against the same rows whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.patience import PATIENCE_S
from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.sampling import slice_sampling
from slipstream_core.sampling.sampler import sample
from slipstream_core.sampling.slice_sampling import SliceSampler
from slipstream_core.sharding.collectives import share_of, slice_of
from slipstream_core.sharding.rank import Rank
from slipstream_core.step.plan import StepFailed, StepPlan

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine


class Meeting:
    """Exchanges of ranks that are threads, for `slice_sampling`."""

    def __init__(self, size: int, vocab_size: int) -> None:
        self.num_gathered = 0  # rows that were brought together
        self._vocab_size = vocab_size
        self._size = size
        self._index = threading.local()
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returns on each rank, or raises."""
        found: list[Any] = [None] * self._size

        def on_rank(index: int) -> None:
            self._index.value = index
            try:
                found[index] = work(index)
            except Exception as error:
                found[index] = error
                if not isinstance(error, StepFailed):
                    self._barrier.abort()

        threads = [threading.Thread(target=on_rank, args=(index,)) for index in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return found

    @property
    def is_first(self) -> bool:
        is_first: bool = self._index.value == 0
        return is_first

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._index.value] = x.clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def gather_over_ranks(self, x: torch.Tensor, width: int) -> torch.Tensor:
        whole = torch.cat(self._all(x), -1)
        assert whole.shape[-1] == width
        if width == self._vocab_size:
            self.num_gathered = len(whole)
        return whole

    def ids_from_lead(self, ids: torch.Tensor) -> None:
        ids.copy_(self._all(ids)[0])


@contextmanager
def meeting_of(size: int, vocab_size: int) -> Iterator[Meeting]:
    meeting = Meeting(size, vocab_size)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("gather_over_ranks", "ids_from_lead"):
            monkeypatch.setattr(slice_sampling, name, getattr(meeting, name))
        yield meeting


def as_sent(plan: StepPlan, index: int) -> StepPlan:
    """The plan as rank `index` has it."""
    if index == 0:
        return plan
    none = np.empty(0)
    drawn = () if plan.all_greedy else ("temperatures", "seeds")
    sampling = {"temperatures", "seeds", "top_ks", "top_ps", "min_ps", "num_logprobs"}
    return replace(plan, **dict.fromkeys(sampling.difference(drawn), none))


def in_slices(meeting: Meeting, logits: torch.Tensor, plan: StepPlan, size: int) -> list[Any]:
    """The ids that each rank has then, or what it raises."""
    found = told_in_slices(meeting, logits, plan, size)
    return [each[0] if isinstance(each, tuple) else each for each in found]


def told_in_slices(meeting: Meeting, logits: torch.Tensor, plan: StepPlan, size: int) -> list[Any]:
    """The ids, and which rows are undefined, that each rank has then, or what it raises."""
    vocab = torch.arange(logits.shape[1], dtype=torch.int32)

    def work(index: int) -> tuple[list[int], list[bool]]:
        begin, end = slice_of(len(vocab), index, size)
        own = logits[:, begin:end].contiguous()
        ids, undefined = SliceSampler(vocab, Rank(index, size)).sample(own, as_sent(plan, index))
        return ids.tolist(), undefined.tolist()

    return meeting.run(work)


SIZES = st.sampled_from([(2, 7), (3, 7), (2, 255), (4, 1001), (2, 1030), (3, 4099)])
VALUES = st.sampled_from(["spread", "tied", "few", "lost"])


def logits_of(kind: str, rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 2
    if kind == "tied":
        return logits.round()  # also zeros of both signs
    if kind == "few":  # whole slices without a possible token
        kept = torch.randint(vocab_size, (rows, 3), generator=generator)
        return torch.full_like(logits, -torch.inf).scatter(1, kept, logits[:, :3])
    if kind == "lost":
        logits[0] = -torch.inf
    return logits


def rows_of(**columns: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Row]]:
    # `st.builds` would also choose what has a default
    row = st.fixed_dictionaries(dict(columns)).map(lambda given_columns: Row(**given_columns))
    return st.lists(row, min_size=1, max_size=5)


PLAIN = rows_of(
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 1.0, 3.0]),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    position=st.integers(1, 1 << 20),
)
TRUNCATED = rows_of(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 256, 257, 600, 1 << 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 1 << 20),
)


@settings(max_examples=60)
@given(SIZES, VALUES, PLAIN, st.integers(0, 1 << 20))
def test_rows_are_drawn_as_whole_ones(
    sizes: tuple[int, int], kind: str, rows: list[Row], seed: int
) -> None:
    size, vocab_size = sizes
    logits, plan = logits_of(kind, len(rows), vocab_size, seed), plan_of(rows)
    with meeting_of(size, vocab_size) as meeting:
        found = in_slices(meeting, logits, plan, size)
    vocab = torch.arange(vocab_size, dtype=torch.int32)
    expected = sample(logits, plan, vocab)[0].tolist()
    assert found == [expected] * size
    assert meeting.num_gathered == 0


@settings(max_examples=60)
@given(SIZES, st.sampled_from(["spread", "tied", "few"]), TRUNCATED, st.integers(0, 1 << 20))
def test_truncated_rows_are_drawn_as_whole_ones(
    sizes: tuple[int, int], kind: str, rows: list[Row], seed: int
) -> None:
    size, vocab_size = sizes
    logits, plan = logits_of(kind, len(rows), vocab_size, seed), plan_of(rows)
    with meeting_of(size, vocab_size) as meeting:
        found = in_slices(meeting, logits, plan, size)
    vocab = torch.arange(vocab_size, dtype=torch.int32)
    expected, _ = sample(logits, plan, vocab, share=share_of(vocab_size, size))
    assert found == [expected.tolist()] * size


def test_rows_whose_kept_set_reaches_further_alone_are_brought_together() -> None:
    rows = [Row(top_k=20), Row(top_p=0.999), Row(temperature=0.0), Row(top_p=0.001), Row()]
    logits, plan = logits_of("spread", len(rows), 4099, 1), plan_of(rows)
    with meeting_of(2, 4099) as meeting:
        in_slices(meeting, logits, plan, 2)
    assert meeting.num_gathered == 2  # the second and the last


@pytest.mark.parametrize("name", ["best_of_slice", "candidates_of_slice", "draw_from_slices"])
def test_a_first_rank_that_cannot_sample_comes_to_every_exchange(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row(seed=1), Row(seed=2)] if name == "best_of_slice" else [Row(top_k=9), Row(top_p=0.9)]
    work = getattr(slice_sampling, name)

    with meeting_of(3, 1001) as meeting:

        def fails(*arguments: Any) -> torch.Tensor:
            if meeting.is_first:
                raise RuntimeError("no memory")
            result: torch.Tensor = work(*arguments)
            return result

        monkeypatch.setattr(slice_sampling, name, fails)
        failed, *others = in_slices(meeting, logits_of("spread", 2, 1001, 1), plan_of(rows), 3)
    assert isinstance(failed, StepFailed)
    assert "no memory" in str(failed)
    assert others[0] == others[1]  # ids of which none is beyond the vocabulary
    assert all(0 <= token_id < 1001 for token_id in others[0])


def test_a_rank_that_cannot_sample_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(slice_sampling, "best_of_slice", fails)
    vocab = torch.arange(9, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no memory"):
        SliceSampler(vocab, Rank(1, 2)).sample(torch.zeros(1, 4), plan_of([Row()]))


@settings(max_examples=60)
@given(SIZES, PLAIN | TRUNCATED, st.data())
def test_rows_whose_logits_are_not_numbers_are_told_by_all_and_harm_no_others(
    sizes: tuple[int, int], rows: list[Row], data: st.DataObject
) -> None:
    size, vocab_size = sizes
    logits, plan = logits_of("spread", len(rows), vocab_size, 1), plan_of(rows)
    vocab = torch.arange(vocab_size, dtype=torch.int32)
    expected, _ = sample(logits, plan, vocab, share=share_of(vocab_size, size))
    broken = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    places = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=3)
    for row in np.flatnonzero(broken).tolist():
        for place in data.draw(places):
            logits[row, place] = data.draw(st.sampled_from([torch.nan, torch.inf]))
    with meeting_of(size, vocab_size) as meeting:
        told = told_in_slices(meeting, logits, plan, size)
    assert [undefined for _, undefined in told] == [broken] * size
    for ids, _ in told:
        assert ids == told[0][0]
        assert all(0 <= each < vocab_size for each in ids)
        for each, wanted, is_broken in zip(ids, expected.tolist(), broken, strict=True):
            assert is_broken or each == wanted


def test_logits_whose_scores_are_too_large_are_no_fault() -> None:
    logits = logits_of("spread", 3, 1001, 1) * 1e35
    plan = plan_of([Row(temperature=1e-5), Row(temperature=1e-5, top_k=9), Row(temperature=0.0)])
    vocab = torch.arange(1001, dtype=torch.int32)
    for one in (plan, plan_of([Row(temperature=1e-5)] * 3)):
        with meeting_of(2, 1001) as meeting:
            told = told_in_slices(meeting, logits, one, 2)
        assert told[0] == told[1]
        assert told[0][1] == [False] * 3
        if not one.any_truncation:
            assert told[0][0] == sample(logits, one, vocab)[0].tolist()


def test_what_is_not_a_number_is_taken_as_from_a_whole_row() -> None:
    logits = logits_of("spread", 3, 1001, 1)
    logits[0, 700], logits[1, 900], logits[1, 30] = torch.nan, -torch.nan, torch.inf
    plan = plan_of([Row(temperature=0.0)] * 3)
    with meeting_of(2, 1001) as meeting:
        found = in_slices(meeting, logits, plan, 2)
    vocab = torch.arange(1001, dtype=torch.int32)
    assert found == [sample(logits, plan, vocab)[0].tolist()] * 2
