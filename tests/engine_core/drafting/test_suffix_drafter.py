"""Drafts from answers that were given before: found by prompt or by tokens, never under another
root, and bounded in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.drafting.answer_memory import MATCH, AnswerMemory
from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.drafting.suffix_drafter import SuffixDrafter
from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet


def ids(*numbers: int) -> UInt32s:
    return np.array(numbers, np.uint32)


PROMPT, ANSWER = ids(1, 2, 3), ids(*range(100, 140))


def test_an_answer_is_found_by_its_prompt_and_by_four_tokens() -> None:
    memory = AnswerMemory(1 << 20)
    memory.add(b"a", PROMPT, ANSWER)
    place = memory.behind_prompt(b"a", PROMPT)
    assert place is not None
    assert memory.read(place, 3) == [100, 101, 102]
    place = memory.behind(b"a", ids(103, 104, 105, 106))
    assert place is not None
    assert memory.read(place, 100) == list(range(107, 140))
    assert memory.behind_prompt(b"a", ids(1, 2)) is None
    assert memory.behind(b"a", ids(103, 104, 105, 107)) is None
    assert memory.behind(b"a", ids(104, 105, 106)) is None
    assert memory.behind(b"a", ids(136, 137, 138, 139)) is None  # nothing came behind
    for root in (b"b", b""):
        assert memory.behind_prompt(root, PROMPT) is None
        assert memory.behind(root, ids(103, 104, 105, 106)) is None


class Oracle:
    """All answers in a list, as long as they are within the bytes; used last comes last."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.answers: list[tuple[bytes, tuple[int, ...], list[int]]] = []

    def add(self, root: bytes, prompt: UInt32s, answer: UInt32s) -> None:
        if len(answer) <= MATCH or 1024 + 160 * len(answer) > self.max_bytes:
            return
        key = root, tuple(prompt.tolist())
        self.answers = [each for each in self.answers if each[:2] != key]
        self.answers.append((*key, answer.tolist()))
        while sum(1024 + 160 * len(each[2]) for each in self.answers) > self.max_bytes:
            del self.answers[0]

    def use(self, root: bytes, prompt_hash: int) -> None:
        [found] = [
            each
            for each in self.answers
            if each[0] == root and hash(ids(*each[1]).tobytes()) == prompt_hash
        ]
        self.answers.remove(found)
        self.answers.append(found)

    def is_behind(self, root: bytes, last: list[int], rest: list[int]) -> bool:
        """True if some answer of the root goes on so behind these tokens."""
        return any(
            each[2][at : at + MATCH] == last and each[2][at + MATCH :] == rest
            for each in self.answers
            if each[0] == root
            for at in range(len(each[2]))
        )


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_nothing_crosses_roots_and_bytes_are_bounded(rng: Random) -> None:
    max_bytes = rng.choice([3_000, 10_000, 100_000])
    memory, oracle = AnswerMemory(max_bytes), Oracle(max_bytes)
    roots = [b"", b"a", b"b"]
    for _ in range(40):
        root = rng.choice(roots)
        prompt = ids(*(rng.randrange(3) for _ in range(rng.randint(1, 3))))
        answer = ids(*(rng.randrange(3) for _ in range(rng.randint(0, 30))))
        memory.add(root, prompt, answer)
        oracle.add(root, prompt, answer)
        assert memory.num_bytes == sum(1024 + 160 * len(each[2]) for each in oracle.answers)
        assert memory.num_bytes <= max_bytes
        assert len(memory) == len(oracle.answers)
        last = [rng.randrange(3) for _ in range(MATCH)]
        for other in roots:  # looked up, and so used last, only where it is told
            place = memory.behind(other, ids(*last))
            if place is not None:
                assert oracle.is_behind(other, last, memory.read(place, 99))
                oracle.use(other, memory._answers[place.answer].prompt)
    by_tokens = sum(len(root.by_tokens) for root in memory._roots.values())
    assert by_tokens <= sum(len(each[2]) for each in oracle.answers)
    assert set(memory._roots) == {each[0] for each in oracle.answers}


