"""Steps made from the step before are those that would have been made anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from tests.helpers.new_requests import new_request
from tests.helpers.scheduler_harness import scheduler_of

from slipstream_core.scheduler import state_marks
from slipstream_core.scheduler.decode_batch import SteadyDecode
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.history.token_log import TokenLog

MAX_ROWS = 16


class Twin:
    """A scheduler with its histories; `anew` makes it forget the last step each time: what was
    planned, and who was sampled."""

    def __init__(self, *, anew: bool, **limits: Any) -> None:
        self.anew = anew
        self.log = TokenLog(rows=2)
        self.scheduler = scheduler_of(
            self.log, max_num_batched_tokens=200, max_model_len=40, **limits
        )
        self.in_flight: deque[StepPlan] = deque()
        self.num_again = 0
        self.num_in_c = 0  # steps with several tokens that were taken in so
        usual = self.scheduler._completer.complete

        def complete(*args: Any, **options: Any) -> bool:
            is_done = not anew and usual(*args, **options)
            self.num_in_c += is_done
            return is_done

        self.scheduler._completer.complete = complete  # type: ignore[method-assign]

    def add(self, row: int, length: int, **params: Any) -> None:
        self.log.open(row)
        self.log.extend(row, (np.arange(length) + row).astype(np.uint32))
        fields = {"temperature": 1.0, "top_k": row, "top_p": 1.0, "min_p": 0.0, "seed": row}
        self.scheduler.add(new_request(row=row, prompt_len=length, **{**fields, **params}))

    def remove(self, row: int) -> None:
        self.scheduler.remove(row)
        self.log.drop(row)

    def launch(self, acked: np.ndarray) -> StepPlan | None:
        before = self.scheduler._batch
        if self.anew:
            self.scheduler._end_batch()
        plan = self.scheduler.schedule(acked)
        if plan is not None:
            self.in_flight.append(plan)
            self.num_again += before is not None and self.scheduler._batch is before
        return plan

    def fail(self) -> list[int]:
        """The oldest step fails; who is at fault."""
        at_fault = self.scheduler.fail(self.in_flight.popleft()).tolist()
        for row in at_fault:
            self.log.drop(row)
        return at_fault

    def collect(self, spans: int = 0) -> tuple[list[list[int] | None], list[int]]:
        """The tokens of the oldest step by stream, and those that ended. spans: the most tokens
        of a row; 0: one each.
        """
        plan = self.in_flight.popleft()
        if self.anew:
            self.scheduler._steady = SteadyDecode()
        num = int(plan.samples.sum())
        counts = 1 + (np.arange(num) + plan.step) % spans if spans else None
        num = num if counts is None else int(counts.sum())
        ids = (np.arange(num) * 7 + plan.step) % 11
        it = self.scheduler.complete(plan, ids, counts)
        sampled: list[list[int] | None] = [
            each.tolist() for each in (it.rows, it.token_ids, it.index)
        ]
        sampled.append(it.counts if it.counts is None else it.counts.tolist())
        ended = it.ended.tolist()
        for row in ended:
            self.log.drop(row)
        return sampled, ended


def assert_same(plan: Struct | None, other: Struct | None) -> None:
    assert (plan is None) == (other is None)
    if plan is None or other is None:
        return
    for name in plan.__struct_fields__:
        mine, theirs = getattr(plan, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, name
            assert mine.tolist() == theirs.tolist(), name
        elif name == "snapshots":
            assert_same(mine, theirs)
        else:
            assert mine == theirs, name


ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.integers(1, 20), st.integers(0, 2)),
    st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.just("remove"), st.integers(0, MAX_ROWS - 1), st.just(0)),
    st.tuples(st.just("attach"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just(0)),
)


@pytest.fixture(scope="module", autouse=True)
def close_marks() -> Iterator[None]:
    """States of answers are saved at each 6 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_marks, "_BACK", 6)
        yield


