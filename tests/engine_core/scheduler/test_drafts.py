"""Steps with drafts give each request the tokens that it would have got one by one.

The scheduler, the unfolding of plans and the acceptance are the real ones. The model's next token
is a hash of what the cache holds in the places that its tables name, so a wrong table, a place that
was overwritten, or a length that is off by one is another text. Drafts are right for a random
number of tokens. A draft model reads a cache of its own in the same places: what is there of known
tokens has to be right, or its drafts would seldom be. A model with recurrent states keeps in each
place of a state the tokens that it has seen: they have to be those that the row's table names.
"""

from __future__ import annotations

import hashlib
from collections import deque
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.new_requests import new_request
from tests.helpers.scheduler_harness import scheduler_of

from slipstream_core.drafting.drafter import Drafts
from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.drafting.prediction_drafter import PredictionDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.media.places import places_of
from slipstream_core.scheduler.scheduler import Scheduler
from slipstream_core.step.drafts import accepted, only_accepted, unfold
from slipstream_core.step.plan import ProposalPlan, SnapshotPlan, StepPlan, StepResult
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

VOCAB, STOP, MAX_LEN = 13, 3, 64


def next_token(seed: int, ids: list[int], *, is_masked: bool) -> int:
    said = repr((seed, tuple(ids[-6:]))).encode()
    token = int.from_bytes(hashlib.blake2b(said, digest_size=4).digest(), "little") % VOCAB
    return (token + 1) % VOCAB if is_masked and token == STOP else token