class Rows:
    """A drafter and the histories of its rows, all in one step."""

    def __init__(
        self,
        memory: AnswerMemory,
        prompts: dict[int, tuple[bytes, UInt32s]],
        measured: Sequence[tuple[int, float]] = (),
    ) -> None:
        costs, self.log = StepCosts(measured), TokenLog()
        own = NgramDrafter(
            num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4, costs=costs
        )
        self.drafter = SuffixDrafter(own, memory, num_speculative_tokens=4, costs=costs)
        self.rows = RowSet(np.array(sorted(prompts)))
        for row, (root, prompt) in prompts.items():
            self.log.open(row)
            self.log.extend(row, prompt)
            self.drafter.open(row, root, len(prompt), ids())

    def arrive(self, *spans: UInt32s) -> None:
        for row, span in zip(self.rows.tolist(), spans, strict=True):
            self.log.extend(row, span)
        counts = np.array([len(span) for span in spans])
        self.drafter.observe(self.rows, np.concatenate(spans), counts, self.log)

    def proposed(self, most: int = 9) -> list[list[int]]:
        drafts = self.drafter.propose(self.rows, np.full(len(self.rows), most), 0)
        if drafts is None:
            return [[] for _ in range(len(self.rows))]
        ends = np.cumsum(drafts.lens)
        return [
            drafts.token_ids[end - num : end].tolist()
            for num, end in zip(drafts.lens.tolist(), ends.tolist(), strict=True)
        ]


def test_a_row_follows_the_answer_to_its_prompt_and_comes_back_to_it() -> None:
    memory = AnswerMemory(1 << 20)
    memory.add(b"a", PROMPT, ANSWER)
    rows = Rows(memory, {0: (b"a", PROMPT), 1: (b"b", PROMPT)})
    rows.arrive(ids(100), ids(100))
    assert rows.drafter.awaits_tokens
    assert rows.proposed()[1] == []
    first = rows.proposed()[0]
    assert first == list(range(101, 101 + len(first))) != []
    assert len(rows.proposed(1)[0]) == 1
    rows.arrive(ids(101, 102, 103, 104, 105), ids(101))
    assert rows.proposed()[0] == [106, 107, 108, 109]
    rows.arrive(ids(7), ids(102))  # another token than was foreseen
    assert rows.proposed() == [[], []]
    rows.arrive(ids(110, 111, 112), ids(103))
    rows.arrive(ids(113), ids(104))
    assert rows.proposed()[0][:1] == [114]
    rows.drafter.close(np.array([0, 1]))
    assert len(memory) == 2
    place = memory.behind_prompt(b"b", PROMPT)
    assert place is not None
    assert memory.read(place, 9) == [100, 101, 102, 103, 104]


def test_where_no_draft_is_worth_its_time_nothing_is_looked_up() -> None:
    memory = AnswerMemory(1 << 20)
    memory.add(b"a", PROMPT, ANSWER)
    rows = Rows(memory, dict.fromkeys(range(200), (b"a", PROMPT)))
    rows.arrive(*[ids(100)] * 200)
    assert not rows.drafter.awaits_tokens
    assert rows.proposed() == [[]] * 200


def test_many_drafts_may_pay_where_one_alone_does_not() -> None:
    """Steps take as long as their tiles of rows: here a ninth row costs as much as eight more."""
    memory = AnswerMemory(1 << 20)
    memory.add(b"a", PROMPT, ANSWER)
    measured = [(1, 0.005), (8, 0.005), (9, 0.007), (16, 0.007), (17, 0.009), (40, 0.015)]
    assert StepCosts(measured).num_worthwhile(8, np.ones(1)) == 0
    rows = Rows(memory, dict.fromkeys(range(8), (b"a", PROMPT)), measured)
    rows.arrive(*[ids(100)] * 8)
    assert rows.drafter.awaits_tokens
    assert all(rows.proposed())
