"""A step's rows with drafts as rows of one token, and what of them is accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream_core.step.constraint_plan import ConstraintPlan
from slipstream_core.step.drafts import accepted, only_accepted, unfold
from slipstream_core.step.plan import (
    COLUMNS,
    ListedLogprobs,
    Logprobs,
    PromptPlan,
    StepPlan,
    StepResult,
    blank_plan,
)
from slipstream_ipc.history.wide_logprobs import Candidates


def longs(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Decode rows, some with drafts, then chunks of which some are not sampled."""
    lens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))  # drafts
    chunks = draw(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=3))
    counts = np.array([*(1 + num for num in lens), *(num for num, _ in chunks)], np.int32)
    samples = np.array([*[True] * len(lens), *(sampled for _, sampled in chunks)])
    total, rows, num = int(counts.sum()), len(counts), int(samples.sum())
    begins = np.array(draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows)))
    offsets = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return blank_plan(
        token_ids=np.array(draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))),
        positions=np.repeat(begins, counts) + offsets,
        kv_slots=np.arange(total) + 7,
        slots=np.arange(rows) + 3,
        query_lens=counts,
        kv_lens=(begins + counts).astype(np.int32),
        prompt_lens=np.arange(rows).astype(np.int32),
        samples=samples,
        seeds=np.arange(num) * 11,
        temperatures=np.arange(num).astype(np.float32),
        draft_lens=longs(*lens, *[0] * len(chunks)),
    )


@given(plan=plans())
def test_each_token_of_a_row_with_drafts_is_a_row(plan: StepPlan) -> None:
    step = unfold(plan)
    wanted, at, sampled = [], 0, 0
    for row in range(plan.num_requests):
        drafts, num = int(plan.draft_lens[row]), int(plan.query_lens[row])
        pieces = [1] * num if drafts else [num]
        for number, length in enumerate(pieces):
            at += length
            wanted.append(
                (
                    int(plan.slots[row]),
                    length,
                    int(plan.positions[at - 1]) + 1,  # its last token is the last that it sees
                    int(plan.prompt_lens[row]),
                    bool(plan.samples[row]),
                    int(plan.seeds[sampled]) if plan.samples[row] else None,
                    int(plan.token_ids[at - 1]) if plan.samples[row] else None,
                )
            )
            assert number < 1 + drafts
        sampled += bool(plan.samples[row])
    got, rowwise = [], step.plan
    places = iter(range(len(rowwise.seeds)))
    for row in range(rowwise.num_requests):
        place = next(places) if rowwise.samples[row] else None
        got.append(
            (
                int(rowwise.slots[row]),
                int(rowwise.query_lens[row]),
                int(rowwise.kv_lens[row]),
                int(rowwise.prompt_lens[row]),
                bool(rowwise.samples[row]),
                None if place is None else int(rowwise.seeds[place]),
                None if place is None else int(step.inputs[place]),
            )
        )
    assert got == wanted
    assert next(places, None) is None
    assert rowwise.draft_lens is None
    lens = rowwise.query_lens.tolist()
    assert all(each == 1 for each in lens[: rowwise.num_decodes])
    assert lens[rowwise.num_decodes : rowwise.num_decodes + 1] != [1]
    for name, each in COLUMNS.items():
        assert getattr(rowwise, name).dtype == each.dtype, name
        if each.declared.over in ("T", "E", "M"):
            assert getattr(rowwise, name) is getattr(plan, name), name


