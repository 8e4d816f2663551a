"""Rules of single tokens against loops over lists, and against the exact distribution.

`SteadyDecode` plays a scheduler: rows come and go, lose their slots and get others, and the tokens
of a step are in the history only when the next one is planned already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.sampling_plans import Row, assert_follows, distribution, plan_of
from tests.helpers.token_constraints import Asked, asked, expected_logits
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream_core.sampling import penalties
from slipstream_core.sampling.logits_processors import LogitsProcessors
from slipstream_core.sampling.penalties import Penalties, most_bytes
from slipstream_core.sampling.sampler import sample
from slipstream_core.scheduler.constraint_columns import ConstraintColumns, token_constraints
from slipstream_core.step.constraint_plan import ConstraintPlan
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import SamplingParams

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine

VOCAB = 23
CPU = torch.device("cpu")


class Course:
    """Requests on their way through one runner's memory."""

    def __init__(self) -> None:
        self.columns = ConstraintColumns()
        self.keeper = LogitsProcessors(VOCAB, CPU, num_state_slots=64, max_model_len=128)
        self.tokens = TokenLog()
        self.prompt_lens = np.zeros(64, np.int64)
        self.asked: dict[int, Asked] = {}
        self.outputs: dict[int, list[int]] = {}
        self._in_flight: list[tuple[int, int]] = []

    def add(self, row: int, it: Asked, outputs: Sequence[int] = ()) -> None:
        self.flush_deferred()
        self.tokens.open(row)
        self.tokens.extend(row, np.array([*it.prompt, *outputs], np.uint32))
        self.prompt_lens[row] = len(it.prompt)
        self.asked[row], self.outputs[row] = it, list(outputs)
        if it.constraints is not None:
            self.columns.add(row, it.constraints)

    def preempt(self, row: int) -> None:
        self.flush_deferred()  # it is admitted again when nothing of it is in flight
        self.columns.deactivate([row])

    def remove(self, row: int) -> None:
        self.flush_deferred()
        self.columns.deactivate([row])
        self.columns.remove([row])
        self.tokens.drop(row)
        del self.asked[row], self.outputs[row]

    def plan(self, rows: Sequence[int]) -> ConstraintPlan | None:
        places = np.array([i for i, r in enumerate(rows) if self.asked[r].constraints], np.int64)
        if not len(places):
            return None
        with_rules = np.array(rows, np.int64)[places]
        return self.columns.plan(with_rules, places, self.tokens, self.prompt_lens)

    def step(self, rows: Sequence[int], logits: torch.Tensor, chosen: Sequence[int]) -> None:
        """`rows` are sampled; `chosen` says which of the tokens that are left each gets."""
        plan = self.plan(rows)
        before, changed = logits.clone(), logits
        if plan is not None:
            changed = self.keeper.apply(logits, plan)
        assert torch.equal(logits, before)
        expected = torch.tensor(
            [expected_logits(logits[i].tolist(), self.asked[r], self.outputs[r])
             for i, r in enumerate(rows)]
        )  # fmt: skip
        torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5)
        self.flush_deferred()
        token_ids = []
        for i, choice in enumerate(chosen):
            left = torch.isfinite(expected[i]).nonzero()[:, 0].tolist() or [0]
            token_ids.append(left[choice % len(left)])
        if plan is not None:
            self.keeper.sampled(torch.tensor(token_ids))
        for row, token_id in zip(rows, token_ids, strict=True):
            self.outputs[row].append(token_id)
            self._in_flight.append((row, token_id))

    def flush_deferred(self) -> None:
        """What is in flight comes to the host."""
        for row, token_id in self._in_flight:
            self.tokens.extend(row, np.array([token_id], np.uint32))
        self._in_flight.clear()


IDS = st.integers(0, VOCAB - 1)
FEW_IDS = st.integers(0, 3)  # so that words come about

REQUESTS = st.builds(
    asked,
    prompt=st.lists(IDS, min_size=1, max_size=6).map(tuple),
    words=st.lists(st.lists(FEW_IDS, min_size=1, max_size=4).map(tuple), max_size=4),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.none() | st.dictionaries(IDS, st.sampled_from([-100.0, 0.5, 100.0]), max_size=4),
    allowed_token_ids=st.none()
    | st.lists(IDS, min_size=1, max_size=5).map(tuple)
    | st.just((0, 1, 2, 3)),
)


