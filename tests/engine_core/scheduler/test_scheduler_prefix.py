"""Scheduler and prefix cache against a device that is a dictionary: what each place holds.

`Device` keeps, by (block, offset), the whole prefix that was computed there, or garbage where a
step failed. A row's token counts only if every place that the row read held its own prefix; and,
where the model carries states, if that of its slot was behind this prefix.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
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
from tests.helpers.scheduler_harness import scheduler_of
from tests.helpers.watched_rows import WatchedReasoning

from slipstream_core.kvcache.prefix_cache import next_digest
from slipstream_core.scheduler import state_marks
from slipstream_core.scheduler.engine_counters import EngineCounters
from slipstream_core.scheduler.scheduler import NewRequest
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.history.token_log import TokenLog

VOCAB_SIZE = 5
MAX_ROWS = 64
GARBAGE = ("garbage",)

Prefix = tuple[int, ...]


def next_token(prefix: Prefix) -> int:
    """What the model says: a function of all that is before, though often the same."""
    return (sum(prefix) * 3 + len(prefix) // 4) % VOCAB_SIZE


@dataclass
class Stream:
    request: NewRequest
    ids: list[int]  # prompt and outputs that are in the history


@dataclass
class Device:
    """Executes plans at launch, in order; a plan that fails leaves garbage where it would write,
    and its entries do not reach the tables.
    """

    block_size: int
    tables: np.ndarray  # by slot, of what plans have brought
    content: dict[tuple[int, int], Prefix | tuple[str]] = field(default_factory=dict)
    last_token: dict[int, int] = field(default_factory=dict)  # by slot
    # by slot, and by snapshot: behind which tokens this state is
    states: dict[int, Any] = field(default_factory=dict)
    snapshots: dict[int, Any] = field(default_factory=dict)
    has_states: bool = False

    def run(self, plan: StepPlan, *, fails: bool) -> tuple[list[int], list[bool]]:
        """The sampled rows' tokens, and whether each of them had read its own prefix."""
        sampled: list[int] = []
        were_right: list[bool] = []
        last: dict[int, int] = {}
        end = 0
        if not fails:
            self.tables[plan.table_slots, plan.table_numbers] = plan.table_blocks
            self.load(plan)
        self.save_in_front(plan, fails=fails)
        for i in range(plan.num_requests):
            begin, end = end, end + int(plan.query_lens[i])
            table = self.tables[plan.slots[i]].tolist()
            tokens: list[int] = []
            for at in range(begin, end):
                position = int(plan.positions[at])
                gathered = int(plan.gather_slots[at])
                token = int(plan.token_ids[at]) if gathered < 0 else self.last_token[gathered]
                before = self.prefix(table, position)
                place = divmod(int(plan.kv_slots[at]), self.block_size)
                is_garbage = fails or before is None
                self.content[place] = GARBAGE if is_garbage else (*before, token)
                tokens.append(token)
            state = self.mix(plan, i, tokens, fails=fails)
            if plan.samples[i]:
                prefix = self.prefix(table, int(plan.kv_lens[i]))
                were_right.append(prefix is not None and state in (None, prefix))
                token = next_token(prefix) if prefix is not None else 0
                sampled.append(token)
                last[int(plan.slots[i])] = token
        self.last_token.update(last)
        return sampled, were_right

    def load(self, plan: StepPlan) -> None:
        if plan.snapshots is not None:
            columns = (plan.snapshots.load_slots, plan.snapshots.loads)
            for slot, snapshot in zip(*(each.tolist() for each in columns), strict=True):
                self.states[slot] = self.snapshots[snapshot]

    def save_in_front(self, plan: StepPlan, *, fails: bool) -> None:
        if plan.snapshots is not None:
            columns = (plan.snapshots.front_places, plan.snapshots.front_saves)
            for place, snapshot in zip(*(each.tolist() for each in columns), strict=True):
                self.snapshots[snapshot] = GARBAGE if fails else self.state_at(place)

    def state_at(self, place: int) -> Any:
        num_slots = len(self.tables)
        if place < num_slots:
            return self.states.get(place, GARBAGE)
        return self.snapshots.get(place - num_slots, GARBAGE)

    def leave(self, place: int, state: Any) -> None:
        num_slots = len(self.tables)
        if place < num_slots:
            self.states[place] = state
        else:
            self.snapshots[place - num_slots] = state

    def mix(self, plan: StepPlan, row: int, tokens: list[int], *, fails: bool) -> Any:
        """The state behind a row's tokens; None if the model carries none."""
        if not self.has_states:
            assert plan.snapshots is None
            return None
        read = write = int(plan.slots[row])
        start = int(plan.kv_lens[row]) - len(tokens)
        alternation = None if plan.snapshots is None else plan.snapshots.alternation
        if alternation is not None:
            for at in np.flatnonzero(alternation.rows == row).tolist():
                read, write = int(alternation.reads[at]), int(alternation.writes[at])
                assert write in (int(plan.slots[row]), read) or read == int(plan.slots[row])
        state: Any = self.state_at(read) if start else ()
        if fails:
            state, tokens = GARBAGE, []
        if (snapshots := plan.snapshots) is not None:
            saves = [*snapshots.saves.tolist(), *snapshots.front_saves.tolist()]
            assert len(set(saves)) == len(saves)
            assert set(saves).isdisjoint(snapshots.loads.tolist())
            for at in np.flatnonzero(snapshots.save_rows == row).tolist():
                length = int(snapshots.save_lens[at])
                assert row >= plan.num_decodes
                assert 0 < length <= int(plan.query_lens[row])
                self.snapshots[int(snapshots.saves[at])] = (*state, *tokens[:length])
        self.leave(write, (*state, *tokens))
        return (*state, *tokens)

    def prefix(self, table: list[int], length: int) -> Prefix | None:
        """The first tokens that a table's places hold, None where they are of different prefixes.

        The last place holds the whole prefix, each one before it must hold a part of that.
        """
        whole: Any = ()
        for position in range(length):
            held = self.content.get(
                (table[position // self.block_size], position % self.block_size)
            )
            if held is None or held == GARBAGE or held[:-1] != whole:
                return None
            whole = held
        return whole


class Harness:
    """The engine's part."""

    def __init__(self, **limits: Any) -> None:
        self.limits = {
            "num_blocks": 40,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 64,
            "enable_prefix_caching": True,
        } | limits
        self.block_size: int = self.limits["block_size"]
        self.log = TokenLog(rows=2)
        self.scheduler = scheduler_of(self.log, **self.limits)
        self.blocks = self.scheduler._blocks
        self.num_looked_up = 0  # requests, from their beginnings
        self.watch_room()
        max_blocks = -(-self.limits["max_model_len"] // self.block_size)
        self.device = Device(
            self.block_size,
            np.zeros((self.limits["max_num_seqs"], max_blocks), np.int32),
            has_states=self.limits.get("has_states", False),
        )
        self.acked = np.zeros(MAX_ROWS, np.int64)
        self.streams: dict[int, Stream] = {}
        self.launched: deque[tuple[StepPlan, bool, list[int], list[bool]]] = deque()
        self.prefixes: dict[bytes, Prefix] = {}  # what each name stands for
        self.answers: list[Prefix] = []  # of streams that have ended, with their prompts

    def watch_room(self) -> None:
        """Whoever is refused for what is remembered of him would be refused anyhow."""
        blocks, find_room, find = self.blocks, self.blocks.find_room, self.blocks._find

        def looked_up(row: int, max_shared: int) -> Any:
            self.num_looked_up += 1
            return find(row, max_shared)

        def checked(row: int, *, reserved: int = 0) -> Any:
            found = find_room(row, reserved=reserved)
            if found is None:
                remembered, blocks._shortage = blocks._shortage, None
                num_before = self.num_looked_up
                assert find_room(row, reserved=reserved) is None
                self.num_looked_up, blocks._shortage = num_before, remembered
            return found

        blocks._find, blocks.find_room = looked_up, checked

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        outputs: int = 0,
        end: int | None = None,
        **more: Any,
    ) -> int:
        """Add a request. end: the token that ends its reasoning, if that is followed."""
        row = min(set(range(MAX_ROWS)) - self.streams.keys())
        ids = list(prompt)
        for _ in range(
            min(outputs, max_tokens - 1, self.limits["max_model_len"] - len(prompt) - 1)
        ):
            ids.append(next_token(tuple(ids)))
        if end is not None:
            more["reasoning"] = WatchedReasoning(end, ids[len(prompt) :])
        request = new_request(
            row=row,
            prompt_len=len(prompt),
            max_tokens=max_tokens,
            **{"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": row} | more,
        )
        self.log.open(row)
        self.log.extend(row, np.array(ids, np.uint32))
        self.scheduler.add(request)
        self.streams[row] = Stream(request, ids)
        return row

    def launch(self, *, fails: bool = False) -> StepPlan | None:
        for row in self.streams:
            self.acked[row] = self.log.length(row)
        plan = self.scheduler.schedule(self.acked)
        if plan is None:
            return None
        assert 0 < plan.num_tokens <= self.limits["max_num_batched_tokens"]
        assert len(set(plan.kv_slots.tolist())) == plan.num_tokens, "a place has two writers"
        self.check_writers(plan)
        self.launched.append((plan, fails, *self.device.run(plan, fails=fails)))
        return plan

    def check_writers(self, plan: StepPlan) -> None:
        """Who writes to a block that others read is the one who fills it, in this very step."""
        ends = np.cumsum(plan.query_lens)
        held = Counter(
            block for slot in range(self.limits["max_num_seqs"]) for block in self.table(slot)
        )
        for i, end in enumerate(ends.tolist()):
            places = plan.kv_slots[end - int(plan.query_lens[i]) : end]
            for block in set((places // self.block_size).tolist()):
                if held[block] > 1:
                    last = int(plan.kv_lens[i]) - 1
                    number = self.table(int(plan.slots[i])).index(block)
                    assert i >= plan.num_decodes
                    assert (number + 1) * self.block_size - 1 <= last, "written, shared, not filled"

    def collect(self) -> list[int]:
        """Take in the oldest step; returns the rows that got a token."""
        plan, fails, token_ids, were_right = self.launched.popleft()
        if fails:
            for row in self.scheduler.fail(plan).tolist():
                self.forget(row)
            return []
        sampled = self.scheduler.complete(plan, np.array(token_ids, np.int64))
        for row, at in zip(sampled.rows.tolist(), sampled.index.tolist(), strict=True):
            ids = self.streams[row].ids
            assert were_right[at], "it read what is not its own"
            assert token_ids[at] == next_token(tuple(ids))
            ids.append(token_ids[at])
        for row in sampled.ended.tolist():
            self.forget(row)
        return sampled.rows.tolist()

    def collect_several(self, num_more: int) -> None:
        """Take in the oldest step, as one that gave each row that read its own so many tokens more;
        what is in flight for these rows is dropped.
        """
        plan, fails, token_ids, were_right = self.launched[0]
        if fails or not token_ids:
            self.collect()
            return
        self.launched.popleft()
        given: list[list[int]] = []
        rows = self.scheduler.rows_of(plan)[plan.samples].tolist()
        for row, token, was_right in zip(rows, token_ids, were_right, strict=True):
            given.append([token])
            for _ in range(num_more if was_right and row in self.streams else 0):
                given[-1].append(next_token((*self.streams[row].ids, *given[-1])))
        ids = [token for each in given for token in each]
        right = [is_right for each, is_right in zip(given, were_right, strict=True) for _ in each]
        counts = np.array([len(each) for each in given], np.int64)
        sampled = self.scheduler.complete(plan, np.array(ids, np.int64), counts)
        assert sampled.counts is not None
        owners = np.repeat(sampled.rows.array, sampled.counts).tolist()
        for row, at in zip(owners, sampled.index.tolist(), strict=True):
            own = self.streams[row].ids
            assert right[at], "it read what is not its own"
            assert ids[at] == next_token(tuple(own))
            own.append(ids[at])
        for row in sampled.ended.tolist():
            self.forget(row)

    def run(self, steps: int = 1, ahead: int = 0) -> list[list[int]]:
        """So many steps; the tokens that each row of each step computes."""
        counts = []
        for _ in range(steps):
            plan = self.launch()
            counts.append([] if plan is None else plan.query_lens.tolist())
            while len(self.launched) > (ahead if plan is not None else 0):
                self.collect()
        return counts

    def forget(self, row: int) -> None:
        self.answers.append(tuple(self.streams.pop(row).ids))
        self.log.drop(row)
        self.acked[row] = 0

    def abort(self, row: int) -> None:
        self.scheduler.remove(row)
        self.forget(row)

    def finish(self, ahead: int = 1) -> None:
        for _ in range(3000):
            if not (self.scheduler.has_work or self.launched):
                break
            plan = self.launch()
            assert plan is not None or self.launched, "work is left, but nobody can run"
            while len(self.launched) > (ahead if plan is not None else 0):
                self.collect()
        assert not self.streams, "somebody starves"
        assert not self.blocks._branches
        assert not len(self.blocks.marks)
        assert not len(self.blocks.twins)
        assert self.scheduler.num_free_blocks == self.limits["num_blocks"] - 1
        assert not self.blocks._cache or not self.blocks._cache._chains

    def table(self, slot: int) -> list[int]:
        slots = self.scheduler._slots
        blocks: list[int] = slots.tables[slot, : slots.num_blocks[slot]].tolist()
        return blocks

    def check(self) -> None:
        """Whatever the scheduler believes of the blocks is so."""
        if self.scheduler._batch is not None:
            self.scheduler._batch.flush_deferred()
        requests, slots, pool = self.scheduler._requests, self.scheduler._slots, self.blocks._pool
        self.check_snapshots()
        held: Counter[int] = Counter()
        for slot, row in enumerate(slots.row.tolist()):
            table = self.table(slot)
            held.update(table)
            assert len(set(table)) == len(table)
            assert (len(table) > 0) == (row >= 0)
        every = np.arange(pool.num_blocks, dtype=np.int32)
        assert pool.refs(every).tolist() == [held[block] for block in range(pool.num_blocks)]
        assert held[0] == 0
        assert pool.num_free == pool.num_blocks - 1 - len(held)
        if any(fails for _, fails, _, _ in self.launched):
            return  # who has part in that, and what it leaves behind, is told when it is answered
        for slot, row in enumerate(slots.row.tolist()):
            num = -(-int(requests.computed[row]) // self.block_size) if row >= 0 else 0
            assert self.device.tables[slot, :num].tolist() == self.table(slot)[:num]
        for slot, row in enumerate(slots.row.tolist()):
            if row < 0:
                continue
            computed = int(requests.computed[row])
            prefix = self.device.prefix(self.table(slot), computed)
            assert prefix is not None
            ids = self.streams[row].ids
            assert list(prefix[: len(ids)]) == ids[:computed]
        self.check_names()

    def check_snapshots(self) -> None:
        """Each is free or found, and nothing is left of a step that has been planned."""
        snapshots = self.blocks.snapshots
        twins = self.blocks.twins.snapshots
        marks = self.blocks.marks.by_slot
        of_marks = [mark.snapshot for mark in marks.values()]
        every = [*snapshots._free, *snapshots._of.values(), *twins, *of_marks]
        assert sorted(every) == list(range(snapshots.num))
        assert not snapshots._saved
        assert not snapshots._loaded
        assert not self.blocks._loads
        assert not self.blocks._saves
        assert len(of_marks) == len(self.blocks.marks)
        assert 2 * (len(of_marks) + len(twins)) <= snapshots.num
        if any(fails for _, fails, _, _ in self.launched):
            return
        for slot, mark in marks.items():
            stream = self.streams[int(self.scheduler._slots.row[slot])]
            length = mark.num_blocks * self.block_size
            if 0 < length <= len(stream.ids):
                assert self.device.snapshots[mark.snapshot] == tuple(stream.ids[:length])

    def check_names(self) -> None:
        """A block that could be found holds what its name says."""
        cache = self.blocks._cache
        if cache is None:
            return
        size = self.block_size
        for root in {stream.request.prefix_root for stream in self.streams.values()}:
            for stream in self.streams.values():
                name = root
                for end in range(size, len(stream.ids) + 1, size):
                    ids = stream.ids[end - size : end]
                    name = next_digest(name, np.array(ids, "<u4").tobytes())
                    self.prefixes[name] = tuple(stream.ids[:end])
        for name, snapshot in self.blocks.snapshots._of.items():
            if name in self.prefixes:
                assert self.device.snapshots[snapshot] == self.prefixes[name]
        for name, block in cache._block_of.items():
            if self.blocks._pool.is_kept(block) and name in self.prefixes:
                assert cache._name_of[block] == name
                assert self.device.content[block, size - 1] == self.prefixes[name]


PROMPT = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


# --- what is found --------------------------------------------------------------------------------


def test_a_second_request_computes_only_what_is_new() -> None:
    harness = Harness()
    harness.add([*PROMPT, 1])
    harness.finish()
    assert (harness.scheduler.prefix_cache_queries, harness.scheduler.prefix_cache_hits) == (15, 0)
    harness.add([*PROMPT, 2, 2])
    assert harness.run() == [[4]]  # 12 of 16
    assert (harness.scheduler.prefix_cache_queries, harness.scheduler.prefix_cache_hits) == (31, 12)
    harness.finish()


@pytest.mark.parametrize("length", [4, 8, 12])
def test_at_least_one_token_is_computed(length: int) -> None:
    harness = Harness()
    for _ in range(2):
        harness.add(PROMPT[:length], 1)
        harness.run()
    assert harness.scheduler.prefix_cache_hits == length - 4
    harness.finish()


def test_requests_of_one_step_share_what_it_computes() -> None:
    harness = Harness()
    for _ in range(3):
        harness.add(PROMPT, 2)
    assert harness.run() == [[14, 2, 2]]
    assert harness.scheduler.num_free_blocks == 39 - 3 - 3  # three shared, one each
    harness.check()
    harness.finish()


def test_a_chunk_is_shared_before_the_prompt_is_done() -> None:
    harness = Harness(max_num_batched_tokens=10)
    harness.add(PROMPT, 2)
    harness.add(PROMPT, 2)
    assert harness.run(2) == [[10], [4, 2]]
    harness.finish()


def test_the_next_turn_of_a_chat_finds_the_answer() -> None:
    harness = Harness()
    row = harness.add(PROMPT, 10)
    ids = harness.streams[row].ids
    harness.finish()
    harness.add([*ids, 1, 1], 2)
    assert len(ids) == 24
    assert harness.run() == [[26 - 20]]  # the last token of the answer was never computed
    harness.finish()


def test_a_preempted_request_finds_its_blocks() -> None:
    harness = Harness(num_blocks=10, max_model_len=20)
    harness.add(PROMPT, 6)
    harness.add([4, *PROMPT[1:]], 6)
    while not harness.scheduler.num_preemptions:
        harness.run()
    assert harness.scheduler.prefix_cache_hits == 0
    harness.finish()
    assert harness.scheduler.prefix_cache_hits == 16  # less what the other one took since


def test_a_readmitted_request_is_looked_for_with_its_outputs() -> None:
    harness = Harness()
    harness.add(PROMPT, 10)
    harness.finish()
    harness.add(PROMPT, 10, outputs=7)
    assert harness.run() == [[1]]
    harness.finish()


# --- what is not ----------------------------------------------------------------------------------


def test_tenants_do_not_share() -> None:
    harness = Harness()
    for root in (b"a", b"b", b"", b"a"):
        harness.add(PROMPT, 2, prefix_root=root)
    assert harness.run() == [[14, 14, 4]]
    harness.finish()
    assert harness.scheduler.prefix_cache_hits == 12


def test_who_must_compute_everything_is_found_by_others() -> None:
    harness = Harness()
    for _ in range(2):
        harness.add(PROMPT, 2, use_prefix_cache=False)
    assert harness.run() == [[14, 14]]
    assert harness.scheduler.prefix_cache_queries == 0
    harness.add(PROMPT, 2)
    assert harness.run() == [[1, 1, 2]]
    harness.finish()


def test_nothing_is_shared_where_it_is_switched_off() -> None:
    harness = Harness(enable_prefix_caching=False)
    for _ in range(2):
        harness.add(PROMPT, 2)
    assert harness.run() == [[14, 14]]
    harness.scheduler.reset_prefix_cache()
    harness.finish()
    assert (harness.scheduler.prefix_cache_queries, harness.scheduler.prefix_cache_hits) == (0, 0)


def test_a_reset_forgets_what_is_free_and_what_is_held() -> None:
    harness = Harness()
    harness.add(PROMPT, 1)
    harness.run()
    harness.add([4, *PROMPT], 9)
    harness.run(2)
    harness.scheduler.reset_prefix_cache()
    harness.check()
    harness.add(PROMPT, 3)
    harness.add([4, *PROMPT], 3)
    assert harness.run() == [[1, 14, 15]]
    harness.finish()


@pytest.mark.parametrize("more", [{}, {"has_states": True, "num_snapshots": 9}])
def test_who_has_no_numbers_leaves_nothing_for_others(more: dict[str, Any]) -> None:
    harness = Harness(max_model_len=256, num_blocks=90, max_num_batched_tokens=256, **more)
    harness.add(PROMPT, 1)  # its blocks are right
    harness.run()
    used = harness.scheduler.snapshots.num_used
    row = harness.add([*PROMPT, 1, 1, 1, 1, 1, 1], 90)
    other = harness.add([4, *PROMPT], 90)
    harness.run(70, ahead=1)
    had = list(harness.streams[row].ids)
    harness.launch()
    plan, _, token_ids, _ = harness.launched.popleft()
    assert harness.scheduler.rows_of(plan).tolist() == [row, other]
    ids = np.array([4, token_ids[1]], np.int64)
    sampled = harness.scheduler.complete(plan, ids, None, np.array([0]))
    assert sampled.rows.tolist() == [other]
    assert sampled.index.tolist() == [1]
    [(at_fault, fault)] = sampled.faults
    assert (at_fault, fault.code) == (row, "engine")
    assert f"behind {len(had) - 20} tokens of the answer" in fault.message
    harness.streams[other].ids.append(token_ids[1])
    assert harness.log.read(row, 0, harness.log.length(row)).tolist() == had
    harness.forget(row)
    assert harness.collect() == [other]
    harness.check()
    assert harness.scheduler.snapshots.num_used <= used + 3  # the other's
    hits = harness.scheduler.prefix_cache_hits
    harness.add(had, 1)
    harness.run()
    assert harness.scheduler.prefix_cache_hits == hits + 12  # of the first request
    harness.finish()


def test_the_tail_goes_first_when_room_is_needed() -> None:
    harness = Harness(num_blocks=8, max_model_len=28)
    harness.add(PROMPT[:13], 1)  # four blocks, three of them full
    harness.finish()
    harness.add([4] * 19, 1)  # five blocks, where four are unwanted
    harness.finish()
    harness.add(PROMPT[:13], 1)
    assert harness.run() == [[13 - 8]]
    harness.finish()


def test_who_finds_no_room_is_looked_up_again_only_when_it_might_find_some() -> None:
    harness = Harness(num_blocks=17, max_model_len=64)
    harness.add([5] * 8, 1)
    harness.finish()
    harness.add([4] * 10, 30)
    harness.add([3] * 9, 12)
    harness.run(2)
    harness.add([5] * 40, 1)  # eleven blocks, of which two are there and free
    harness.run()
    before = harness.num_looked_up
    assert harness.run(5) == [[1, 1]] * 5
    assert harness.num_looked_up == before
    assert harness.scheduler.num_waiting == 1
    harness.finish()  # and in the end it has run


def test_who_finds_no_room_is_looked_up_when_more_of_its_own_is_there() -> None:
    """Nobody gives a block back: what another one computes is what it can share."""
    harness = Harness(num_blocks=15, max_model_len=56, max_num_batched_tokens=8)
    prompt = [1, 2, 3] * 11
    harness.add(prompt, 8)
    second = harness.add(prompt, 4)
    found = []
    for _ in range(3):  # two blocks each, and five are free
        harness.run()
        found.append(harness.blocks.find_room(second))
        assert harness.scheduler.num_free_blocks == 5
    assert found[0] is None
    assert [len(shared) for shared in found[1:]] == [4, 6]
    harness.finish()


# --- steps that fail ------------------------------------------------------------------------------


def test_what_a_failed_step_was_to_write_is_not_found() -> None:
    harness = Harness()
    harness.add(PROMPT, 4)
    harness.launch(fails=True)
    assert harness.collect() == []
    harness.add(PROMPT, 4)
    assert harness.run() == [[14]]
    harness.finish()


def test_who_read_what_a_failed_step_was_to_write_starts_again() -> None:
    harness = Harness()
    harness.add(PROMPT, 4)
    harness.launch(fails=True)  # alone, so it ends
    reader = harness.add([*PROMPT[:12], 0, 0, 0, 0, 0], 4)
    bystander = harness.add([3, *PROMPT], 4)
    late = harness.add([*PROMPT[:12], 0, 0, 0, 0, 1], 4)  # reads what the reader computes as well
    assert harness.run(1, ahead=9) == [[1, 5, 15, 1]]
    assert harness.collect() == []
    assert harness.collect() == [bystander]
    harness.check()
    assert not harness.scheduler._requests.is_suspect.any()
    harness.launch()
    assert sorted(harness.collect()) == [reader, bystander, late]
    harness.finish()


def test_who_read_it_and_was_preempted_since_starts_again_too() -> None:
    harness = Harness(num_blocks=7, max_model_len=24, max_num_seqs=3)
    harness.add(PROMPT[:8], 14)
    harness.launch(fails=True)
    harness.add([*PROMPT[:8], 0], 14)
    harness.launch()
    while not harness.scheduler.num_preemptions:
        assert harness.launch() is not None
    harness.collect()
    harness.check()
    harness.finish()


# --- recurrent states -----------------------------------------------------------------------------


def hybrid(num_snapshots: int = 8, **limits: Any) -> Harness:
    return Harness(has_states=True, num_snapshots=num_snapshots, **limits)


def test_a_prompt_continues_behind_the_last_state_that_was_saved() -> None:
    harness = hybrid()
    harness.add(PROMPT, 3)
    harness.finish()
    harness.add([*PROMPT[:13], 0, 0, 0], 3)
    assert harness.run() == [[16 - 12]]
    assert harness.scheduler.prefix_cache_hits == 12
    harness.finish()
    assert len(harness.blocks.snapshots._of) == 1  # both end with the same three full blocks


def test_blocks_without_a_state_behind_them_are_computed_again() -> None:
    harness = hybrid()
    harness.add(PROMPT, 1)
    harness.finish()
    harness.add([*PROMPT[:9], 0, 0, 0, 0], 1)
    assert harness.run() == [[13]]
    harness.finish()


def test_a_state_is_saved_where_prompts_branch_off() -> None:
    harness = hybrid()
    for prompt, count in (
        (PROMPT, 14),
        ([*PROMPT[:9], 0, 0, 0, 0], 13),  # two blocks are there, but no state behind them
        ([*PROMPT[:9], 1, 1, 1, 1], 13 - 8),
    ):
        harness.add(prompt, 1)
        assert harness.run() == [[count]]
        harness.finish()


def test_a_state_can_be_loaded_from_the_next_step_on() -> None:
    harness = hybrid()
    harness.add(PROMPT, 4)
    harness.add(PROMPT, 4)
    assert harness.run(1, ahead=9) == [[14, 14]]
    harness.add(PROMPT, 4)
    assert harness.run(1, ahead=9) == [[1, 1, 2]]
    harness.finish()


def test_a_failed_step_leaves_no_state_behind() -> None:
    harness = hybrid(max_num_batched_tokens=64)
    harness.add(PROMPT, 4)
    harness.add([3], 4)
    harness.launch(fails=True)
    assert harness.collect() == []
    harness.check()
    harness.finish(ahead=0)
    harness.add(PROMPT, 4)
    harness.launch()
    harness.collect()
    harness.finish()


def test_who_loaded_the_state_of_a_failed_step_starts_again() -> None:
    """Its blocks are another's, which are right."""
    harness = hybrid(max_num_batched_tokens=64)
    harness.add(PROMPT, 4)
    harness.run()  # the blocks, and the state behind them
    harness.blocks.snapshots.reset()
    culprit = harness.add(PROMPT, 4)
    harness.launch(fails=True)  # it saves the state anew
    reader = harness.add([*PROMPT[:12], 0, 0], 4)
    plan = harness.launch()
    assert plan is not None
    assert plan.query_lens.tolist() == [1, 1, 2]
    assert plan.snapshots is not None
    assert harness.collect() == []
    assert reader not in harness.collect()
    assert culprit in harness.streams
    harness.finish(ahead=0)


def test_the_state_that_was_used_least_recently_goes_first() -> None:
    harness = hybrid(num_snapshots=2)
    prompts = [[each, *PROMPT] for each in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        harness.add(prompt, 1)
        harness.run()
        harness.finish()
    for prompt, count in ((prompts[0], 3), (prompts[2], 3), (prompts[1], 15)):
        harness.add(prompt, 1)
        assert harness.run() == [[count]]
        harness.finish()
    numbers = EngineCounters().numbers(harness.scheduler, 0, 0.0)
    gauges, counters = numbers.gauges, numbers.counters
    assert (gauges.num_state_snapshots, gauges.num_used_state_snapshots) == (2, 2)
    loads, evictions = counters.num_state_snapshots_loaded, counters.num_state_snapshots_evicted
    assert (loads, evictions) == (1 + 2, 2)  # the third prompt's replaced one, and so did the last


def test_a_step_saves_no_more_states_than_there_are() -> None:
    harness = hybrid(num_snapshots=1)
    for each in range(2):
        harness.add([each, *PROMPT], 1)
    assert harness.run() == [[15, 15]]
    harness.finish()
    assert len(harness.blocks.snapshots._of) == 1


def test_a_step_replaces_no_state_that_it_loads() -> None:
    harness = hybrid(num_snapshots=1)
    for prompts, counts in (
        ([PROMPT], [14]),
        ([PROMPT, [4, *PROMPT]], [2, 15]),
        ([[4, *PROMPT]], [15]),
        ([PROMPT], [14]),  # a step that loads none has replaced it
    ):
        for prompt in prompts:
            harness.add(prompt, 1)
        assert harness.run() == [counts]
        harness.finish()


def test_a_common_beginning_stays_where_there_is_room_for_one_state() -> None:
    harness = hybrid(num_snapshots=1, max_num_batched_tokens=64)
    counts = []
    for each in range(6):
        harness.add([*PROMPT[:12], each % 5, each // 5, 0, 0, 1, 1, 1], 1)
        counts += harness.run()
        harness.finish()
    assert counts == [[19], [19], [7], [7], [7], [7]]


def test_without_room_for_states_nothing_is_cached() -> None:
    harness = hybrid(num_snapshots=0)
    for _ in range(2):
        harness.add(PROMPT, 1)
        assert harness.run() == [[14]]
        harness.finish()
    assert harness.scheduler.prefix_cache_queries == 0


def test_a_reset_forgets_states() -> None:
    harness = hybrid()
    harness.add(PROMPT, 1)
    harness.finish()
    assert harness.scheduler.snapshots.num_used == 1
    harness.scheduler.reset_prefix_cache()
    assert harness.scheduler.snapshots.num_used == 0
    assert not harness.blocks.snapshots._of
    harness.add(PROMPT, 1)
    assert harness.run() == [[14]]
    harness.finish()


def test_who_finds_no_room_is_looked_up_again_once_blocks_are_back_in_front_of_a_state() -> None:
    harness = hybrid(num_blocks=13, max_model_len=48, max_num_batched_tokens=8)
    harness.add(PROMPT, 1)
    harness.finish()
    assert harness.blocks._cache is not None
    *_, third = harness.blocks._cache._block_of.values()
    harness.blocks.forget(np.array([third], np.int32))
    harness.add([*PROMPT[:12], 4, 4, 4, 4], 4)
    harness.run()
    waiting = harness.add([*PROMPT, *[1] * 20], 1)  # nine blocks, and eight are free
    assert harness.blocks.find_room(waiting) is None
    harness.run()
    shared = harness.blocks.find_room(waiting)
    assert shared is not None
    assert len(shared) == 3
    harness.finish()


def test_who_finds_no_room_is_looked_up_again_once_a_state_was_saved() -> None:
    harness = hybrid(num_blocks=15, max_model_len=56, max_num_batched_tokens=8)
    prompt = [1, 2, 3] * 11
    harness.add(prompt, 20)
    second = harness.add(prompt, 4)
    shared = []
    for _ in range(4):  # the first has nine blocks, five are free, and the second one wants nine
        harness.run()
        before = harness.num_looked_up
        found = harness.blocks.find_room(second)
        shared.append((None if found is None else len(found), harness.num_looked_up > before))
    assert shared == [(None, True), (None, False), (None, False), (8, True)]
    harness.finish()


def test_who_finds_no_room_is_not_looked_up_when_a_state_of_others_was_saved() -> None:
    """A step of many answers saves some; looking up a long prompt takes milliseconds."""
    harness = hybrid(num_blocks=33, max_model_len=128)
    harness.add(PROMPT, 70)
    harness.run()
    harness.add([5] * 120, 1)
    harness.run()
    before, num_used = harness.num_looked_up, harness.scheduler.snapshots.num_used
    assert harness.run(60) == [[1]] * 60
    assert harness.scheduler.snapshots.num_used > num_used
    assert harness.num_looked_up == before
    assert harness.scheduler.num_waiting == 1
    harness.finish()


def test_the_next_turn_continues_within_the_answer() -> None:
    harness = hybrid(max_model_len=256, num_blocks=80)
    for ahead in (0, 1):
        harness.scheduler.reset_prefix_cache()
        harness.add(PROMPT, 140)
        harness.finish(ahead)
        turn = [*harness.answers[-1], 0, 1, 0]
        assert len(turn) == 14 + 140 + 3
        harness.add(turn, 3)
        assert harness.run() == [[len(turn) - 128]]
        harness.finish(ahead)


def test_a_mark_of_an_answer_takes_the_place_of_the_one_before() -> None:
    harness = hybrid(max_model_len=256, num_blocks=80)
    harness.add(PROMPT, 140)
    counts = set()
    while harness.streams:
        harness.run(1, ahead=1)
        counts.add(harness.scheduler.snapshots.num_used)
        if not harness.launched:
            break
    harness.finish()
    assert counts == {1, 2}
    assert harness.scheduler.snapshots.num_evictions == 0


def test_half_of_the_snapshots_are_of_answers_that_go_on() -> None:
    harness = hybrid(num_snapshots=3, max_model_len=256, num_blocks=300)
    for each in range(4):
        harness.add([each, *PROMPT], 100)
    harness.run(80, ahead=1)
    assert len(harness.blocks.marks) == 1
    harness.finish()


def test_a_failed_step_leaves_no_mark_in_an_answer() -> None:
    harness = hybrid(max_model_len=256, num_blocks=80)
    harness.add(PROMPT, 80)
    harness.add([3], 80)
    while (plan := harness.launch()) is not None and plan.kv_lens.max() < 63:
        harness.collect()
    harness.collect()
    harness.launch(fails=True)
    plan = harness.launch()  # it saves what the failed step left
    assert plan is not None
    assert plan.snapshots is not None
    assert len(plan.snapshots.front_saves) == 1
    num_used = harness.scheduler.snapshots.num_used
    harness.collect()
    assert harness.scheduler.snapshots.num_used == num_used - 1
    harness.collect()
    harness.check()
    harness.finish(ahead=0)
    harness.add([*harness.answers[-1], 0], 2)
    harness.finish()


def answer_in_front_of(harness: Harness, position: int, *more: int) -> int:
    """Step an answer, and others of as many tokens, until the next step computes this token."""
    row, *_ = [harness.add([*PROMPT, each], 80) for each in (0, *more)]
    plan = harness.launch()
    while plan is not None and plan.kv_lens[0] < position:
        plan = harness.launch()
        harness.collect()
    harness.collect()
    return row


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failed_step_leaves_no_mark_that_it_was_to_save(ahead: int) -> None:
    harness = hybrid(max_model_len=256, num_blocks=80)
    row = answer_in_front_of(harness, 64, 1)
    plan = harness.launch(fails=True)
    assert plan is not None
    assert plan.snapshots is not None
    assert len(plan.snapshots.front_saves) == 2
    for _ in range(ahead):
        harness.launch()
    assert harness.collect() == []
    harness.check()
    harness.run(ahead=0)
    harness.add(harness.streams[row].ids, 2)
    harness.finish(ahead=0)


def test_who_began_with_the_mark_of_a_failed_step_starts_again() -> None:
    """Its answer has ended before the step was answered."""
    harness = hybrid(max_model_len=256, num_blocks=80)
    row = answer_in_front_of(harness, 64, 1)
    harness.launch(fails=True)
    turn = [*harness.streams[row].ids, 0, 1]
    assert len(turn) == 67
    harness.abort(row)
    reader = harness.add(turn, 3)
    plan = harness.launch()
    assert plan is not None
    assert plan.query_lens.tolist() == [1, 3]
    assert harness.collect() == []
    assert reader not in harness.collect()
    harness.check()
    harness.finish(ahead=0)


def test_a_mark_that_nothing_has_computed_yet_is_not_found() -> None:
    """Its answer ends while the step in front of the mark is in flight, too."""
    harness = hybrid(max_model_len=256, num_blocks=80)
    row = answer_in_front_of(harness, 63)
    harness.launch()
    plan = harness.launch()
    assert plan is not None
    assert plan.snapshots is not None
    harness.abort(row)
    while harness.launched:
        harness.collect()
    harness.check()
    assert harness.scheduler.snapshots.num_used == 1  # of the prompt
    harness.finish()


def test_a_reset_forgets_the_marks_of_answers_that_go_on() -> None:
    harness = hybrid(max_model_len=256, num_blocks=80, max_num_batched_tokens=128)
    row = answer_in_front_of(harness, 64)
    harness.run(2, ahead=1)
    harness.scheduler.reset_prefix_cache()
    harness.collect()
    ids = harness.streams[row].ids
    harness.abort(row)
    assert harness.scheduler.snapshots.num_used == 0
    harness.add(ids, 1)
    assert harness.run() == [[len(ids)]]
    harness.finish()


def test_a_row_whose_launched_step_is_dropped_goes_on_from_its_other_place() -> None:
    harness = hybrid()
    row = harness.add(PROMPT, 20, end=2)
    seen: list[int] = []
    while 2 not in seen:
        harness.run(ahead=1)
        assert len(harness.blocks.twins) == 1
        seen = harness.streams[row].ids[len(PROMPT) :]
    assert harness.run(ahead=0)[0] == [1]  # the dropped one once more
    harness.run(2)
    assert not len(harness.blocks.twins)  # all tokens have masks, so no step will be dropped
    harness.finish()
    assert harness.scheduler.num_preemptions == 0


def test_a_row_without_a_second_place_begins_anew() -> None:
    harness = hybrid(num_snapshots=2)  # one of them may be held
    for each in (0, 1, 3):
        harness.add([each, *PROMPT], 20, end=2)
    harness.run(3, ahead=1)
    assert len(harness.blocks.twins) == 0
    harness.finish()
    assert harness.scheduler.num_preemptions > 0


def test_two_steps_in_flight_cannot_be_taken_back() -> None:
    harness = hybrid()
    harness.add(PROMPT, 20, end=99)
    harness.run(3)
    for _ in range(3):
        harness.launch()
    harness.collect_several(1)
    assert harness.scheduler.num_preemptions == 1
    harness.finish(ahead=0)


# --- anything at any time -------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Requests with common beginnings come and go; steps are up to two ahead and may fail."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        max_model_len=st.integers(8, 32),
        spare_blocks=st.integers(0, 16),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 16, 64]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 2, 5, 30]),  # None: no states
    )
    def start(
        self,
        block_size: int,
        max_model_len: int,
        spare_blocks: int,
        num_snapshots: int | None,
        **limits: Any,
    ) -> None:
        num_blocks = -(-max_model_len // block_size) + 1 + spare_blocks
        if num_snapshots is not None:
            limits |= {"has_states": True, "num_snapshots": num_snapshots}
        self.harness = Harness(
            num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, **limits
        )
        self.ahead = spare_blocks % 3

    @rule(
        length=st.integers(1, 20),
        tail=st.lists(st.integers(0, 1), max_size=2),
        max_tokens=st.integers(1, 20),
        outputs=st.integers(0, 8),
        priority=st.integers(-1, 1),
        prefix_root=st.sampled_from([b"", b"", b"", b"x"]),
        use_prefix_cache=st.sampled_from([True, True, True, False]),
        is_suspect=st.sampled_from([False, False, False, False, True]),
        worker_ends=st.booleans(),
        end=st.sampled_from([None, None, 0, 1, 4]),
    )
    def add(self, length: int, tail: list[int], **more: Any) -> None:
        prompt = ([1, 2, 3, 4, 0] * 4)[:length] + tail
        self.harness.add(prompt[: self.harness.limits["max_model_len"] - 1], **more)

    @precondition(lambda self: self.harness.answers)
    @rule(tail=st.lists(st.integers(0, 4), max_size=2), max_tokens=st.integers(1, 20))
    def take_another_turn(self, tail: list[int], max_tokens: int) -> None:
        prompt = [*self.harness.answers[-1], *tail]
        prompt = prompt[: self.harness.limits["max_model_len"] - 1]
        self.harness.add(prompt, max_tokens)

    @precondition(lambda self: self.harness.streams)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.streams))))

    @precondition(lambda self: len(self.harness.launched) < 3)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def launch(self, fails: bool) -> None:
        self.harness.launch(fails=fails)

    @precondition(lambda self: self.harness.launched)
    @rule()
    def collect(self) -> None:
        self.harness.collect()

    @precondition(lambda self: self.harness.launched)
    @rule(num_more=st.integers(1, 3))
    def collect_several(self, num_more: int) -> None:
        self.harness.collect_several(num_more)

    @rule(steps=st.integers(1, 10), ahead=st.integers(0, 1))
    def run(self, steps: int, ahead: int) -> None:
        self.harness.run(steps, ahead=ahead)

    @rule()
    def reset(self) -> None:
        self.harness.scheduler.reset_prefix_cache()

    @invariant()
    def all_is_as_it_is_believed(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.finish(self.ahead)


class AnyAnswers(AnyOrder):
    """`AnyOrder` over models that carry states, most of whose answers have marks."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        spare_blocks=st.integers(8, 40),
        max_num_seqs=st.integers(2, 5),
        num_snapshots=st.sampled_from([3, 5, 30]),
    )
    def start(self, **limits: Any) -> None:
        super().start(
            max_model_len=32, max_num_batched_tokens=32, enable_prefix_caching=True, **limits
        )


@pytest.fixture
def close_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are saved at more places of prompts as short as these."""
    monkeypatch.setattr(state_marks, "_BACK", 6)
    monkeypatch.setattr(state_marks, "_INTERVAL", 8)


def check_any_order(machine: type[AnyOrder], max_examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(max_examples=max_examples, stateful_step_count=40),
    )


@pytest.mark.usefixtures("close_marks")
@pytest.mark.parametrize("machine", [AnyOrder, AnyAnswers])
def test_any_order(machine: type[AnyOrder]) -> None:
    check_any_order(machine, 50)


@pytest.mark.long
@pytest.mark.usefixtures("close_marks")
@pytest.mark.parametrize("machine", [AnyOrder, AnyAnswers])
def test_any_order_at_length(machine: type[AnyOrder]) -> None:
    check_any_order(machine, 150)
