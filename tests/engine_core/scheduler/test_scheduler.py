"""The scheduler against the simulated model, whose text a wrong column would change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.helpers.new_requests import new_request
from tests.helpers.scheduler_harness import MAX_ROWS, VOCAB_SIZE, Harness, Limits, prompt_of

from slipstream_core.step.plan import StepPlan


def rows_of(plan: StepPlan | None) -> list[int]:
    """The rows that a plan samples, by their seeds (add() makes them equal)."""
    assert plan is not None
    rows: list[int] = plan.seeds.tolist()
    return rows


# --- the budget and the order -------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end() -> None:
    harness = Harness(Limits(max_num_batched_tokens=10))
    harness.add(prompt_of(25), 3)
    plans = [harness.launch() for _ in range(3)]
    assert [plan and plan.num_tokens for plan in plans] == [10, 10, 5]
    assert [plan and plan.samples.tolist() for plan in plans] == [[False], [False], [True]]
    assert [len(harness.collect().rows) for _ in plans] == [0, 0, 1]
    harness.finish()


def test_running_requests_come_before_waiting_ones() -> None:
    harness = Harness(Limits(max_num_batched_tokens=8))
    first = harness.add(prompt_of(4), 8)
    harness.launch()
    second = harness.add(prompt_of(20, 1), 8)
    plan = harness.launch()
    assert plan is not None
    assert plan.query_lens.tolist() == [1, 7]
    assert (plan.num_decodes, rows_of(plan)) == (1, [first])
    harness.launch()
    assert rows_of(harness.launch()) == [first, second]
    harness.finish()


def test_lower_priority_values_then_earlier_arrivals_run_first() -> None:
    harness = Harness(Limits(max_num_seqs=1))
    for priority in (1, 0, 1, -1, 0):
        harness.add(prompt_of(3), 1, priority=priority)
    order = [rows_of(harness.launch()) for _ in range(1)]
    while harness.launched:
        harness.collect()
        if harness.scheduler.has_work:
            order.append(rows_of(harness.launch()))
    assert order == [[3], [1], [4], [0], [2]]


def test_a_budget_below_the_running_requests_goes_to_the_first_of_them() -> None:
    harness = Harness(Limits(max_num_batched_tokens=2, max_unacked=1))
    harness.add([1], 6)
    harness.add([2], 6, priority=-1, worker_ends=False)
    harness.launch()
    harness.add([3], 6, priority=-2, worker_ends=False)
    assert rows_of(harness.launch()) == [1, 2]  # row 0 waits for its worker
    harness.collect()
    harness.acknowledge()  # now all three could go on
    assert rows_of(harness.launch()) == [2, 1]
    harness.finish()


# --- one step ahead -----------------------------------------------------------------------------


def test_ids_in_flight_are_gathered_by_slot() -> None:
    harness = Harness()
    harness.add(prompt_of(5), 4)
    harness.launch()
    ahead = harness.launch()
    assert ahead is not None
    assert ahead.gather_slots.tolist() == ahead.slots.tolist() == [0]
    harness.collect()
    harness.collect()
    late = harness.launch()
    assert late is not None
    assert late.gather_slots.tolist() == [-1]
    assert late.token_ids.tolist() == [harness.outputs(0)[-1]]
    harness.finish()


def test_a_length_limit_is_never_overrun() -> None:
    harness = Harness(Limits(max_model_len=12))
    harness.add(prompt_of(5), 2)
    harness.add(prompt_of(9, 1), 50)  # ended by max_model_len
    plans = []
    while (plan := harness.launch()) is not None:
        plans.append(rows_of(plan))
    assert plans == [[0, 1], [0, 1], [1]]
    harness.finish()


def test_an_old_token_reaches_neither_a_reused_slot_nor_a_reused_row() -> None:
    harness = Harness(Limits(max_num_seqs=1))
    harness.add(prompt_of(5), 8, row=0)
    harness.launch()
    harness.abort(0)
    harness.add(prompt_of(7, 1), 8, row=0)
    plan = harness.launch()
    assert plan is not None
    assert plan.slots.tolist() == [0]
    assert harness.collect().rows.tolist() == []
    assert harness.log.length(0) == 7
    assert harness.collect().rows.tolist() == [0]
    harness.finish()


def test_the_index_points_at_the_sampled_rows_that_live() -> None:
    harness = Harness()
    for salt in range(3):
        harness.add(prompt_of(4 + salt, salt), 8)
    harness.launch()
    harness.abort(1)
    sampled = harness.collect()
    assert sampled.rows.tolist() == [0, 2]
    assert sampled.index.tolist() == [0, 2]
    assert sampled.token_ids.dtype == np.uint32
    harness.finish()


def test_steps_are_answered_in_order() -> None:
    harness = Harness()
    harness.add(prompt_of(4), 8)
    harness.launch()
    second = harness.launch()
    assert second is not None
    with pytest.raises(AssertionError, match="step 2 answered before 1"):
        harness.scheduler.complete(second, np.zeros(1, np.int64))


def test_who_is_too_far_ahead_of_its_worker_waits() -> None:
    harness = Harness(Limits(max_unacked=3))
    harness.add(prompt_of(4), 8)
    harness.add(prompt_of(4, 1), 8, worker_ends=False)
    steps = []
    while (plan := harness.launch()) is not None:
        steps.append(rows_of(plan))
        harness.collect()
    assert steps == [[0, 1]] * 3 + [[1]] * 5
    harness.acked[0] = 5  # one output acknowledged: one more may run
    assert rows_of(harness.launch()) == [0]
    assert harness.launch() is None
    harness.finish()


# --- few blocks ---------------------------------------------------------------------------------


def tight() -> Harness:
    """Two requests of three blocks each in a cache that has five."""
    harness = Harness(Limits(num_blocks=6, block_size=4, max_model_len=20))
    harness.add(prompt_of(11), 9)
    harness.add(prompt_of(7, 1), 12)
    harness.launch()
    return harness


def test_the_last_in_order_gives_way_and_is_right_in_the_end() -> None:
    harness = tight()
    assert harness.scheduler.num_free_blocks == 0
    harness.launch()
    assert harness.scheduler.num_preemptions == 0
    plan = harness.launch()  # both are at a block's end
    assert rows_of(plan) == [0]
    scheduler = harness.scheduler
    assert (scheduler.num_preemptions, scheduler.num_running, scheduler.num_waiting) == (1, 1, 1)
    harness.finish()


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    harness = tight()
    harness.launch()
    harness.add([1], 1, priority=-1)
    assert rows_of(harness.launch()) == [0]
    assert rows_of(harness.launch()) == [0, 2]
    harness.finish()


def test_a_higher_priority_makes_the_older_give_way() -> None:
    harness = Harness(Limits(num_blocks=6, block_size=4, max_model_len=20))
    harness.add(prompt_of(11), 9, priority=1)
    harness.add(prompt_of(7, 1), 12, priority=0)
    harness.launch()
    harness.launch()
    assert rows_of(harness.launch()) == [1]
    harness.finish()


def test_a_preempted_request_waits_for_its_tokens_in_flight() -> None:
    harness = tight()
    harness.launch()
    harness.launch()  # preempts row 1, two of whose tokens are in flight
    harness.abort(0)
    assert harness.launch() is None
    harness.collect()
    assert harness.launch() is None
    harness.collect()
    plan = harness.launch()
    assert plan is not None
    assert plan.query_lens.tolist() == [9]
    assert harness.collect().rows.tolist() == []  # row 0's last step
    harness.finish()


def test_a_preempted_request_may_end_while_it_waits() -> None:
    harness = Harness(Limits(num_blocks=6, block_size=4, max_model_len=20))
    harness.add(prompt_of(11), 9)
    harness.add(prompt_of(7, 1), 2)
    for _ in range(3):
        harness.launch()
    assert harness.scheduler.num_waiting == 1
    harness.collect()
    assert harness.collect().ended.tolist() == [1]
    assert harness.scheduler.num_waiting == 0
    harness.finish()


def test_who_alone_fills_the_cache_finishes() -> None:
    harness = Harness(Limits(num_blocks=6, block_size=4, max_model_len=20))
    for salt in range(4):
        harness.add(prompt_of(1, salt), 19)
    harness.finish()
    assert harness.scheduler.num_preemptions > 0


def test_nobody_is_admitted_without_room_for_the_first_output() -> None:
    harness = Harness(Limits(num_blocks=6, block_size=4, max_model_len=20))
    harness.add(prompt_of(9), 3)
    harness.add(prompt_of(8, 1), 3)  # fits the two free blocks, its first output does not
    harness.launch()
    assert harness.scheduler.num_running == 1
    harness.finish()
    assert harness.scheduler.num_preemptions == 0


def test_who_waits_for_its_worker_does_not_hold_up_the_queue() -> None:
    harness = Harness(Limits(max_unacked=3))
    harness.add(prompt_of(4), 8, outputs=5)
    harness.add(prompt_of(4, 1), 8)
    assert rows_of(harness.launch()) == [1]
    harness.acknowledge()
    assert rows_of(harness.launch()) == [1, 0]
    harness.finish()


# --- ends and errors ----------------------------------------------------------------------------


def test_removing_is_idempotent_and_frees_at_once() -> None:
    harness = Harness(Limits(max_num_seqs=1))
    harness.add(prompt_of(9), 8)
    harness.add(prompt_of(9, 1), 8)
    harness.launch()
    scheduler = harness.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.num_waiting_tokens == 9
    for row in (1, 0, 0, 5, MAX_ROWS * 100):
        scheduler.remove(row)
    assert not scheduler.has_work
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1
    assert scheduler.schedule(harness.acked) is None
    assert harness.collect().rows.tolist() == []


# --- steps that fail ------------------------------------------------------------------------------


def test_the_request_of_a_step_that_failed_with_it_alone_is_at_fault() -> None:
    harness = Harness()
    harness.add(prompt_of(5), 8)
    harness.launch(fails=True)
    harness.launch()  # behind it, from what the failed step would have sampled
    assert harness.collect() is None
    assert harness.num_faults == 1
    assert harness.collect().rows.tolist() == []
    assert not harness.scheduler.has_work


def test_of_several_in_a_failed_step_each_runs_alone_and_goes_on() -> None:
    harness = Harness()
    for salt in range(3):
        harness.add(prompt_of(5, salt), 8)
    harness.launch()
    harness.launch(fails=True)
    harness.launch()
    assert [len(harness.collect().rows), harness.collect()] == [3, None]
    assert harness.launch() is None, "what was launched behind it is still in flight"
    assert harness.collect().rows.tolist() == [], "that was computed from garbage"
    for row in range(3):
        assert rows_of(harness.launch()) == [row]
        assert harness.launch() is None
        assert harness.collect().rows.tolist() == [row]
    assert rows_of(harness.launch()) == [0, 1, 2]
    harness.finish()


def test_only_who_fails_alone_is_at_fault() -> None:
    harness = Harness(Limits(max_num_batched_tokens=12))
    for salt in range(3):
        harness.add(prompt_of(5, salt), 8)
    harness.launch(fails=True)  # the third is in it with a chunk that is not sampled
    harness.abort(0)
    harness.add(prompt_of(3, 4), 8, row=0)
    harness.launch()  # … and the new one has no part in it
    harness.collect()
    assert harness.collect().rows.tolist() == [0]
    assert rows_of(harness.launch(fails=True)) == [1]
    harness.collect()
    assert harness.num_faults == 1
    assert rows_of(harness.launch()) == [2]
    harness.collect()
    assert sorted(rows_of(harness.launch())) == [0, 2]
    harness.finish()


def test_who_was_not_alone_in_a_failed_step_is_not_at_fault_though_the_others_are_gone() -> None:
    harness = Harness()
    for salt in range(2):
        harness.add(prompt_of(5, salt), 8)
    harness.launch(fails=True)
    harness.abort(0)
    harness.collect()
    assert harness.num_faults == 0
    assert rows_of(harness.launch()) == [1]
    harness.finish()


def test_a_probation_of_several_chunks_is_alone_throughout() -> None:
    harness = Harness(Limits(max_num_batched_tokens=4))
    harness.add(prompt_of(3), 4)
    harness.launch()
    long = harness.add(prompt_of(10, 1), 4, is_suspect=True)
    assert harness.launch() is None
    harness.collect()
    for num_tokens in (4, 4, 2):
        plan = harness.launch()
        assert plan is not None
        assert (harness.scheduler.rows_of(plan).tolist(), plan.num_tokens) == ([long], num_tokens)
        assert harness.launch() is None
        harness.collect()
    assert sorted(rows_of(harness.launch())) == [0, long]
    harness.finish()


def test_those_that_run_give_way_to_a_suspect() -> None:
    harness = Harness(Limits(num_blocks=6, block_size=4, max_model_len=20, max_num_seqs=2))
    harness.add(prompt_of(7), 9, outputs=2)
    harness.add(prompt_of(7, 1), 9)
    harness.launch()
    harness.collect()
    harness.add(prompt_of(6, 2), 9, is_suspect=True, priority=5)
    assert rows_of(harness.launch()) == [2]
    assert harness.scheduler.num_preemptions == 1
    harness.collect()
    harness.finish()


def test_a_suspect_that_may_not_run_keeps_nobody() -> None:
    harness = Harness(Limits(max_unacked=3))
    stuck = harness.add(prompt_of(4), 8, outputs=3, is_suspect=True)
    harness.add(prompt_of(4, 1), 8)
    assert rows_of(harness.launch()) == [1]
    harness.acknowledge()
    assert harness.launch() is None
    harness.collect()
    assert rows_of(harness.launch()) == [stuck]
    harness.finish()


def test_a_suspect_can_be_removed_at_any_time() -> None:
    harness = Harness()
    harness.add(prompt_of(4), 8)
    harness.add(prompt_of(4, 1), 8, is_suspect=True)
    harness.add(prompt_of(4, 2), 8, is_suspect=True)
    harness.abort(2)
    assert rows_of(harness.launch()) == [1]
    harness.abort(1)
    assert harness.launch() is None
    assert harness.collect().rows.tolist() == []
    assert rows_of(harness.launch()) == [0]
    harness.finish()


@pytest.mark.parametrize("prompt_len", [0, 6])
def test_a_prompt_must_lie_in_the_history(prompt_len: int) -> None:
    harness = Harness()
    harness.log.open(0)
    harness.log.extend(0, np.arange(5))
    request = new_request(
        row=0, prompt_len=prompt_len, max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=0
    )
    with pytest.raises(ValueError, match=f"prompt_len is {prompt_len}; row 0 holds 5 tokens"):
        harness.scheduler.add(request)


@pytest.mark.parametrize(("length", "prompt_len"), [(7, 5), (64, 64)])
def test_a_request_must_have_something_to_compute(length: int, prompt_len: int) -> None:
    harness = Harness()
    harness.log.open(0)
    harness.log.extend(0, np.arange(length))
    request = new_request(
        row=0,
        prompt_len=prompt_len,
        max_tokens=2,
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        seed=0,
    )
    with pytest.raises(ValueError, match="nothing to compute"):
        harness.scheduler.add(request)


def test_the_cache_must_hold_the_longest_request() -> None:
    with pytest.raises(ValueError, match="give at least 17, or a smaller max_model_len"):
        Harness(Limits(num_blocks=16, block_size=4, max_model_len=64))


def test_stop_ids_are_masked_until_min_tokens() -> None:
    harness = Harness()
    stops = tuple(range(0, VOCAB_SIZE, 2))
    harness.add(prompt_of(4), 9, min_tokens=6, stop_token_ids=stops)
    harness.add(prompt_of(4, 1), 9, stop_token_ids=stops)
    harness.add(prompt_of(4, 2), 9, min_tokens=2, stop_token_ids=(5,), outputs=1)
    first = harness.streams[0].want
    assert all(token not in stops for token in first[:6])
    assert any(token in stops for token in first[6:])
    harness.finish()  # check() compares the coordinates of every plan


def test_a_reused_row_brings_its_own_stop_ids_and_sampling() -> None:
    harness = Harness()
    harness.add(prompt_of(4), 9, row=0, min_tokens=6, stop_token_ids=(1, 2))
    harness.launch()
    harness.abort(0)
    harness.add(prompt_of(4), 9, row=0, min_tokens=6, stop_token_ids=(3, 4), top_k=5)
    plan = harness.launch()
    assert plan is not None
    assert plan.masked_ids.tolist() == [3, 4]
    assert (plan.top_ks.tolist(), plan.any_truncation) == ([5], True)
    harness.finish()


# --- anything at any time -----------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Requests come and go, acknowledgements lag, steps are up to two ahead and may fail."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_model_len=st.integers(8, 40),
        spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 2, 5, 16, 64]),
        max_unacked=st.sampled_from([1, 4, 1000]),
    )
    def start(self, block_size: int, max_model_len: int, spare_blocks: int, **limits: int) -> None:
        num_blocks = -(-max_model_len // block_size) + 1 + spare_blocks
        self.harness = Harness(
            Limits(
                num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, **limits
            )
        )
        self.seed = 0

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 30),
        outputs=st.integers(0, 10),
        priority=st.integers(-1, 1),
        min_tokens=st.integers(0, 4),
        worker_ends=st.booleans(),
        stop_token_ids=st.sampled_from([(), (3,), (1, 2, 3)]),
        num_logprobs=st.sampled_from([-1, 0, 2]),
        is_suspect=st.sampled_from([False, False, False, True]),
    )
    def add(self, prompt: list[int], **params: Any) -> None:
        prompt = prompt[: self.harness.limits.max_model_len - 1]
        self.seed += 1
        self.harness.add(prompt, seed=self.seed, **params)

    @precondition(lambda self: self.harness.streams)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.streams))))

    @precondition(lambda self: self.harness.streams)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        rows = sorted(self.harness.streams)
        self.harness.acknowledge(data.draw(st.lists(st.sampled_from(rows))))

    @precondition(lambda self: len(self.harness.launched) < 3)
    @rule(fails=st.booleans())
    def launch(self, fails: bool) -> None:
        self.harness.launch(fails=fails)

    @precondition(lambda self: self.harness.launched)
    @rule()
    def collect(self) -> None:
        self.harness.collect()

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.acknowledge()
            self.harness.launch()
            while len(self.harness.launched) > 1:
                self.harness.collect()

    @invariant()
    def blocks_have_one_owner(self) -> None:
        scheduler = self.harness.scheduler
        num_free = scheduler.num_free_blocks
        if scheduler._batch is not None:
            scheduler._batch.flush_deferred()
        assert scheduler.num_free_blocks == num_free
        slots = scheduler._slots
        owned: list[int] = []
        for slot, row in enumerate(slots.row.tolist()):
            table = slots.tables[slot]
            blocks = table[: slots.num_blocks[slot]].tolist()
            assert not table[len(blocks) :].any()
            assert (len(blocks) > 0) == (row >= 0)
            owned += blocks
        assert len(set(owned)) == len(owned)
        assert 0 not in owned
        assert len(owned) + scheduler.num_free_blocks == scheduler.num_blocks - 1
        assert scheduler.num_running + scheduler.num_waiting == len(self.harness.streams)
        suspects = [row for row in self.harness.streams if self.harness.is_suspect(row)]
        assert len(scheduler._suspects) == len(suspects)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish(ahead=self.seed % 3)


def check_any_order(max_examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        AnyOrder,
        settings=settings(max_examples=max_examples, stateful_step_count=40),
    )


def test_any_order() -> None:
    check_any_order(50)


@pytest.mark.long
def test_any_order_at_length() -> None:
    check_any_order(150)
