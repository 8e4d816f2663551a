"""Which rows are drafted for, and how far: by what their own text repeats, and what steps cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

CHEAP = StepCosts([(1, 1.0), (64, 1.1)])  # more rows cost next to nothing
DEAR = StepCosts([(1, 1.0), (64, 64.0)])  # rows cost what they would cost alone
NO_IDS = np.empty(0, np.uint32)
PARAGRAPH = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11, 13, 12]


class Rows:
    """A drafter and the histories of its rows."""

    def __init__(self, costs: StepCosts, prompts: list[list[int]], most: int = 8) -> None:
        self.log, self.rows = TokenLog(), RowSet(np.arange(len(prompts)))
        self.drafter = NgramDrafter(
            num_speculative_tokens=most, prompt_lookup_min=2, prompt_lookup_max=4, costs=costs
        )
        for row, prompt in enumerate(prompts):
            self.log.open(row)
            self.log.extend(row, np.array(prompt, np.uint32))
            self.drafter.open(row, b"", 0, NO_IDS)

    def sampled(self, *ids: int) -> None:
        given_ids = np.array(ids, np.uint32)
        self.log.append(self.rows, given_ids)
        self.drafter.observe(self.rows, given_ids, None, self.log)

    def proposed(self, most: int = 100) -> list[list[int]]:
        drafts = self.drafter.propose(self.rows, np.full(len(self.rows), most), 0)
        if drafts is None:
            return [[] for _ in self.rows.tolist()]
        assert drafts.lens.sum() == len(drafts.token_ids) > 0
        return [each.tolist() for each in np.split(drafts.token_ids, np.cumsum(drafts.lens)[:-1])]


def test_a_repeated_prompt_is_drafted_further_the_longer_it_goes_on() -> None:
    rows = Rows(StepCosts([(1, 1.0), (2, 1.2), (64, 20.0)]), [PARAGRAPH])
    lengths = []
    for token in PARAGRAPH:
        rows.sampled(token)
        [draft] = rows.proposed()
        assert draft == [*PARAGRAPH, *PARAGRAPH][PARAGRAPH.index(token) + 1 :][: len(draft)]
        assert rows.drafter.awaits_tokens == bool(draft)
        lengths.append(len(draft))
    assert lengths[0] == 0  # one token is no match
    assert 0 < lengths[1] < lengths[-1] <= 8
    assert lengths == sorted(lengths)


def test_nothing_is_drafted_where_nothing_repeats() -> None:
    rows = Rows(CHEAP, [PARAGRAPH])
    for token in range(100, 150):
        rows.sampled(token)
        assert not rows.drafter.awaits_tokens
        assert rows.proposed() == [[]]


def test_a_row_whose_drafts_would_be_wrong_stops() -> None:
    rows = Rows(StepCosts([(1, 1.0), (64, 20.0)]), [PARAGRAPH])
    rng = np.random.default_rng(0)
    begun = []
    for fresh in rng.integers(100, 10**6, 40).tolist():  # two tokens that are known, then others
        rows.sampled(PARAGRAPH[4])
        rows.sampled(PARAGRAPH[5])
        begun.append(rows.drafter.awaits_tokens)
        rows.sampled(fresh)
    assert begun[0]
    assert not any(begun[10:])


def test_rows_that_cost_what_they_give_are_not_drafted() -> None:
    rows = Rows(DEAR, [PARAGRAPH] * 8)
    for token in PARAGRAPH:
        rows.sampled(*[token] * 8)
        assert not rows.drafter.awaits_tokens
        assert rows.proposed() == [[]] * 8


def test_limits_are_kept_and_other_rows_are_left_alone() -> None:
    rows = Rows(CHEAP, [PARAGRAPH, PARAGRAPH, PARAGRAPH])
    rows.drafter.close(np.array([1, 200]))
    for token in PARAGRAPH[:6]:
        rows.sampled(token, token, token)
    assert rows.proposed(3) == [PARAGRAPH[6:9], [], PARAGRAPH[6:9]]
    drafts = rows.drafter.propose(rows.rows, np.array([0, 5, 1]), 0)
    assert drafts is not None
    assert (drafts.lens.tolist(), drafts.token_ids.tolist()) == ([0, 0, 1], PARAGRAPH[6:7])
    assert rows.drafter.propose(rows.rows, np.zeros(3, np.int64), 0) is None


def test_a_long_prompt_is_taken_in_piece_by_piece() -> None:
    prompt = [*range(1000, 6000), *PARAGRAPH]
    rows = Rows(CHEAP, [prompt, PARAGRAPH * 2])
    taken = []
    for token in PARAGRAPH[:5]:
        rows.sampled(token, token)
        taken.append([len(each) for each in rows.proposed()])
    assert [each[0] > 0 for each in taken] == [False, False, True, True, True]
    assert rows.proposed() == [PARAGRAPH[5:] + PARAGRAPH[:1], PARAGRAPH[5:] + PARAGRAPH[:1]]


def test_a_row_that_is_opened_again_knows_nothing_of_before() -> None:
    rows = Rows(CHEAP, [PARAGRAPH])
    for token in PARAGRAPH[:4]:
        rows.sampled(token)
    assert rows.proposed() != [[]]
    rows.drafter.close(np.array([0]))
    rows.log.drop(0)
    rows.log.open(0)
    rows.log.extend(0, np.array([50, 51, 52], np.uint32))
    rows.drafter.open(0, b"", 0, NO_IDS)
    for token in PARAGRAPH[:4]:
        rows.sampled(token)
    assert rows.proposed() == [[]]


def tokens_a_second(costs: StepCosts, num_rows: int, values: npt.NDArray[np.float64]) -> float:
    rows = np.array([num_rows + len(values)])
    sync = 0.0003 if len(values) else 0.0
    return float((num_rows + values.sum()) / (costs.seconds(rows)[0] + sync))


@given(
    times=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8),
    num_rows=st.integers(1, 100),
    values=st.lists(st.floats(0.01, 1.0), max_size=40),
)
def test_no_other_number_of_drafts_gives_more(
    times: list[float], num_rows: int, values: list[float]
) -> None:
    costs = StepCosts([(1 << at, seconds) for at, seconds in enumerate(times)])
    column = np.array(sorted(values, reverse=True))
    num = costs.num_worthwhile(num_rows, column)
    got = tokens_a_second(costs, num_rows, column[:num])
    for other in range(len(column) + 1):
        assert tokens_a_second(costs, num_rows, column[:other]) <= got * 1.0201


def test_times_between_and_behind_what_was_measured() -> None:
    costs = StepCosts([(1, 2.0), (2, 1.0), (4, 4.0)])  # the first was disturbed
    assert costs.seconds(np.array([1, 2, 3, 4, 6])).tolist() == [1.0, 1.0, 2.5, 4.0, 7.0]
    assert StepCosts([(2, 1.0)]).seconds(np.array([1, 4])).tolist() == [1.0, 2.0]
    usual = StepCosts().seconds(np.array([1, 8, 64, 128]))
    assert (np.diff(usual) > 0).all()
    assert StepCosts().num_worthwhile(4, np.empty(0)) == 0
