"""How many tokens a draft model is asked to foresee follows from how often it was right, and from
what steps cost.
"""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.drafting.step_costs import LEAST_GAIN, SYNC_S, StepCosts
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

FLAT = StepCosts(((1, 1.0), (64, 1.001)))
CHEAP = StepCosts(((1, 0.001), (64, 0.001)))
NONE = np.empty(0, np.uint32)
LOG = TokenLog()
FAR = 1 << 20


def drafter_of(
    rows: int, most: int = 8, costs: StepCosts = FLAT, draft_costs: StepCosts = CHEAP
) -> ModelDrafter:
    drafter = ModelDrafter(
        num_speculative_tokens=most, max_len=FAR, costs=costs, draft_costs=draft_costs
    )
    for row in range(rows):
        drafter.open(row, b"", 4, NONE)
    return drafter


def wanted(
    drafter: ModelDrafter, rows: int, most: int = 99, known: int = 10, num_beside: int = 0
) -> list[int] | None:
    found = drafter.wanted(np.arange(rows), np.full(rows, most), np.full(rows, known), num_beside)
    return None if found is None else found.tolist()


def say(drafter: ModelDrafter, foreseen: list[int], said: list[int], row: int = 0) -> None:
    """A row's drafts, and what it said then."""
    rows = np.array([row])
    if foreseen:
        drafter.foreseen(rows, np.array([len(foreseen)]), np.array(foreseen))
    drafter.observe(RowSet(rows), np.array(said, np.uint32), np.array([len(said)]), LOG)


def test_what_was_right_is_foreseen_further_and_what_was_wrong_no_more() -> None:
    drafter = drafter_of(2, most=16)
    [before] = wanted(drafter, 1) or [0]
    for _ in range(20):
        say(drafter, [1, 2, 3], [1, 2, 3, 4])
    assert wanted(drafter, 2) == [16, before]
    assert drafter.awaits_tokens
    for _ in range(40):
        say(drafter, [1], [2])
    assert wanted(drafter, 1) is None
    assert not drafter.awaits_tokens
    for _ in range(400):  # it is tried again
        say(drafter, [], [2])
    assert wanted(drafter, 1) == [before]


def test_what_is_not_measured_takes_its_share_of_what_is_usual() -> None:
    rows = np.array([1, 9, 100])
    np.testing.assert_allclose(StepCosts((), 0.125).seconds(rows), StepCosts().seconds(rows) / 8)


def test_limits_and_the_ends_of_rows_are_kept() -> None:
    drafter = drafter_of(1)
    assert wanted(drafter, 1, most=2) == [2]
    assert wanted(drafter, 1, most=0) is None
    assert wanted(drafter, 1, known=FAR - 1) == [1]
    assert wanted(drafter, 1, known=FAR) is None
    drafter.foreseen(np.array([0]), np.array([3]), np.array([7, 8, 9]))
    drafts = drafter.propose(RowSet(np.array([0])), np.array([2]), 0)
    assert drafts is not None
    assert (drafts.lens.tolist(), drafts.token_ids.tolist()) == ([2], [7, 8])
    drafter.close(np.array([0, 3000]))
    assert wanted(drafter, 1) is None
    assert drafter.propose(RowSet(np.array([0])), np.array([2]), 0) is None
    drafter.open(0, b"", 1, NONE)  # another request
    assert drafter.propose(RowSet(np.array([0])), np.array([2]), 0) is None


def test_rows_that_are_too_long_for_the_draft_model_are_not_waited_for() -> None:
    log, rows = TokenLog(rows=1), RowSet(np.array([0]))
    drafter = ModelDrafter(num_speculative_tokens=4, max_len=6, costs=FLAT, draft_costs=CHEAP)
    drafter.open(0, b"", 4, NONE)
    log.open(0)
    log.extend(0, np.array([1, 2, 3, 4], np.uint32))
    waits = []
    for token in (5, 6, 7):
        log.extend(0, np.array([token], np.uint32))
        drafter.observe(rows, np.array([token], np.uint32), None, log)
        waits.append(drafter.awaits_tokens)
    assert waits == [True, False, False]


def test_drafts_hold_until_their_row_says_something() -> None:
    drafter, rows = drafter_of(2), RowSet(np.array([0, 1]))
    drafter.foreseen(np.array([0, 1]), np.array([1, 2]), np.array([5, 6, 7]))
    drafter.observe(RowSet(np.array([1])), np.array([6], np.uint32), None, LOG)
    drafts = drafter.propose(rows, np.array([9, 9]), 0)
    assert drafts is not None
    assert (drafts.lens.tolist(), drafts.token_ids.tolist()) == ([1, 0], [5])


@given(
    num_beside=st.integers(0, 400),
    shares=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6),
    row_s=st.floats(0.01, 1.0),
    draft_s=st.floats(0.0, 1.0),
    most=st.integers(1, 6),
)
@settings(max_examples=60)
def test_the_length_gives_most_tokens_a_second(
    shares: list[float], row_s: float, draft_s: float, most: int, num_beside: int
) -> None:
    num = len(shares)
    costs = StepCosts(((1, 1.0), (65, 1.0 + 64 * row_s)))
    draft_costs = StepCosts(((1, draft_s), (65, 2 * draft_s)))
    drafter = drafter_of(num, most, costs, draft_costs)
    drafter._rows.share[:num] = shares

    def rate(length: int) -> float:
        values = [share**at for share, at in product(shares, range(1, length + 1))]
        kept = [value for value in values if value >= 0.05]
        by_place = [sum(share**at >= 0.05 for share in shares) for at in range(1, length + 1)]
        seconds = 1 + (num + num_beside + len(kept) - 1) * row_s + 2 * SYNC_S
        seconds += sum(draft_s * (1 + (rows - 1) / 64) for rows in by_place if rows)
        return (num + sum(kept)) / seconds

    found = wanted(drafter, num, num_beside=num_beside)
    alone = num / (1 + (num + num_beside - 1) * row_s)
    best = max(rate(length) for length in range(1, most + 1))
    if found is None:
        assert best <= LEAST_GAIN * alone * (1 + 1e-9) or max(shares) < 0.05
    else:
        assert rate(max(found)) == pytest.approx(best)
        assert best > LEAST_GAIN * alone * (1 - 1e-9)


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_shares_are_those_of_each_row_alone(rng: Random) -> None:
    together, alone = drafter_of(4, most=4), drafter_of(4, most=4)
    for _ in range(5):
        rows = sorted(rng.sample(range(4), rng.randint(1, 4)))
        drafts = [[rng.randrange(2) for _ in range(rng.randint(0, 4))] for _ in rows]
        outputs = [[rng.randrange(2) for _ in range(rng.randint(1, 5))] for _ in rows]
        for row, draft, said in zip(rows, drafts, outputs, strict=True):
            say(alone, draft, said, row)
        lens = np.array([len(each) for each in drafts])
        has_some = lens > 0
        if has_some.any():
            ids = np.array([each for draft in drafts for each in draft])
            together.foreseen(np.array(rows)[has_some], lens[has_some], ids)
        counts = np.array([len(each) for each in outputs])
        ids = np.array([each for said in outputs for each in said], np.uint32)
        together.observe(RowSet(np.array(rows)), ids, counts, LOG)
        np.testing.assert_allclose(together._rows.share[:4], alone._rows.share[:4])