@given(plan=plans(), data=st.data())
def test_the_longest_right_beginning_is_accepted(plan: StepPlan, data: st.DataObject) -> None:
    step, num = unfold(plan), int((1 + plan.draft_lens[plan.samples]).sum())
    ids = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num)), np.int64)
    undefined = np.array(sorted(data.draw(st.sets(st.integers(0, num - 1)))), np.int64)
    found = accepted(step, ids, undefined if len(undefined) else None)
    places, counts, at = [], [], 0
    of_rows = []  # whose first place is undefined
    tokens = np.split(plan.token_ids, np.cumsum(plan.query_lens)[:-1])
    for row in np.flatnonzero(plan.samples).tolist():
        drafts = tokens[row][1:].tolist() if plan.draft_lens[row] else []
        right = 0
        while right < len(drafts) and drafts[right] == ids[at + right]:
            if at + right + 1 in undefined:
                break
            right += 1
        if at in undefined:
            of_rows.append(len(counts))
        counts.append(1 + right)
        places += range(at, at + 1 + right)
        at += 1 + len(drafts)
    assert found.counts.tolist() == counts
    assert found.places.tolist() == places
    logprobs = Logprobs(
        np.arange(2 * num, dtype=np.float32).reshape(num, 2),
        np.arange(2 * num, dtype=np.uint32).reshape(num, 2),
        np.arange(num, dtype=np.uint32),
    )
    whole = StepResult(5, ids, logprobs, undefined=undefined if len(undefined) else None)
    result = only_accepted(whole, step, found)
    assert ([] if result.undefined is None else result.undefined.tolist()) == of_rows
    assert result.undefined is None or of_rows
    assert result.logprobs is not None
    assert result.counts is found.counts
    assert result.draft_lens is not None
    assert result.draft_lens.tolist() == plan.draft_lens[plan.samples].tolist()
    assert result.token_ids.tolist() == ids[places].tolist()
    assert result.logprobs.ranks.tolist() == places
    assert result.logprobs.values[:, 0].tolist() == [2 * place for place in places]


def test_rows_that_are_named_by_number_are_named_by_their_new_one() -> None:
    """Rows 1 and 3 have drafts; what the others ask for stays theirs."""
    lens = longs(0, 2, 0, 1, 0)
    plan = blank_plan(
        token_ids=np.arange(10),
        positions=np.arange(10),
        kv_slots=np.arange(10),
        slots=np.arange(5),
        query_lens=np.array([1, 3, 1, 2, 3], np.int32),
        kv_lens=np.full(5, 20, np.int32),
        masked_rows=longs(2, 5),
        masked_ids=longs(7, 8),
        grammar_rows=longs(0, 4),
        constraints=ConstraintPlan(longs(2, 4), None, None),  # type: ignore[arg-type]
        listed=ListedLogprobs(rows=longs(0, 2), ids=longs(1, 2)[:, None], max_unlisted=0),
        prompt=PromptPlan(
            **dict.fromkeys(("starts", "counts", "num_logprobs", "tokens", "targets"), longs(9)),
            rows=longs(4),
        ),
        draft_lens=lens,
    )
    step = unfold(plan)
    rowwise = step.plan
    assert rowwise.grammar_rows.tolist() == [0, 7]
    assert rowwise.masked_rows.tolist() == [2, 5]  # they name places already
    assert rowwise.constraints is not None
    assert rowwise.constraints.rows.tolist() == [4, 7]
    assert rowwise.listed is not None
    assert rowwise.listed.rows.tolist() == [0, 4]
    assert rowwise.prompt is not None
    assert (rowwise.prompt.rows.tolist(), rowwise.prompt.tokens.tolist()) == ([7], [9])
    # wide log-probabilities are named by their token
    piece = Candidates(*([None] * len(Candidates.__slots__)))
    result = StepResult(1, longs(0, 2, 3, 9, 4, 6, 0, 0), None, wide=((4, piece), (7, piece)))
    found = accepted(step, result.token_ids)
    assert found.counts.tolist() == [1, 3, 1, 2, 1]
    wrong = replace(plan, token_ids=longs(0, 1, 9, 3, 4, 5, 9, 7, 8, 9))
    step = unfold(wrong)
    found = accepted(step, result.token_ids)
    assert found.counts.tolist() == [1, 1, 1, 1, 1]
    assert [at for at, _ in only_accepted(result, step, found).wide] == [2, 4]