class NoNumberByIndex(TorchDispatchMode):
    """On a card a plain number that is assigned by index is copied there while the host waits."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten.index_put):
            assert args[2].dim() > 0, "a number is assigned by index"
        return func(*args, **(kwargs or {}))


class Elements(TorchDispatchMode):
    """Counts the elements that each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        values = torch.utils._pytree.tree_leaves((args, kwargs, found))
        self.counts.append(sum(v.numel() for v in values if isinstance(v, torch.Tensor)))
        return found


def test_the_host_hands_no_number_over_by_index() -> None:
    course = Course()
    it = asked(
        words=[(5,), (6, 7), (8, 9, 10)],
        presence_penalty=1.0,
        repetition_penalty=1.3,
        logit_bias={3: 2.0},
        allowed_token_ids=(1, 2, 3, 5, 6, 7),
    )
    for row in (0, 1):  # torch takes leading ones from shapes: one row's values look like numbers
        course.add(row, it, outputs=(8, 9))
    plan = course.plan([0, 1])
    assert plan is not None
    assert plan.refill is not None
    with NoNumberByIndex():
        course.keeper.apply(torch.zeros(2, VOCAB), plan)
        course.keeper.sampled(torch.tensor([6, 6]))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_batches_of_all_kinds_follow_the_loops(data: st.DataObject) -> None:
    course = Course()
    draw = data.draw
    for number in range(draw(st.integers(3, 15))):
        roll = draw(st.integers(0, 9))
        rows = sorted(course.asked)
        if roll < 3 or not rows:
            row = draw(st.sampled_from([r for r in range(9) if r not in rows] or [9]))
            if row < 9:
                outputs = draw(st.lists(FEW_IDS, max_size=40))
                course.add(row, draw(st.just(Asked()) | REQUESTS), outputs)
        elif roll < 4:
            course.preempt(draw(st.sampled_from(rows)))
        elif roll < 5:
            course.remove(draw(st.sampled_from(rows)))
        rows = sorted(course.asked)
        if rows:
            sampled = draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
            sampled = draw(st.sampled_from([rows, rows, sampled]))
            generator = torch.Generator().manual_seed(number)
            logits = torch.randn(len(sampled), VOCAB, generator=generator) * 3
            choices = [draw(st.integers(0, VOCAB)) for _ in sampled]
            course.step(sampled, logits, choices)


def test_long_histories_and_new_ones_side_by_side() -> None:
    course = Course()
    for row, num_outputs in enumerate((0, 1, 63, 64, 65, 200)):
        options = {"presence_penalty": row / 5, "repetition_penalty": 1 + row / 7}
        course.add(row, asked((row, 2), **options), [i % 19 for i in range(num_outputs)])
    course.add(6, asked((5,), frequency_penalty=0.5))  # has seen nothing
    generator = torch.Generator().manual_seed(0)
    for number in range(70):
        if number == 35:
            course.add(7, asked((5,), repetition_penalty=2.0))
        rows = sorted(course.asked)
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
        course.step(rows, logits, range(number, number + len(rows)))


def test_a_batch_that_stays_the_same_is_told_the_same() -> None:
    course = Course()
    course.add(3, asked(presence_penalty=1.0, words=[(1, 2)]))
    course.add(4, asked())
    course.add(5, asked(logit_bias={1: 1.0}))
    first = course.plan([3, 4, 5])
    assert first is not None
    assert first.refill is not None
    assert first.rows.tolist() == [0, 2]
    again = course.plan([4, 3, 5])
    assert again is not None
    assert (again.constraints, again.refill) == (first.constraints, None)
    assert again.rows.tolist() == [1, 2]
    course.columns.deactivate([4])  # has no lanes: nothing changes for the others
    assert course.plan([3, 5]).constraints is first.constraints
    course.columns.deactivate([5])
    other = course.plan([3, 5])
    assert other.constraints is not first.constraints
    assert other.refill is None  # it needs none, and 3 has kept its own


def test_requests_without_rules_have_none() -> None:
    neutral = {"logit_bias": {}, "bad_words": (), "repetition_penalty": 1.0}
    assert token_constraints(SamplingParams(), ()) is None
    assert token_constraints(SamplingParams(**neutral), ()) is None
    course = Course()
    course.add(0, asked())
    assert course.plan([0]) is None


