"""Rows that grow share the room for their log-probabilities: it is kept to, and all of them end."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.scheduler_harness import Harness, Limits, prompt_of

from slipstream_core.scheduler import logprob_budget
from slipstream_core.scheduler.logprob_budget import LogprobBudget, outputs_bytes, step_len
from slipstream_ipc.history.wide_logprobs import MAX_NARROW

TENANTS = (b"one", b"other")
STEP = 4  # outputs; the length of a page would be more than the model of the tests takes


class RoomyHarness(Harness):
    """Streams are closed in the room when they are forgotten: at their end, or later."""

    def __init__(self, limits: Limits, num_bytes: int) -> None:
        super().__init__(limits)
        self.logprob_budget = LogprobBudget(num_bytes)
        self.scheduler._logprob_budget = self.scheduler._running_set._logprob_budget = (
            self.logprob_budget
        )
        self.num_bytes = num_bytes
        self.ended: list[int] = []  # rows that still hold what is there
        self.largest = 0  # bytes that a stream may take alone

    def add_wanting(
        self, num_logprobs: int, max_tokens: int, outputs: int, salt: int, priority: int = 0
    ) -> None:
        row = min(set(range(64)) - self.streams.keys() - set(self.ended))
        size = outputs_bytes(num_logprobs, 1) if num_logprobs >= 0 else 0
        if not self.logprob_budget.reserve(size, was_accepted=priority < 0):
            return
        self.logprob_budget.open(row, size)
        prompt = prompt_of(3, salt)
        tenant = TENANTS[salt % len(TENANTS)]
        self.add(
            *(prompt, max_tokens),
            row=row,
            outputs=outputs,
            num_logprobs=num_logprobs,
            tenant=tenant,
            priority=priority,
        )
        if size:
            self.largest = max(self.largest, outputs_bytes(num_logprobs, max_tokens + STEP))

    def forget(self, row: int) -> None:
        num_logprobs = self.streams[row].request.num_logprobs
        num_outputs = self.log.length(row) - len(self.streams[row].prompt)
        super().forget(row)
        self.logprob_budget.shrink(
            row, outputs_bytes(num_logprobs, num_outputs) if num_logprobs >= 0 else 0
        )
        self.ended.append(row)

    def forget_ended(self, num: int = 1) -> None:
        for row in self.ended[:num]:
            self.logprob_budget.close(row)
        del self.ended[:num]

    def check_room(self) -> None:
        assert self.logprob_budget.num_reserved == sum(self.logprob_budget._reserved.values())
        assert self.logprob_budget.num_reserved <= self.num_bytes + self.largest
        requests = self.scheduler._requests
        for row, stream in self.streams.items():
            if stream.request.num_logprobs >= 0:
                assert requests.known[row] <= requests.logprob_limit[row], "sampled without room"
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.streams)
        by_tenant = [self.scheduler.waiting_of(tenant) for tenant in TENANTS]
        assert sum(num for num, _ in by_tenant) == self.scheduler.num_waiting
        assert sum(num for _, num in by_tenant) == self.scheduler.num_waiting_tokens

    def run(self, *, fails: bool = False) -> bool:
        """A step, one ahead; whether anything went on."""
        self.acknowledge()
        plan = self.launch(fails=fails)
        if plan is None and not self.launched:
            return False
        while len(self.launched) > (plan is not None):
            self.collect()
        self.check_room()
        return True


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([-1, 0, 3]), st.integers(1, 30), st.integers(0, 6)),
    st.tuples(st.just("run"), st.integers(1, 12), st.booleans(), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 5), st.just(0), st.just(0)),
    st.tuples(st.just("forget"), st.integers(1, 3), st.just(0), st.just(0)),
)


@settings(deadline=None, max_examples=150)
@given(
    steps=st.integers(1, 12),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 5),
    actions=st.lists(ACTIONS, max_size=40),
)
def test_rows_that_grow_keep_to_the_room_and_all_of_them_end(
    steps: int, spare_blocks: int, max_num_seqs: int, actions: list[tuple]
) -> None:
    with patch.object(logprob_budget, "PAGE_LEN", STEP):
        limits = Limits(max_num_seqs=max_num_seqs, num_blocks=17 + spare_blocks)
        harness = RoomyHarness(limits, steps * outputs_bytes(3, 1))
        for number, (kind, first, second, third) in enumerate(actions):
            if kind == "add":
                harness.add_wanting(first, second, third, number, priority=number % 3 - 1)
            elif kind == "run":
                for _ in range(first):
                    harness.run(fails=bool(second) and _ == 0)
            elif kind == "abort" and harness.streams:
                rows = sorted(harness.streams)
                harness.abort(rows[first % len(rows)])
            else:
                harness.forget_ended(first)
        while harness.streams:  # they end, and what they hold goes when nothing else can
            if not harness.run():
                assert harness.ended, "rows wait, and nothing will ever be freed"
                harness.forget_ended()
        harness.forget_ended(len(harness.ended))
        assert harness.logprob_budget.num_reserved == 0
        assert not harness.logprob_budget.waiting
        assert harness.scheduler.num_free_blocks == limits.num_blocks - 1


def test_the_first_goes_on_when_all_that_hold_room_wait_for_more() -> None:
    with patch.object(logprob_budget, "PAGE_LEN", STEP):
        harness = RoomyHarness(Limits(), 3 * outputs_bytes(3, 1))
        for salt in range(3):
            harness.add_wanting(3, 20, 0, salt)
        while not harness.ended:
            assert harness.run()
        assert harness.ended == [0]
        assert harness.logprob_budget.waiting == {1, 2}
        assert not harness.run()  # beyond the bound is only one at a time
        order = []
        while harness.ended or harness.streams:
            order += harness.ended
            harness.forget_ended(3)
            while harness.run():
                pass
        assert order == [0, 1, 2]


def test_a_tenants_rows_that_wait_for_room_count_as_waiting() -> None:
    with patch.object(logprob_budget, "PAGE_LEN", STEP):
        harness = RoomyHarness(Limits(), 3 * outputs_bytes(3, 1))
        for salt in range(3):
            harness.add_wanting(3, 20, 0, salt)
        while not harness.ended:
            harness.run()
        assert harness.logprob_budget.waiting == {1, 2}
        num_tokens = [int(harness.scheduler._requests.known[row]) for row in (1, 2)]
        assert harness.scheduler.waiting_of(TENANTS[1]) == (1, num_tokens[0])
        assert harness.scheduler.waiting_of(TENANTS[0]) == (1, num_tokens[1])
        assert harness.scheduler.waiting_of(b"a third") == (0, 0)


def test_who_grows_comes_before_who_asks_to_be_taken() -> None:
    logprob_budget = LogprobBudget(100)
    for row in (1, 2):
        assert logprob_budget.reserve(40)
        logprob_budget.open(row, 40)
    assert not logprob_budget.grow(1, 40)
    logprob_budget.waiting.add(1)
    assert not logprob_budget.reserve(10)
    assert logprob_budget.reserve(0)
    assert logprob_budget.reserve(10, was_accepted=True)
    logprob_budget.open(3, 10)
    logprob_budget.shrink(2, 8)
    assert logprob_budget.num_reserved == 58
    assert logprob_budget.was_freed
    assert logprob_budget.grow(1, 40)
    logprob_budget.waiting.remove(1)
    for row in (1, 1, 2, 3):
        logprob_budget.close(row)
    assert logprob_budget.num_reserved == 0


def test_steps_of_wide_rows_are_few_tokens() -> None:
    assert step_len(MAX_NARROW - 1) == 64
    assert step_len(32_000) == 1
    assert outputs_bytes(32_000, 3) == 3 * (8 * 32_001 + 4)


def test_the_one_beyond_the_bound_goes_on_before_a_more_urgent_one() -> None:
    with patch.object(logprob_budget, "PAGE_LEN", STEP):
        harness = RoomyHarness(Limits(), 3 * outputs_bytes(3, 1))
        for salt in range(3):
            harness.add_wanting(3, 30, 0, salt)
        while harness.scheduler._unbounded is None:
            assert harness.run()
        for row in (1, 2):
            harness.abort(row)
        harness.forget_ended(2)
        harness.add_wanting(3, 30, 0, 3, priority=-1)
        while harness.streams:
            if not harness.run():
                assert harness.ended, "rows wait, and nothing will ever be freed"
                harness.forget_ended()
