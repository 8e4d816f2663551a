"""Tenants of equal priority take turns, and one alone has the order of arrival."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.admits import admit_of
from tests.helpers.new_requests import new_request

from slipstream_core.scheduler.request_table import NewRequest, RequestTable
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.scheduler.waiting_queue import WaitingQueue
from slipstream_core.workers.adapters import Adapters
from slipstream_core.workers.admission import Admission, WaitingLoad
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Admit, ModelCard, SamplingParams

TENANTS = st.sampled_from([b"a", b"b", b"c"])


def request(
    row: int, tenant: bytes, prompt_len: int, priority: int = 0, own_priority: int = 0
) -> NewRequest:
    return new_request(
        row=row,
        prompt_len=prompt_len,
        max_tokens=4,
        priority=priority,
        own_priority=own_priority,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        tenant=tenant,
        worker_ends=False,
    )


@dataclass
class Line:
    """A queue, and what a plain list says of it."""

    requests: RequestTable = field(default_factory=RequestTable)
    waiting: dict[int, NewRequest] = field(default_factory=dict)
    began: list[NewRequest] = field(default_factory=list)
    num: int = 0

    def __post_init__(self) -> None:
        self.queue = WaitingQueue(self.requests)

    def join(
        self, tenant: bytes, prompt_len: int = 10, priority: int = 0, own_priority: int = 0
    ) -> int:
        row = self.num
        self.num += 1
        new = request(row, tenant, prompt_len, priority, own_priority)
        self.requests.add(new, known=prompt_len, limit=prompt_len + 4, run_ahead=9)
        self.queue.join(row)
        self.waiting[row] = new
        return row

    def begin(self) -> NewRequest:
        row = self.queue.peek(0)
        assert row is not None
        self.queue.begin(row)
        self.began.append(self.waiting.pop(row))
        return self.began[-1]

    def give_up(self, row: int) -> None:
        self.queue.remove(row)
        self.requests.remove(np.array([row]))
        del self.waiting[row]

    def check(self) -> None:
        nums: Counter[bytes] = Counter(each.spec.tenant for each in self.waiting.values())
        tokens: Counter[bytes] = Counter()
        for each in self.waiting.values():
            tokens[each.spec.tenant] += each.prompt_len
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_tokens == tokens.total()
        for tenant in (b"a", b"b", b"c", b"nobody"):
            assert self.queue.of_tenant(tenant) == (nums[tenant], tokens[tenant])
        rows = [self.queue.peek(nth) for nth in range(len(self.waiting))]
        assert set(rows) == self.waiting.keys()
        assert self.queue.peek(len(rows)) is None
        priorities = [self.waiting[row].spec.priority for row in rows if row is not None]
        assert priorities == sorted(priorities)
        assert self.in_order() == rows

    def in_order(self) -> list[int]:
        """The rows as they would begin, if no other came."""
        self.queue._order = None  # an iterator is not copied
        queue, rows = copy.deepcopy(self.queue), []
        while (row := queue.peek(0)) is not None:
            rows.append(row)
            queue.begin(row)
        requests = queue._requests
        assert requests.in_order(np.array(sorted(rows), np.int64)).tolist() == rows
        return rows


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 1000)), max_size=40))
def test_one_tenant_has_the_order_of_priority_and_arrival(given_: list[tuple[int, int]]) -> None:
    line = Line()
    for priority, prompt_len in given_:
        line.join(b"a", prompt_len, priority)
    found = [line.begin() for _ in given_]
    assert found == sorted(found, key=lambda it: (it.spec.priority, it.row))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            TENANTS,
            st.integers(1, 500),
            st.integers(0, 1),
            st.integers(-1, 1),
        ),
        max_size=60,
    )
)
def test_what_waits_is_counted_and_in_order(
    actions: list[tuple[int, bytes, int, int, int]],
) -> None:
    """Arrivals, beginnings, preemptions, requests that are given up, of two priorities."""
    line = Line()
    for kind, tenant, size, priority, own_priority in actions:
        if kind < 5:
            line.join(tenant, size, priority, own_priority)
        elif kind < 7 and line.waiting:
            line.begin()
        elif kind == 7 and line.waiting:  # the first was passed over
            row = line.queue.peek(size % len(line.waiting))
            assert row is not None
            line.queue.begin(row)
            line.waiting.pop(row)
        elif kind == 8 and line.began:
            again = line.began.pop()
            line.queue.add(again.row)
            line.waiting[again.row] = again
        elif kind == 9 and line.waiting:
            line.give_up(sorted(line.waiting)[size % len(line.waiting)])
        line.check()
    assert line.queue._costs.keys() <= line.waiting.keys()
    while line.waiting:
        line.begin()
    assert not line.queue._levels


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 1000)), max_size=40))
def test_own_priorities_are_kept_among_a_tenants_requests(own: list[tuple[int, int]]) -> None:
    line = Line()
    for own_priority, prompt_len in own:
        line.join(b"a", prompt_len, own_priority=own_priority)
    found = [line.begin() for _ in own]
    assert found == sorted(found, key=lambda it: (it.spec.own_priority, it.row))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 1000), st.integers(-(2**31), 2**31 - 1)),
        max_size=40,
    )
)
def test_own_priorities_take_no_turn_of_another_tenant(
    steps: list[tuple[int, int, int]],
) -> None:
    """With priorities that counted among all, 60 requests of one key ran before one of another.

    However another tenant orders its requests, one behind it waits for turns of no more tokens than
    there were in its own, and one request's.
    """
    line, largest = Line(), 0
    waits: dict[int, int] = {}  # rows of b, and what a has had since they are the first of b
    for kind, size, own_priority in steps:
        if kind:
            line.join(b"a", size, own_priority=own_priority)
            largest = max(largest, size + 4)
        else:
            waits[line.join(b"b", 100)] = 0
    while line.waiting:
        begun = line.begin()
        if begun.spec.tenant == b"a" and waits:
            first = min(waits)
            waits[first] += begun.prompt_len + 4
            assert waits[first] <= 104 + 2 * largest
        waits.pop(begun.row, None)


@pytest.mark.parametrize("num", [100, 2000])
def test_a_requests_own_priority_costs_the_same_however_many_wait(num: int) -> None:
    """Each comes before all others of its tenant: their turns are not assigned anew."""
    line = Line()
    for number in range(num):
        line.join(b"a", 10, own_priority=-number)
    line.join(b"b", 10)
    assert [line.begin().row for _ in range(4)] == [num - 1, num, num - 2, num - 3]
    assert len(line.queue._levels[0].heads) <= num + 4


@pytest.mark.parametrize("num_tenants", [1, 2, 7])
@pytest.mark.parametrize("num_begun", [0, 1, 100, 250])
def test_a_newcomer_lets_each_of_those_that_wait_go_first_once(
    num_tenants: int, num_begun: int
) -> None:
    for most in (1, 500):  # tokens of a prompt
        line = Line()
        for number in range(300):
            line.join(b"%d" % (number % num_tenants), 1 + 37 * number % most)
        for _ in range(num_begun):
            line.begin()
        row = line.join(b"new", 5000)
        before = []
        while (begun := line.begin()).row != row:
            before.append(begun.prompt_len + 4)
        assert sum(before) <= num_tenants * (most + 4)


def test_turns_are_counted_in_tokens() -> None:
    """Of two that always have something waiting, one with requests ten times as long."""
    line = Line()
    for _ in range(400):
        line.join(b"a", 100)
        line.join(b"b", 1000)
    served: Counter[bytes] = Counter()
    for _ in range(300):
        begun = line.begin()
        served[begun.spec.tenant] += begun.prompt_len + 4
        assert abs(served[b"a"] - served[b"b"]) <= 2 * 1004


def test_what_is_given_up_costs_nothing() -> None:
    line = Line()
    rows = [line.join(b"a", 1000) for _ in range(100)]
    for _ in range(50):
        line.join(b"b", 10)
    for row in rows:
        line.give_up(row)
    row = line.join(b"a", 10)
    assert line.queue.peek(1) == row


def test_what_has_run_is_not_forgiven_by_what_is_given_up() -> None:
    """Else a tenant who gives up a small request before each large one pays for none."""

    def share(*, gives_up: bool) -> float:
        line, tokens = Line(), Counter[bytes]()
        for _ in range(400):
            line.join(b"b", 100)
        line.join(b"a", 10_000)
        for _ in range(300):
            began = line.begin()
            tokens[began.spec.tenant] += began.prompt_len
            if began.spec.tenant == b"a":
                if gives_up:
                    line.give_up(line.join(b"a", 1))
                line.join(b"a", 10_000)
        return tokens[b"a"] / tokens.total()

    assert share(gives_up=True) == share(gives_up=False)


def test_one_given_up_before_others_costs_nothing_once_none_waits() -> None:
    line = Line()
    for _ in range(400):
        line.join(b"b", 100)
    first, second = line.join(b"a", 10_000), line.join(b"a", 10)
    line.give_up(first)  # whose turn the second one's follows
    while second in line.waiting:
        line.begin()
    row = line.join(b"a", 10)
    assert row in (line.queue.peek(0), line.queue.peek(1))


def test_tenants_that_have_gone_are_forgotten() -> None:
    line = Line()
    line.join(b"stays", 10**9)
    line.join(b"stays", 10**9)
    for number in range(5000):
        line.join(b"%d" % number)
        line.begin()
    (level,) = line.queue._levels.values()
    assert len(level.ends) <= 1024 + 1


def test_newcomers_without_end_keep_nobody_from_his_next_turn() -> None:
    """There are always several of them, each of another tenant."""
    line = Line()
    for _ in range(2):
        last = line.join(b"stays", 100)
    for number in range(2000):
        if last not in line.waiting:
            break
        line.join(b"%d" % number)
        line.join(b"%d or so" % number)
        line.begin()
    assert last not in line.waiting


def test_ten_thousand_of_one_tenant_delay_anothers_by_a_few_steps() -> None:
    tokens = TokenLog()
    scheduler = Scheduler(
        tokens=tokens,
        cache=CacheConfig(num_blocks=400, block_size=4),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
    )

    def add(row: int, tenant: bytes) -> None:
        tokens.open(row)
        tokens.extend(row, np.arange(6, dtype=np.uint32))
        scheduler.add(request(row, tenant, 6))

    def step() -> list[int]:
        plan = scheduler.schedule(acked)
        assert plan is not None
        rows = scheduler.rows_of(plan).tolist()
        scheduler.complete(plan, np.zeros(int(plan.samples.sum()), np.int64))
        return rows

    acked = np.zeros(20_000, np.int64)
    for row in range(10_000):
        add(row, b"many")
    for _ in range(20):
        step()
    add(10_000, b"one")
    num_steps = 1
    while 10_000 not in step():
        num_steps += 1
    # slots are free after 4 steps, as an answer has 4 tokens; one of the others' may go first
    assert num_steps <= 2 * 4
    assert scheduler.waiting_of(b"many")[0] > 9_900


def waits_beside(own_priority: Callable[[int, int, int], int]) -> list[int]:
    """Steps that each of one tenant's requests waits, one after another, in few slots and little
    cache that another tenant's 32 use at once; these have own priorities by number, prompt length
    and answer's length.
    """
    draws, tokens = random.Random(0), TokenLog()
    scheduler = Scheduler(
        tokens=tokens,
        cache=CacheConfig(num_blocks=40, block_size=4),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
    )
    rows, others, waits, num_steps = itertools.count(), itertools.count(), list[int](), 0

    def add(tenant: bytes, prompt_len: int, max_tokens: int, own_priority: int = 0) -> int:
        row = next(rows)
        tokens.open(row)
        tokens.extend(row, np.full(prompt_len, row, np.uint32))
        new = request(row, tenant, prompt_len, own_priority=own_priority)
        scheduler.add(replace(new, max_tokens=max_tokens))
        return row

    def add_other() -> None:
        prompt_len, max_tokens = draws.choice((6, 60)), draws.choice((4, 20))
        add(b"k2", prompt_len, max_tokens, own_priority(next(others), prompt_len, max_tokens))

    for _ in range(32):
        add_other()
    acked = np.zeros(20_000, np.int64)
    mine, came_at, has_begun = add(b"k1", 10, 8), 0, False
    while len(waits) < 100:
        plan = scheduler.schedule(acked)
        assert plan is not None
        num_steps += 1
        computed = set(scheduler.rows_of(plan).tolist())
        scheduler.complete(plan, np.zeros(int(plan.samples.sum()), np.int64))
        if mine in computed and not has_begun:
            has_begun = True
            waits.append(num_steps - came_at)
        for row in sorted(computed):
            if scheduler._requests.known[row] < scheduler._requests.limit[row]:
                continue
            scheduler.remove(row)
            if row == mine:
                mine, came_at, has_begun = add(b"k1", 10, 8), num_steps, False
            else:
                add_other()
    return waits


def test_a_keys_waits_are_those_it_has_without_anothers_priorities() -> None:
    """Whatever those are, its median and mean are at most twice as long."""
    draws = random.Random(0)
    plain = waits_beside(lambda *_: 0)
    assert max(plain) > 4, "it does wait"
    for own_priority in (
        lambda *_: draws.randint(-1000, 1000),
        lambda *_: -1000,
        lambda number, *_: -number,  # the newest first
        lambda _, prompt_len, max_tokens: -prompt_len - max_tokens,
        lambda _, prompt_len, max_tokens: prompt_len + max_tokens,
        lambda number, *_: -1000 if number % 32 else 1000,
    ):
        found = waits_beside(own_priority)
        assert sum(found) <= 2 * sum(plain)
        assert median(found) <= 2 * median(plain)


# ---- how many may wait ---------------------------------------------------------------------------

CARD = ModelCard("m", "p", vocab_size=100, max_model_len=1000, eos_token_ids=())


def admission(most: int = 10, most_tokens: int = 1000) -> Admission:
    return Admission(
        CARD,
        fits=lambda _: True,
        max_waiting=most,
        max_readmitted=5 * most,
        max_waiting_tokens=most_tokens,
        max_readmitted_tokens=5 * most_tokens,
        engine_objection=lambda _: None,
        adapters=Adapters(),
    )


def registration(num_tokens: int, *, was_accepted: bool = False) -> Admit:
    return admit_of(
        *(bytes(16), pack_u32([1] * num_tokens), SamplingParams(), (), 0, 4),
        was_accepted=was_accepted,
    )


def taken(
    limits: Admission, num_tokens: int, waiting: Callable[[int, int], WaitingLoad]
) -> tuple[int, str]:
    """How many are taken one after another, and why no more."""
    for num in range(1000):
        fault = limits.objection(registration(num_tokens), waiting(num, num * num_tokens))
        if fault is not None:
            assert fault.code == "overloaded"
            return num, fault.message
    raise AssertionError("there is no bound")


def test_a_tenant_alone_may_have_all_that_may_wait() -> None:
    def alone(num: int, num_tokens: int) -> WaitingLoad:
        return WaitingLoad(num, num_tokens, num, num_tokens)

    assert taken(admission(), 1, alone) == (10, "10 requests are waiting already")
    assert taken(admission(), 300, alone) == (3, "900 tokens are waiting already")
    assert taken(admission(most=1000), 100, alone) == (10, "1000 tokens are waiting already")


def test_there_is_room_for_others_where_one_has_all_it_may() -> None:
    def beside(num: int, num_tokens: int) -> WaitingLoad:
        return WaitingLoad(10 + num, 1000 + num_tokens, num, num_tokens)

    assert taken(admission(), 1, beside) == (
        5,
        "5 requests of this tenant are waiting already, 15 in all",
    )
    message = "500 tokens of this tenant are waiting already, 1500 in all"
    assert taken(admission(most=100), 100, beside) == (5, message)


def test_what_was_accepted_once_passes_these_bounds() -> None:
    full = WaitingLoad(20, 2000, 20, 2000)
    again = registration(100, was_accepted=True)
    assert admission().objection(registration(100), full) is not None
    assert admission().objection(again, full) is None
    assert admission().objection(again, WaitingLoad(100, 0, 50, 0)) is not None
    assert admission().objection(again, WaitingLoad(0, 9999, 0, 2)) is not None