def test_lanes_are_handed_out_again() -> None:
    course = Course()
    for row in range(40):
        course.add(row, asked(presence_penalty=1.0, words=[(1, 2)]))
        course.step([row], torch.randn(1, VOCAB), [row])
        course.remove(row)
    assert len(course.keeper._penalties._counts) == 1
    for row in range(40):
        course.add(row, asked(presence_penalty=1.0, words=[(1, 2)]))
    course.step(range(40), torch.randn(40, VOCAB), range(40))
    assert 40 <= len(course.keeper._penalties._counts) < 80


@given(
    most=st.tuples(st.integers(1, 40), st.integers(1, 150)),
    asked_for=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
)
def test_tables_of_penalties_never_take_more_than_was_said(
    most: tuple[int, int], asked_for: list[tuple[float, float]]
) -> None:
    """What is copied when one grows included."""
    most_lanes, most_seen = most
    it = Penalties(VOCAB, CPU, num_state_slots=most_lanes, max_model_len=most_seen)
    limit = most_bytes(most_lanes, VOCAB, most_seen)
    for lanes, width in asked_for:
        before = it._counts, it._seen
        it._make_room(round(lanes * most_lanes), round(width * most_seen))
        tables = {id(table): table.nbytes for table in (*before, it._counts, it._seen)}
        assert sum(tables.values()) <= limit
        assert round(lanes * most_lanes) <= len(it._counts) == len(it._seen) == len(it._num_seen)
        assert round(width * most_seen) <= it._seen.shape[1] <= most_seen


def test_a_table_that_could_not_grow_grows_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Penalties(VOCAB, CPU, num_state_slots=8, max_model_len=100)
    padded = penalties._padded

    def has_room_for_one(table: torch.Tensor, num_lanes: int) -> torch.Tensor:
        if table.dtype == torch.int64:
            raise torch.OutOfMemoryError
        return padded(table, num_lanes)

    with monkeypatch.context() as patch:
        patch.setattr(penalties, "_padded", has_room_for_one)
        with pytest.raises(torch.OutOfMemoryError):
            it._make_room(3, 1)
    it._make_room(3, 1)
    assert len(it._counts) == len(it._seen) == len(it._num_seen) == 4


def test_lanes_that_a_failed_step_was_to_fill_are_not_looked_for() -> None:
    """The step behind it is launched already, with the same lanes."""
    course = Course()
    for row in range(20):
        course.add(row, asked(words=[(1, 2)]))
    failed = course.plan(range(20))
    behind = course.plan(range(20))
    assert failed is not None
    assert failed.refill is not None
    assert behind is not None
    assert behind.refill is None
    with pytest.raises(RuntimeError, match="state slot 19 of 16"):
        course.keeper.apply(torch.zeros(20, VOCAB), behind)
    course.columns.deactivate(range(20))  # all of them compute their tokens anew
    course.step(range(20), torch.randn(20, VOCAB), range(20))


def test_a_list_of_allowed_ids_costs_as_much_as_a_set_of_them() -> None:
    """However long it is and often it names an id: by what a plan brings and a step touches."""

    def cost(allowed: tuple[int, ...]) -> tuple[list[int], list[int]]:
        course = Course()
        for row in range(4):
            course.add(row, asked(allowed_token_ids=allowed))
        plan = course.plan(range(4))
        assert plan is not None
        assert plan.refill is not None
        sizes = [
            value.size
            for part in (plan.constraints, plan.refill)
            for name in part.__dataclass_fields__
            if isinstance(value := getattr(part, name), np.ndarray)
        ]
        course.keeper.apply(torch.zeros(4, VOCAB), plan)
        with Elements() as touched:
            course.keeper.apply(torch.zeros(4, VOCAB), plan)
        return sizes, touched.counts

    assert cost((20,) * 300_000) == cost((20,)) == cost((20, 3, 5, 3))