class Asked:
    """A request as the test knows it."""

    def __init__(self, rng: Random, row: int) -> None:
        self.row, self.seed = row, rng.randrange(1 << 30) * 64 + row  # no two are equal
        self.prompt = [1, 2, 4, 5] * 4
        self.prompt = self.prompt[: rng.randint(1, 16)]
        self.prompt += [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
        self.min_tokens, self.max_tokens = rng.choice([0, 0, 5]), rng.randint(1, 30)
        self.prediction = self.predicted(rng) if rng.random() < 0.3 else []

    def next(self, ids: list[int]) -> int:
        is_masked = len(ids) < len(self.prompt) + self.min_tokens
        return next_token(self.seed, ids, is_masked=is_masked)

    def predicted(self, rng: Random) -> list[int]:
        """What it will say, but for some tokens."""
        ids = list(self.prompt)
        while len(ids) < self.most:
            ids.append(self.next(ids))
        said = ids[len(self.prompt) :]
        return [rng.randrange(VOCAB) if rng.random() < 0.1 else each for each in said]

    @property
    def most(self) -> int:
        return min(len(self.prompt) + self.max_tokens, MAX_LEN)


class Prophet:
    """A drafter whose drafts are right for a random number of tokens, and some behind wrong ones,
    with pauses.
    """

    def __init__(self, rng: Random, asked: dict[int, Asked], log: TokenLog) -> None:
        self.rng, self.asked, self.log = rng, asked, log
        self.rows: set[int] = set()
        self.pause, self.num_drafted = 0, 0

    @property
    def awaits_tokens(self) -> bool:
        return not self.pause and self.rng.random() < 0.9

    def open(
        self, row: int, root: bytes, prompt_len: int, prediction: npt.NDArray[np.uint32]
    ) -> None:
        assert row not in self.rows
        self.rows.add(row)

    def close(self, rows: Int64s) -> None:
        self.rows.difference_update(rows.tolist())

    def observe(
        self, rows: RowSet, ids: npt.NDArray[np.uint32], counts: Int64s | None, tokens: TokenLog
    ) -> None:
        assert len(ids) == (len(rows) if counts is None else counts.sum())
        if self.pause:
            self.pause -= 1
        elif self.rng.random() < 0.15:
            self.pause = self.rng.randint(2, 12)

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        lens, drafts = [], []
        for row, limit in zip(rows.tolist(), most.tolist(), strict=True):
            assert row in self.rows
            assert limit <= max(self.asked[row].most - self.log.length(row) - 1, 0)
            ids = self.log.read(row, 0, self.log.length(row)).tolist()
            num, right = min(limit, self.rng.randint(0, 7)), self.rng.randint(0, 7)
            for at in range(0 if self.pause else num):
                token = self.asked[row].next(ids)
                wrong = (token + 1 + self.rng.randrange(VOCAB - 1)) % VOCAB
                is_right = at < right or (at > right and self.rng.random() < 0.5)
                ids.append(token if is_right else wrong)
                drafts.append(ids[-1])
            lens.append(0 if self.pause else num)
        self.num_drafted += bool(drafts)
        return Drafts(np.array(lens), np.array(drafts, np.int64)) if drafts else None


class Device:
    """Computes plans as they are launched, and gives the results later."""

    def __init__(
        self,
        asked: dict[int, Asked],
        block_size: int,
        log: TokenLog,
        rng: Random,
        num_slots: int | None = None,
    ) -> None:
        """num_slots: of a model with recurrent states; None: it has none."""
        self.log, self.rng, self.num_slots = log, rng, num_slots
        self.states: dict[int, list[int]] = {}  # the tokens in front of a state, by place
        self.num_read_behind_drafts = 0
        self.by_seed = {each.seed: each for each in asked.values()}
        self.block_size = block_size
        self.cache: dict[int, int] = {}  # token by place
        self.tables: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        self.of_draft_model: dict[int, int] = {}  # its token by place
        self.num_foreseen = 0
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    def launch(self, plan: StepPlan) -> None:
        entries = zip(plan.table_slots.tolist(), plan.table_numbers.tolist(), strict=True)
        self.tables.update(zip(entries, plan.table_blocks.tolist(), strict=True))
        if plan.proposals is not None:
            self.in_flight.append((plan, self.foresee(plan, plan.proposals)))
            return
        step = None if plan.draft_lens is None else unfold(plan)
        rowwise = plan if step is None else step.plan
        ids = rowwise.token_ids.tolist()
        for at, slot in enumerate(rowwise.gather_slots.tolist()):
            if slot >= 0:
                ids[at] = self.last[slot]
        self.cache.update(zip(rowwise.kv_slots.tolist(), ids, strict=True))
        if self.num_slots is not None:
            self.mix(plan, ids, self.num_slots)
        sampled = np.array(
            [
                self.sample(rowwise, at, row)
                for at, row in enumerate(np.flatnonzero(rowwise.samples))
            ],
            np.int64,
        )
        result = StepResult(plan.step, sampled, None)
        if step is not None:
            result = only_accepted(result, step, accepted(step, sampled))
        counts = np.ones(len(plan.seeds), np.int64) if result.counts is None else result.counts
        lasts = result.token_ids[np.cumsum(counts) - 1]
        self.last.update(zip(plan.slots[plan.samples].tolist(), lasts.tolist(), strict=True))
        self.in_flight.append((plan, result))

    def mix(self, plan: StepPlan, ids: list[int], num_slots: int) -> None:
        """Continue the states of a plan's rows, whose tokens `ids` are."""
        found = plan.snapshots or SnapshotPlan()
        reads, writes, saves = dict[int, int](), dict[int, int](), dict[int, dict[int, int]]()
        for slot, number in zip(found.load_slots.tolist(), found.loads.tolist(), strict=True):
            self.states[slot] = self.states[num_slots + number]
        fronts = zip(found.front_places.tolist(), found.front_saves.tolist(), strict=True)
        self.states.update({num_slots + number: self.states[place] for place, number in fronts})
        if found.alternation is not None:
            rows = found.alternation.rows.tolist()
            reads = dict(zip(rows, found.alternation.reads.tolist(), strict=True))
            writes = dict(zip(rows, found.alternation.writes.tolist(), strict=True))
        columns = (each.tolist() for each in (found.save_rows, found.save_lens, found.saves))
        for row, length, number in zip(*columns, strict=True):
            saves.setdefault(row, {})[length] = num_slots + number
        before, written = dict(self.states), list[int]()
        ends, nums = np.cumsum(plan.query_lens).tolist(), plan.query_lens.tolist()
        for row, slot in enumerate(plan.slots.tolist()):
            start = int(plan.kv_lens[row]) - nums[row]
            seen = list(before[reads.get(row, slot)]) if start else []
            assert seen == self.read(self.cache, slot, start), "another state"
            for at in range(nums[row]):
                seen = [*seen, ids[ends[row] - nums[row] + at]]
                if (place := saves.get(row, {}).get(at + 1)) is not None:
                    self.states[place] = seen
                    written.append(place)
            self.states[writes.get(row, slot)] = seen
            written.append(writes.get(row, slot))
        assert len(written) == len({*written}), "rows leave states in the same place"
        assert not {*written} & {*reads.values()}, "a row reads what another one writes"
        self.num_read_behind_drafts += len(reads)

    def foresee(self, plan: StepPlan, proposals: ProposalPlan) -> StepResult:
        """Each row's tokens as its request will say them, but for some that are wrong."""
        places = plan.kv_slots.tolist()
        self.of_draft_model.update(zip(places, plan.token_ids.tolist(), strict=True))
        left, found = proposals.kv_slots.tolist(), []
        rows = np.flatnonzero(plan.samples).tolist()
        for row, seed, num in zip(rows, plan.seeds.tolist(), proposals.lens.tolist(), strict=True):
            asked, num_known = self.by_seed[seed], int(plan.kv_lens[row])
            slot = int(plan.slots[row])
            for at in range(num):
                ids = self.read(self.of_draft_model, slot, num_known + at)
                found.append(
                    asked.next(ids) if self.rng.random() < 0.8 else self.rng.randrange(VOCAB)
                )
                if at < num - 1:
                    place = left.pop(0)
                    assert place == self.place(slot, num_known + at)
                    self.of_draft_model[place] = found[-1]
            assert ids[:num_known] == self.known(asked)
            self.num_foreseen += num
        assert not left
        return StepResult(plan.step, np.array(found, np.int64), None)

    def known(self, asked: Asked) -> list[int]:
        known: list[int] = self.log.read(asked.row, 0, self.log.length(asked.row)).tolist()
        return known

    def place(self, slot: int, position: int) -> int:
        size = self.block_size
        return self.tables[slot, position // size] * size + position % size

    def read(self, cache: dict[int, int], slot: int, num: int) -> list[int]:
        return [cache[self.place(slot, position)] for position in range(num)]

    def sample(self, plan: StepPlan, at: int, row: int) -> int:
        ids = self.read(self.cache, int(plan.slots[row]), int(plan.kv_lens[row]))
        masked = set(zip(plan.masked_rows.tolist(), plan.masked_ids.tolist(), strict=True))
        assert int(plan.kv_lens[row]) == len(ids)
        return next_token(int(plan.seeds[at]), ids, is_masked=(at, STOP) in masked)


DEAR, CHEAP = StepCosts(((1, 1.0), (64, 1.1))), StepCosts(((1, 0.01), (64, 0.01)))
# of which drafts pay beside few rows alone
STEEP = StepCosts(((1, 1.0), (9, 1.1), (10, 30.0), (64, 900.0)))


def serve(rng: Random, *, by_model: bool = False, has_states: bool = False) -> tuple[int, int]:
    """Serve some requests to their ends; the steps, and those of them with drafts. by_model: from
    a draft model, whose steps fail now and then, and from what some requests predict. has_states:
    of a model with recurrent states, whose steps with drafts fail now and then; the second number
    is that of rows which went on from a state in front of drafts.
    """
    log, size = TokenLog(rows=2), rng.choice([1, 2, 4, 16])
    asked = {row: Asked(rng, row) for row in range(rng.randint(1, 6))}
    drafter = Prophet(rng, asked, log)
    model = ModelDrafter(
        num_speculative_tokens=rng.choice([1, 4, 16]),
        max_len=rng.choice([MAX_LEN, 30]),
        costs=(costs := rng.choice([DEAR, STEEP])),
        draft_costs=CHEAP,
    )
    predicted = PredictionDrafter(model, num_speculative_tokens=4, costs=costs)
    most_blocks, max_num_seqs = -(-MAX_LEN // size), rng.randint(1, 6)
    of_states: dict[str, Any] = {}
    if has_states:
        of_states = {"has_states": True, "num_draft_states": rng.choice([1, 3, 16, 64])}
        of_states["num_snapshots"] = rng.choice([0, 1, 3, 12])
    scheduler = scheduler_of(
        log,
        num_blocks=most_blocks * rng.choice([1, 1, 2, 4]) + 1,
        block_size=size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([8, 32, 512]),
        max_model_len=MAX_LEN,
        enable_prefix_caching=rng.random() < 0.6,
        max_unacked=rng.choice([64, 9]),
        drafter=predicted if by_model else drafter,
        by_model=model if by_model else None,
        has_draft_model=by_model,
        **of_states,
    )
    device = Device(asked, size, log, rng, max_num_seqs if has_states else None)
    pending, live, cut = list(asked), set[int](), set[int]()
    num_steps = num_computed = idle = 0
    while pending or live or device.in_flight:
        if pending and rng.random() < 0.5:
            live.add(add(scheduler, log, asked[pending.pop()]))
        acked = np.array([log.length(row) if row in live else 0 for row in range(64)])
        plan = scheduler.schedule(acked) if len(device.in_flight) < 2 else None
        if plan is not None:
            num_steps += not plan.is_proposal
            num_computed += 0 if plan.is_proposal else plan.num_tokens
            assert plan.num_tokens <= scheduler._max_num_batched_tokens
            device.launch(plan)
        idle = idle + 1 if plan is None and not device.in_flight and not pending else 0
        assert idle < 50, "nothing runs"
        if device.in_flight and (plan is None or rng.random() < 0.5):
            done, result = device.in_flight.popleft()
            if done.is_proposal and rng.random() < 0.02:
                assert not len(scheduler.fail(done))
                continue
            if has_states and result.draft_lens is not None and rng.random() < 0.05:
                at_fault = scheduler.fail(done).tolist()
                live.difference_update(at_fault)
                cut.update(at_fault)
                continue
            if result.draft_lens is not None:  # but for wrong drafts
                num_computed -= int((1 + result.draft_lens - result.counts).sum())
            sampled = scheduler.complete(done, result.token_ids, result.counts)
            live.difference_update(sampled.ended.tolist())
        if live and rng.random() < 0.02:  # a stop string
            row = rng.choice(sorted(live))
            scheduler.remove(row)
            live.remove(row)
            cut.add(row)
    for row, each in asked.items():
        got, ids = log.read(row, 0, log.length(row)).tolist(), list(each.prompt)
        while len(ids) < len(got):
            ids.append(each.next(ids))
        assert got == ids
        assert len(got) <= each.most
        assert row in cut or len(got) == each.most
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1
    assert not drafter.rows
    if has_states:
        assert scheduler._blocks.draft_states.num_free == of_states["num_draft_states"]
        return num_steps, device.num_read_behind_drafts
    if by_model:
        return num_steps, device.num_foreseen
    if not cut and not scheduler.num_preemptions:  # no right draft is computed again
        lasts = sum(log.length(row) - 1 for row in asked)
        assert num_computed == lasts - scheduler.prefix_cache_hits
    return num_steps, drafter.num_drafted


def add(scheduler: Scheduler, log: TokenLog, asked: Asked) -> int:
    log.open(asked.row)
    log.extend(asked.row, np.array(asked.prompt, np.uint32))
    scheduler.add(
        new_request(
            row=asked.row,
            prompt_len=len(asked.prompt),
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            min_tokens=asked.min_tokens,
            stop_token_ids=(STOP,) if asked.min_tokens else (),
            prediction_ids=np.array(asked.prediction, np.uint32).tobytes(),
        )
    )
    return asked.row


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_the_tokens_are_those_without_drafts(rng: Random) -> None:
    serve(rng)


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_nor_do_drafts_of_a_model_change_them(rng: Random) -> None:
    serve(rng, by_model=True)


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_nor_where_a_model_has_states(rng: Random) -> None:
    serve(rng, has_states=True)


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_nor_beside_a_draft_model_of_one_that_has(rng: Random) -> None:
    serve(rng, by_model=True, has_states=True)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(23, id="a-prediction-was-right-where-the-model-was-not"),
        pytest.param(42, id="rows-that-catch-up-hold-no-blocks-for-drafts"),
        pytest.param(68, id="the-only-row-ends-behind-a-preemption"),
        pytest.param(370, id="a-block-of-drafts-is-left-where-none-pay-any-more"),
    ],
)
def test_lives_in_which_a_draft_model_did_harm(seed: int) -> None:
    serve(Random(seed), by_model=True)


def test_a_draft_model_takes_no_blocks_that_a_waiting_request_needs() -> None:
    ids, log = np.arange(8, dtype=np.uint32), TokenLog(rows=2)
    drafter = ModelDrafter(num_speculative_tokens=8, max_len=MAX_LEN, costs=DEAR, draft_costs=CHEAP)
    scheduler = scheduler_of(
        log,
        num_blocks=MAX_LEN // 4 + 1,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
        drafter=drafter,
        by_model=drafter,
        has_draft_model=True,
    )
    acked, after = np.full(64, 60), {0: 0, 1: 0}
    for row, num in ((0, 8), (1, 51)):  # 3 blocks, and all of the 13 that are left
        log.open(row)
        log.extend(row, np.resize(ids, num))
        scheduler.add(new_request(row=row, prompt_len=num, max_tokens=40, seed=row))
        plan = scheduler.schedule(acked)
        assert plan is not None
        if plan.is_proposal:
            assert plan.proposals is not None
            scheduler.complete(plan, np.zeros(plan.proposals.lens.sum(), np.int64))
            plan = scheduler.schedule(acked)
            assert plan is not None
        after[row] = scheduler.num_running
        counts = None if plan.draft_lens is None else np.ones(plan.samples.sum(), np.int64)
        scheduler.complete(plan, np.zeros(plan.samples.sum(), np.int64), counts)
    assert after == {0: 1, 1: 2}


@pytest.mark.parametrize("prompt_len", [800, 4000])
def test_a_prompt_that_a_draft_model_lacks_holds_no_stream_up(prompt_len: int) -> None:
    """It is computed in slices of half a step, if that is done before its answer ends."""
    log, max_len = TokenLog(rows=3), 4096
    costs = StepCosts(((1, 1.0), (64, 1.063)))
    draft_costs = StepCosts(((1, 0.01), (101, 1.01)))
    drafter = ModelDrafter(
        num_speculative_tokens=4, max_len=max_len, costs=costs, draft_costs=draft_costs
    )
    scheduler = scheduler_of(
        log,
        num_blocks=max_len // 16 * 2,
        block_size=16,
        max_num_seqs=3,
        max_num_batched_tokens=max_len,
        max_model_len=max_len,
        drafter=drafter,
        by_model=drafter,
        has_draft_model=True,
    )
    acked = np.full(64, max_len)
    computed, drafted = list[int](), set[int]()  # before each of the model's steps; rows, in all
    for row, num in ((0, 8), (1, 8), (2, prompt_len)):
        log.open(row)
        log.extend(row, np.resize(np.arange(9, dtype=np.uint32), num))
        scheduler.add(new_request(row=row, prompt_len=num, max_tokens=60, seed=row))
        computed.append(0)
        for _ in range(60 if row == 2 else 4):
            plan = scheduler.schedule(acked)
            if plan is None:
                break
            if plan.proposals is not None:
                computed[-1] += plan.num_tokens
                drafted.update(plan.slots[plan.samples].tolist())
                scheduler.complete(plan, np.zeros(plan.proposals.lens.sum(), np.int64))
                continue
            counts = None if plan.draft_lens is None else np.ones(len(plan.seeds), np.int64)
            scheduler.complete(plan, np.ones(len(plan.seeds), np.int64), counts)
            computed.append(0)
    assert max(computed) <= 3 * 2 + 50  # half a second's
    # nothing is computed of what would come too late
    assert (sum(computed) > 800) == (prompt_len == 800)
    assert drafted == ({0, 1, 2} if prompt_len == 800 else {0, 1})


@pytest.mark.parametrize("budget", [16, 18])
def test_no_drafts_are_foreseen_that_a_prompt_leaves_no_room_for(budget: int) -> None:
    """Steps that a prompt fills have none; one that it leaves some room has as many as foreseen."""
    log = TokenLog(rows=2)
    drafter = ModelDrafter(num_speculative_tokens=4, max_len=MAX_LEN, costs=DEAR, draft_costs=CHEAP)
    scheduler = scheduler_of(
        log,
        num_blocks=9,
        block_size=16,
        max_num_seqs=2,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        drafter=drafter,
        by_model=drafter,
        has_draft_model=True,
    )
    acked, found = np.full(64, MAX_LEN), list[tuple[int, int, int]]()
    foreseen = 0
    for row, num, num_steps in ((0, 4, 1), (1, 45, 4)):
        log.open(row)
        log.extend(row, np.resize(np.arange(9, dtype=np.uint32), num))
        scheduler.add(new_request(row=row, prompt_len=num, max_tokens=40, seed=row))
        while num_steps:
            plan = scheduler.schedule(acked)
            assert plan is not None
            if plan.proposals is not None:
                foreseen = int(plan.proposals.lens.sum())
                scheduler.complete(plan, np.zeros(foreseen, np.int64))
                continue
            num_steps -= 1
            drafts = 0 if plan.draft_lens is None else int(plan.draft_lens.sum())
            found.append((foreseen, drafts, plan.num_tokens))
            foreseen = 0
            counts = None if plan.draft_lens is None else np.ones(len(plan.seeds), np.int64)
            scheduler.complete(plan, np.ones(len(plan.seeds), np.int64), counts)
    assert [each[0] for each in found] == [each[1] for each in found], found


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_draft_model_that_fails_step_by_step_is_not_asked_any_more(
    is_broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each new request its first step fails; the other one works now and then."""
    log = TokenLog(rows=8)
    drafter = ModelDrafter(num_speculative_tokens=4, max_len=MAX_LEN, costs=DEAR, draft_costs=CHEAP)
    scheduler = scheduler_of(
        log,
        num_blocks=40,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
        drafter=drafter,
        by_model=drafter,
        has_draft_model=True,
    )
    acked, num_asked = np.full(64, MAX_LEN), 0
    for row in range(6):
        log.open(row)
        log.extend(row, np.arange(4, dtype=np.uint32))
        scheduler.add(new_request(row=row, prompt_len=4, max_tokens=40, seed=row))
        for _ in range(4):
            plan = scheduler.schedule(acked)
            assert plan is not None
            if plan.proposals is not None:
                num_asked += 1
                if is_broken or row % 3 < 2:
                    scheduler.fail(plan)
                else:
                    scheduler.complete(plan, np.zeros(plan.proposals.lens.sum(), np.int64))
                continue
            counts = None if plan.draft_lens is None else np.ones(len(plan.seeds), np.int64)
            scheduler.complete(plan, np.ones(len(plan.seeds), np.int64), counts)
    said = [each.getMessage() for each in caplog.records]
    assert num_asked == 3 if is_broken else num_asked >= 6
    num_said = sum("failed in 3 steps in a row: it is not asked any" in each for each in said)
    assert num_said == is_broken
    assert drafter.awaits_tokens != is_broken


@pytest.mark.parametrize("has_image", [False, True])
def test_rows_with_images_are_neither_foreseen_nor_waited_for(has_image: bool) -> None:
    ids, log = np.array([7, 7, 1, 2], np.uint32), TokenLog(rows=2)
    drafter = ModelDrafter(num_speculative_tokens=4, max_len=MAX_LEN, costs=DEAR, draft_costs=CHEAP)
    scheduler = scheduler_of(
        log,
        num_blocks=9,
        block_size=16,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=MAX_LEN,
        drafter=drafter,
        by_model=drafter,
        has_draft_model=True,
    )
    log.open(0)
    log.extend(0, ids)
    media = places_of(ids, 7, [bytes(16)], [(0, 0)]) if has_image else None
    scheduler.add(new_request(row=0, prompt_len=len(ids), max_tokens=8, seed=1, media=media))
    acked = np.full(64, len(ids))
    first = scheduler.schedule(acked)
    assert first is not None
    scheduler.complete(first, np.array([5]))
    behind, last = scheduler.schedule(acked), scheduler.schedule(acked)
    assert behind is not None
    assert behind.is_proposal != has_image
    assert (last is None) != has_image  # steps are planned beside each other


def test_a_draft_model_foresees_most_of_what_is_said() -> None:
    num_steps, num_foreseen = np.sum([serve(Random(seed), by_model=True) for seed in range(20)], 0)
    assert num_foreseen > num_steps


def test_many_of_these_steps_have_drafts() -> None:
    totals = np.sum([serve(Random(seed)) for seed in range(20)], axis=0)
    assert totals[1] > 0.1 * totals[0]


def test_many_of_these_go_on_from_a_state_in_front_of_drafts() -> None:
    totals = np.sum([serve(Random(seed), has_states=True) for seed in range(20)], axis=0)
    assert totals[1] > 0.05 * totals[0]


if __name__ == "__main__":
    import sys

    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        serve(Random(seed))
        serve(Random(seed), by_model=True)
        serve(Random(seed), has_states=True)
        serve(Random(seed), by_model=True, has_states=True)
