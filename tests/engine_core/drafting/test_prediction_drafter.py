"""Drafts from a row's own prediction: they follow it, go before other drafts, and end where they
are not worth their time.
"""

from __future__ import annotations

import numpy as np

from slipstream_core.drafting.drafter import Drafts
from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.prediction_drafter import PredictionDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

CHEAP = StepCosts([(1, 1.0), (64, 1.1)])  # more rows cost next to nothing
DEAR = StepCosts([(1, 1.0), (64, 64.0)])  # rows cost what they would cost alone
PROMPT = [1, 2, 3]
TEXT = list(range(100, 160))


def ids(*numbers: int) -> UInt32s:
    return np.array(numbers, np.uint32)


class Rows:
    """A drafter and the histories of its rows."""

    def __init__(self, costs: StepCosts, predictions: list[list[int]], most: int = 8) -> None:
        self.log, self.rows = TokenLog(), RowSet(np.arange(len(predictions)))
        own = NgramDrafter(
            num_speculative_tokens=most, prompt_lookup_min=2, prompt_lookup_max=4, costs=costs
        )
        self.drafter = PredictionDrafter(own, num_speculative_tokens=most, costs=costs)
        for row, prediction in enumerate(predictions):
            self.log.open(row)
            self.log.extend(row, ids(*PROMPT))
            self.drafter.open(row, b"", len(PROMPT), ids(*prediction))

    def sampled(self, *tokens: list[int]) -> None:
        """A step gave these tokens to each row."""
        for row, own in enumerate(tokens):
            self.log.extend(row, ids(*own))
        counts = np.array([len(own) for own in tokens])
        flat = ids(*(each for own in tokens for each in own))
        self.drafter.observe(self.rows, flat, counts, self.log)

    def proposed(self, *, most: int = 8) -> list[list[int]]:
        found = self.drafter.propose(self.rows, np.full(len(self.rows), most), 0)
        if found is None:
            return [[]] * len(self.rows)
        return split(found)


def split(drafts: Drafts) -> list[list[int]]:
    ends = np.cumsum(drafts.lens)
    return [
        drafts.token_ids[end - num : end].tolist()
        for num, end in zip(drafts.lens, ends, strict=True)
    ]


def test_a_row_follows_its_own_prediction_alone() -> None:
    rows = Rows(CHEAP, [TEXT, [], TEXT[::-1]])
    rows.sampled([100], [100], [159])
    assert rows.drafter.awaits_tokens
    assert rows.proposed() == [TEXT[1:9], [], TEXT[::-1][1:9]]
    assert rows.proposed(most=2) == [TEXT[1:3], [], TEXT[::-1][1:3]]


def test_it_is_found_again_behind_an_edit() -> None:
    rows = Rows(CHEAP, [TEXT])
    rows.sampled(TEXT[:5])
    rows.sampled([9])
    assert rows.proposed() == [[]]
    assert not rows.drafter.awaits_tokens
    rows.sampled([TEXT[7]])
    rows.sampled(TEXT[8:10])
    assert rows.proposed() == [TEXT[10:18]]


def test_a_row_that_has_begun_elsewhere_is_caught_up_with() -> None:
    rows = Rows(CHEAP, [TEXT])
    rows.log.extend(0, ids(*TEXT[:20], 5, *TEXT[22:30]))  # another core's
    rows.sampled([TEXT[30]])
    assert rows.proposed() == [TEXT[31:39]]


def test_what_was_wrong_often_is_drafted_no_more() -> None:
    """Where the answer meets the prediction again and again, and leaves it at once."""
    text = [each for number in range(200) for each in (1, 2, 3, 1000 + number)]
    rows = Rows(StepCosts(), [text])
    lens = []
    for number in range(60):
        rows.sampled([1, 2, 3])
        lens.append(len(rows.proposed()[0]))
        rows.sampled([500 + number])
    assert lens[0] > 0
    assert lens[-1] == 0


def test_nothing_is_drafted_where_rows_cost_what_they_cost_alone() -> None:
    rows = Rows(DEAR, [TEXT])
    rows.sampled(TEXT[:1])
    assert not rows.drafter.awaits_tokens
    assert rows.proposed() == [[]]


def test_a_closed_row_is_forgotten() -> None:
    rows = Rows(CHEAP, [TEXT])
    rows.sampled(TEXT[:1])
    rows.drafter.close(np.array([0]))
    rows.log.drop(0)
    rows.log.open(0)
    rows.log.extend(0, ids(*PROMPT))
    rows.drafter.open(0, b"", len(PROMPT), ids())
    rows.sampled(TEXT[:1])
    assert rows.proposed() == [[]]


def test_many_drafts_may_pay_where_one_alone_does_not() -> None:
    costs = StepCosts([(1, 0.005), (8, 0.005), (9, 0.007), (16, 0.007), (17, 0.009), (40, 0.015)])
    assert costs.num_worthwhile(8, np.ones(1)) == 0
    rows = Rows(costs, [TEXT] * 8)
    rows.sampled(*[[100]] * 8)
    assert rows.drafter.awaits_tokens
    assert all(rows.proposed())