def test_answers_of_a_request_share_what_is_allowed() -> None:
    course = Course()
    for row in range(5):
        course.add(row, asked(allowed_token_ids=(4, 5, 4)))
    course.add(5, asked(allowed_token_ids=(6,)))
    assert len({id(course.columns._by_row[row].allowed) for row in range(5)}) == 1
    plan = course.plan(range(6))
    assert plan is not None
    assert plan.refill is not None
    assert plan.constraints.allowed_state_slots.tolist() == [0, 0, 0, 0, 0, 1]
    assert plan.refill.allowed_state_slots.tolist() == [0, 1]
    course.keeper.apply(torch.zeros(6, VOCAB), plan)
    course.step(range(6), torch.randn(6, VOCAB), range(6))
    course.remove(0)
    course.remove(5)
    course.add(6, asked(allowed_token_ids=(7,)))  # gets the slot of 5
    course.add(7, asked(allowed_token_ids=(5, 4)))  # brings the bits that others have brought
    plan = course.plan([1, 6, 7])
    assert plan is not None
    assert plan.refill is not None
    assert plan.constraints.allowed_state_slots.tolist() == [0, 1, 0]
    assert plan.refill.allowed_state_slots.tolist() == [1, 0]
    course.keeper.apply(torch.zeros(3, VOCAB), plan)
    course.step([1, 6, 7], torch.randn(3, VOCAB), range(3))
    for row in (1, 2, 3, 4, 6, 7):
        course.remove(row)
    assert not course.columns._allowed._masks


def test_ids_that_a_failed_step_was_to_bring_are_brought_by_the_next_row() -> None:
    """Which may have the same, and is in the step behind it."""
    course = Course()
    course.add(0, asked(allowed_token_ids=(4, 5)))
    failed = course.plan([0])
    assert failed is not None  # and is never applied
    course.add(1, asked(allowed_token_ids=(4, 5)))
    course.step([1], torch.randn(1, VOCAB), [0])
    course.columns.deactivate([0])
    course.step([0, 1], torch.randn(2, VOCAB), [0, 1])


def test_a_row_goes_to_another_request() -> None:
    course = Course()
    for it in (asked(presence_penalty=1.0), asked(logit_bias={1: 1.0}), asked(words=[(1, 2)])):
        course.add(0, it)
        course.step([0], torch.randn(1, VOCAB), [0])
        course.step([0], torch.randn(1, VOCAB), [1])
        course.remove(0)


# ---- what is drawn ---------------------------------------------------------------------------

HISTORY = (5, 5, 2, 7, 5, 1)
LIMITED = [
    asked(logit_bias={2: 1.5, 3: -2.0, 9: 100.0}),
    asked(logit_bias={2: 1.5, 3: -100.0}),
    asked(allowed_token_ids=(1, 4, 9, 11)),
    asked(words=[(4,), (1, 6), (9, 6), (5, 1, 8), (1, 5, 1, 9)]),  # two end alike
    asked(presence_penalty=1.2),
    asked(presence_penalty=-1.7),
    asked(frequency_penalty=0.8),
    asked(repetition_penalty=1.8),
    asked(repetition_penalty=0.6),
    asked(
        words=[(1, 6), (2,)],
        logit_bias={3: 2.0, 5: 3.0},
        allowed_token_ids=tuple(range(15)),
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
    ),
]


@pytest.mark.parametrize("truncation", [{}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}])
@pytest.mark.parametrize("it", LIMITED, ids=range(len(LIMITED)))
def test_what_is_sampled_follows_the_distribution(it: Asked, truncation: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    num, draws = 500, 20_000
    course = Course()
    course.prompt_lens = np.zeros(num, np.int64)
    for row in range(num):
        course.add(row, it, HISTORY)
    plan = course.plan(range(num))
    assert plan is not None
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    batch, vocab = logits.expand(num, -1), torch.arange(VOCAB, dtype=torch.int32)
    for start in range(1, draws, num):
        rows = [Row(position=p, **truncation) for p in range(start, start + num)]
        token_ids, _ = sample(batch, plan_of(rows), vocab, allowed=course.keeper.apply(batch, plan))
        counts += torch.bincount(token_ids, minlength=VOCAB)
    changed = torch.tensor(expected_logits(logits.tolist(), it, HISTORY))
    assert not torch.equal(changed, logits)
    assert_follows(counts, distribution(changed, Row(**truncation)))


def test_log_probabilities_are_of_the_raw_logits() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    course = Course()
    course.add(0, asked(allowed_token_ids=(6,), logit_bias={6: 50.0}, presence_penalty=2.0))
    plan = course.plan([0])
    assert plan is not None
    vocab = torch.arange(VOCAB, dtype=torch.int32)
    rows = [Row(num_logprobs=2)]
    token_ids, found = sample(
        logits, plan_of(rows), vocab, allowed=course.keeper.apply(logits, plan)
    )
    assert token_ids.tolist() == [6]
    assert found is not None
    expected = logits.log_softmax(-1)[0]
    assert found.ids[0].tolist() == [6, *expected.topk(2).indices.tolist()]
    torch.testing.assert_close(found.values[0], expected[found.ids[0]])