@settings(deadline=None, max_examples=200)
@given(
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare_blocks=st.integers(0, 60),
    max_num_seqs=st.integers(1, 8),
    max_unacked=st.sampled_from([3, 64]),
    min_tokens=st.sampled_from([0, 6]),
    lag=st.one_of(st.none(), st.integers(0, 3)),
    spans=st.sampled_from([0, 0, 1, 2, 4]),
    num_snapshots=st.sampled_from([None, None, 3, 30]),
    actions=st.lists(ACTIONS, max_size=25),
)
def test_agrees_with_columns_made_anew(
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    max_unacked: int,
    min_tokens: int,
    lag: int | None,
    spans: int,
    num_snapshots: int | None,
    actions: list[tuple[str, int, int]],
) -> None:
    """`lag`: by how many tokens acknowledgements are behind; None: there are none.
    `num_snapshots`: of a model with recurrent states, which has marks in its answers.
    """
    limits: dict[str, Any] = {
        "num_blocks": -(-40 // block_size) + 1 + spare_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_unacked": max_unacked,
        "enable_prefix_caching": True,
    }
    if num_snapshots is not None:
        limits |= {"has_states": True, "num_snapshots": num_snapshots}
    twins = Twin(anew=False, **limits), Twin(anew=True, **limits)
    alive: set[int] = set()
    acked = np.zeros(MAX_ROWS, np.int64)
    for action, n, ahead in [*actions, ("run", 20, 0)]:
        if action == "add" and len(alive) < MAX_ROWS:
            row = min(set(range(MAX_ROWS)) - alive)
            alive.add(row)
            acked[row] = n
            for twin in twins:
                twin.add(
                    row,
                    n,
                    max_tokens=ahead,
                    worker_ends=row % 2 == 0,
                    min_tokens=min(min_tokens, ahead),
                    stop_token_ids=(1, 2),
                )
        elif action == "remove" and n in alive:
            alive.remove(n)
            for twin in twins:
                twin.remove(n)
        elif action == "attach":
            np.minimum(acked, n, out=acked)
            for twin in twins:
                twin.scheduler.acks_moved_back()
        elif action == "fail" and twins[0].in_flight:
            at_fault = twins[0].fail()
            assert twins[1].fail() == at_fault
            alive -= set(at_fault)
        elif action == "run":
            for _ in range(n):
                if lag is not None:
                    for row in alive:
                        acked[row] = max(acked[row], twins[0].log.length(row) - lag)
                plan = twins[0].launch(acked)
                assert_same(plan, twins[1].launch(acked))
                while len(twins[0].in_flight) > (ahead if plan is not None else 0):
                    sampled = twins[0].collect(spans)
                    assert twins[1].collect(spans) == sampled
                    alive -= set(sampled[-1])
                for twin in twins:  # of answers that go on: written with what else is deferred
                    if twin.scheduler._batch is not None:
                        twin.scheduler._batch.flush_deferred()
                marks = [twin.scheduler._blocks.marks.by_slot for twin in twins]
                assert marks[0] == marks[1]
    assert twins[1].num_again == twins[1].num_in_c == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_most_steps_with_several_tokens_are_taken_in_at_once(ahead: int) -> None:
    twin = Twin(anew=False, num_blocks=60, block_size=4, max_num_seqs=2)
    acked = np.zeros(MAX_ROWS, np.int64)
    for row in range(2):
        twin.add(row, 5, max_tokens=30, worker_ends=False)
    num = 0
    while twin.launch(acked) is not None:
        num += 1
        if len(twin.in_flight) > ahead:
            twin.collect(2)
    assert num - twin.num_in_c <= 8, "histories grow, and requests begin and end"


def test_who_waits_for_blocks_does_not_break_it_up() -> None:
    twin = Twin(anew=False, num_blocks=11, block_size=4, max_num_seqs=2)
    acked = np.zeros(MAX_ROWS, np.int64)
    for row, length in enumerate((5, 35)):
        twin.add(row, length, max_tokens=4, worker_ends=False)
    for _ in range(4):
        twin.launch(acked)
    assert twin.num_again == 2
    while twin.in_flight:
        twin.collect()
    plan = twin.launch(acked)
    assert plan is not None
    assert plan.query_lens.tolist() == [35]


def test_a_batch_that_stays_is_made_from_the_step_before() -> None:
    twin = Twin(anew=False, num_blocks=40, block_size=4, max_num_seqs=2)
    acked = np.zeros(MAX_ROWS, np.int64)
    for row in range(3):
        twin.add(row, 5, max_tokens=20, worker_ends=False)
    for _ in range(10):  # one waits for a slot: it is not for him to break it up
        twin.launch(acked)
    assert twin.num_again == 8
    while twin.in_flight:
        twin.collect()
    twin.remove(0)
    plan = twin.launch(acked)
    assert plan is not None
    assert plan.query_lens.tolist() == [1, 5]
    assert twin.num_again == 8


def test_nobody_overruns_his_worker_when_acknowledgements_move_back() -> None:
    twin = Twin(anew=False, num_blocks=60, block_size=4, max_num_seqs=2, max_unacked=8)
    acked = np.full(MAX_ROWS, 5)
    twin.add(0, 3, max_tokens=30)
    for _ in range(4):  # the first computes the prompt; known are 7 tokens then
        assert twin.launch(acked) is not None
    assert twin.num_again == 2
    acked[0] = 3
    twin.scheduler.acks_moved_back()
    num = 0
    while twin.launch(acked) is not None:
        num += 1
    assert num == 4
