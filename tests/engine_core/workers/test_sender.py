"""What one worker is sent, against a session that takes messages or does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.helpers.admits import admit_of

from slipstream_core.workers.sender import WorkerSender
from slipstream_core.workers.stream_store import CoreStreamStore
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.messages import Admit, Admitted, SamplingParams, Step, SyncDone
from slipstream_ipc.row_set import RowSet


def admit(row: int, **fields: Any) -> Admit:
    return admit_of(
        stream_id=row.to_bytes(16, "little"),
        prompt_ids=pack_u32([1]),
        params=SamplingParams(max_tokens=100),
        seed=0,
        max_tokens=100,
        **fields,
    )


class Side:
    """A port with its histories, and the worker's end of it."""

    def __init__(self, num_rows: int = 4) -> None:
        store = CoreStreamStore()
        self.tokens, self.logprobs, self.cursors = store.tokens, store.logprobs, store.cursors
        self.possible_ends = store.possible_ends
        self.credit = 16
        self.takes = True
        self.sent: list[Any] = []
        self.sets: dict[tuple[int, ...], RowSet] = {}
        self.receipts: list[Any] = []
        acceptor: Any = SimpleNamespace(send=self._send)
        self.port = WorkerSender(acceptor, store)
        self.session: Any = SimpleNamespace(
            is_open=True,
            fresh=True,
            route=b"",  # over ZeroMQ
            link=SimpleNamespace(
                has_credit=True,
                has_receipts=True,
                num_unacked=0,
                take_receipts=self._take_receipts,
            ),
        )
        self.port.attach(self.session, [])
        for row in range(num_rows):
            self.tokens.open(row)
            self.port.open(row, 0, logprobs=False)
        self.port.publish()  # that they were opened has been looked into

    def _send(self, _session: object, body: object, receipt: object) -> bool:
        if self.credit and self.takes:
            self.credit -= 1
            self.session.link.has_credit = self.credit > 0
            self.sent.append(body)
            self.receipts.append(receipt)
            self.session.link.num_unacked = len(self.receipts)
            return True
        return False

    def _take_receipts(self) -> list[Any]:
        taken, self.receipts = self.receipts, []
        self.session.link.num_unacked = 0
        return taken

    def sample(self, *rows: int) -> None:
        """A step gives each of `rows` a token."""
        same = self.sets.setdefault(rows, RowSet(np.array(rows)))  # the same rows are the same set
        self.tokens.append(same, (100 * same.array + self.tokens.lengths(same)).astype(np.uint32))
        self.port.mark_dirty(same)

    def received(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for step in self.sent:
            if not isinstance(step, Step):
                continue
            rows = u32(step.rows).tolist()
            counts = u32(step.counts).tolist() if step.counts else [1] * len(rows)
            token_ids = u32(step.token_ids).tolist()
            for row, count in zip(rows, counts, strict=True):
                found.setdefault(row, []).extend(token_ids[:count])
                del token_ids[:count]
        return found

    def is_whole(self) -> bool:
        received = self.received()
        return all(
            received.get(row, []) == self.tokens.read(row, 0, self.tokens.length(row)).tolist()
            for row in range(4)
        )


def test_two_steps_with_nobody_in_common_leave_together() -> None:
    side = Side()
    side.sample(0, 2)
    side.sample(3)
    assert not side.port.publish()
    assert side.received() == {0: [0], 2: [200], 3: [300]}


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_step_without_tokens_for_the_worker_sends_none(*, logprobs: bool) -> None:
    """All of its rows have ended meanwhile."""
    side = Side()
    side.port.open(0, 0, logprobs=logprobs)
    side.port.publish()
    side.port.mark_dirty(RowSet(np.zeros(0, np.int64)))
    side.port.publish()
    assert side.received() == {}


def test_two_steps_of_the_same_rows_leave_together() -> None:
    side = Side()
    side.port.publish()
    side.sample(1, 0)
    side.sample(1, 0)
    side.port.publish()
    side.sample(1)
    side.port.publish()
    assert side.is_whole()
    assert len(side.sent) == 2


def test_what_the_socket_did_not_take_leaves_later() -> None:
    side = Side()
    side.sample(2, 1)
    side.takes = False
    assert not side.port.publish()
    side.takes = True
    side.port.publish()
    assert side.is_whole()
    side.sample(1)
    side.takes = False
    side.port.publish()
    side.sample(3)
    side.takes = True
    side.port.publish()
    assert side.is_whole()


def test_without_credit_tokens_gather_and_leave_as_one() -> None:
    side = Side()
    side.credit, side.session.link.has_credit = 0, False
    for _ in range(5):
        side.sample(0, 1)
        assert not side.port.publish()
    assert not side.sent
    side.credit, side.session.link.has_credit = 1, True
    side.port.publish()
    assert side.is_whole()
    assert len(side.sent) == 1


def test_states_leave_before_tokens() -> None:
    side = Side()
    side.sample(0)
    side.port.enqueue(SyncDone())
    side.port.publish()
    assert [type(body) for body in side.sent] == [SyncDone, Step]


def test_a_flood_of_admissions_holds_up_no_tokens_of_others() -> None:
    side = Side()
    for row in range(100, 200):
        side.port.enqueue(Admitted(bytes(16), row))
    side.port.enqueue(Admitted(bytes(16), 1))
    for step in range(1, 5):
        side.sample(0, 1, 2)
        side.port.completed_step = step
        side.credit, side.session.link.has_credit = 16, True
        assert not side.port.publish()
        assert side.received() == {0: [*range(step)], 2: [*range(200, 200 + step)]}
        assert not side.port.num_unchecked, "the tokens of row 1 are not sent"
    for _ in range(10):
        side.credit, side.session.link.has_credit = 16, True
        side.port.publish()
    admitted = side.sent.index(Admitted(bytes(16), 1))
    assert not [
        body for body in side.sent[:admitted] if isinstance(body, Step) and 1 in u32(body.rows)
    ]
    assert side.is_whole()
    assert side.port.sent_step == 4


def test_tokens_pass_no_other_state() -> None:
    side = Side()
    for row in range(100, 120):
        side.port.enqueue(Admitted(bytes(16), row))
    side.port.enqueue(SyncDone())
    side.sample(0)
    side.port.publish()
    assert not side.received()
    side.credit, side.session.link.has_credit = 16, True
    side.port.publish()
    assert side.is_whole()


@pytest.mark.parametrize("num_rows", [1, 4])
def test_what_is_over_budget_follows_by_turns(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    monkeypatch.setattr("slipstream_core.workers.sender._TOKEN_BUDGET", 10)
    side = Side()
    rows = np.arange(num_rows)
    for row in rows.tolist():
        side.tokens.extend(row, np.arange(25, dtype=np.uint32))
    side.port.mark_dirty(RowSet(rows))
    side.port.completed_step = 7
    turns = 1
    while side.port.publish():
        turns += 1
        assert len(side.sent) <= 2 * turns
        assert side.port.sent_step == 0, "not everything has been sent"
        assert not side.port.num_unchecked
    assert turns > 1
    assert side.is_whole()
    assert side.port.sent_step == 7
    side.sample(0)
    side.port.publish()
    assert side.is_whole()


def test_a_report_is_awaited_on_tokens_that_may_end_a_stream() -> None:
    side = Side()
    side.possible_ends.add(1, admit(1, stop_token_ids=(101,)))
    for step, is_awaited in enumerate([False, True, False], 1):  # token 101 is the second of row 1
        side.sample(0, 1)
        side.port.completed_step = step
        side.port.publish()
        assert side.sent[-1].is_awaited == is_awaited
        assert side.port.num_unchecked == (step >= 2), "the first step counts for nothing"
    side.port.checked(2)
    assert not side.port.num_unchecked, "of step 3 there is nothing to say"


def test_a_report_is_awaited_behind_the_rest_of_the_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_core.workers.sender._TOKEN_BUDGET", 4)
    side = Side()
    side.possible_ends.add(0, admit(0, stop_token_ids=(1,)))
    side.tokens.extend(0, np.arange(14, dtype=np.uint32))
    side.port.mark_dirty(RowSet(np.array([0])))
    side.port.completed_step = 7
    while side.port.publish():
        assert not side.port.num_unchecked, "a report could not say that it is of these tokens"
    assert [step.is_awaited for step in side.sent] == [True] * 4
    assert side.port.num_unchecked == 1
    side.port.checked(7)
    assert not side.port.num_unchecked
    side.sample(0)
    side.port.completed_step = 8
    side.port.publish()
    assert not side.sent[-1].is_awaited


def test_acknowledged_is_what_the_link_says(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.sample(0, 1)
    side.port.publish()
    assert side.cursors.acked[:2].tolist() == [0, 0]
    side.port.publish()
    assert side.cursors.acked[:2].tolist() == [1, 1]


def test_a_row_that_is_closed_is_sent_no_more() -> None:
    side = Side()
    side.sample(0, 1)
    side.port.close(1)
    side.port.publish()
    assert side.received() == {0: [0]}


def test_the_last_state_of_a_row_leaves_behind_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream_core.workers.sender._TOKEN_BUDGET", 4)
    side = Side()
    side.tokens.extend(1, np.arange(10, dtype=np.uint32))
    side.port.mark_dirty(RowSet(np.array([1])))
    side.port.close_with(1, SyncDone())
    while side.port.publish():
        pass
    assert [type(body) for body in side.sent] == [Step, Step, Step, SyncDone]
    assert side.is_whole()
    assert not side.cursors.is_open(1)


def test_the_last_state_of_a_row_without_news_leaves_at_once() -> None:
    side = Side()
    side.sample(0, 1)
    side.port.publish()
    side.port.close_with(1, SyncDone())
    side.sample(0)
    side.port.publish()
    assert [type(body) for body in side.sent] == [Step, SyncDone, Step]


@pytest.mark.parametrize("is_attach", [False, True])
def test_a_row_that_is_closed_or_attached_anew_has_no_last_state(*, is_attach: bool) -> None:
    side = Side()
    side.credit, side.session.link.has_credit = 0, False
    side.sample(1)
    side.port.close_with(1, SyncDone())
    if is_attach:
        side.port.attach(side.session, [0, 1, 2, 3])
    else:
        side.port.close(1)
    side.credit, side.session.link.has_credit = 16, True
    side.port.open(1, 0, logprobs=False)
    side.port.publish()
    assert [type(body) for body in side.sent] == [Step]


class AgainstHistories(RuleBasedStateMachine):
    """Steps of the same rows and of others, rows opened anew, a session that takes what it can."""

    @initialize()
    def begin(self) -> None:
        self.side = Side()
        self.num_steps = 0

    @rule(rows=st.sampled_from([(0, 1), (0, 1), (0, 1), (2,), (1, 0, 3)]), times=st.integers(1, 3))
    def steps(self, rows: tuple[int, ...], times: int) -> None:
        for _ in range(times):
            self.num_steps += 1
            self.side.sample(*rows)
            self.side.port.completed_step = self.num_steps
            self.side.port.publish()

    @rule(rows=st.sampled_from([(0, 1), (1, 2)]))
    def step_unseen(self, rows: tuple[int, ...]) -> None:
        self.side.sample(*rows)

    @rule(row=st.integers(0, 3), num=st.sampled_from([1, 20]))
    def admit(self, row: int, num: int) -> None:
        """The row is told, again, behind others."""
        for other in range(100, 100 + num):
            self.side.port.enqueue(Admitted(bytes(16), other))
        self.side.port.enqueue(Admitted(bytes(16), row))

    @rule(takes=st.booleans(), credit=st.sampled_from([0, 1, 100]))
    def session(self, takes: bool, credit: int) -> None:
        self.side.takes, self.side.credit = takes, credit
        self.side.session.link.has_credit = credit > 0

    @rule(row=st.integers(0, 3), is_over=st.booleans())
    def open_anew(self, row: int, is_over: bool) -> None:
        """Another stream's now, or the same one's, sent once more from the beginning."""
        side = self.side
        self.publish_all()
        side.port.close(row)
        if is_over:
            side.tokens.drop(row)
            side.tokens.open(row)
        side.sent = [_without(step, row) for step in side.sent if isinstance(step, Step)]
        side.port.open(row, 0, logprobs=False)

    @rule()
    def publish_all(self) -> None:
        self.side.takes, self.side.credit = True, 100
        self.side.session.link.has_credit = True
        while self.side.port.publish() or self.side.port._messages:
            self.side.credit = 100
        assert self.side.is_whole()
        self.side.port.publish()  # what was sent last is acknowledged
        lengths = [self.side.tokens.length(row) for row in range(4)]
        assert self.side.cursors.acked[:4].tolist() == lengths

    def teardown(self) -> None:
        if hasattr(self, "side"):
            self.publish_all()


def _without(step: Step, row: int) -> Step:
    rows, ids = u32(step.rows), u32(step.token_ids)
    counts = u32(step.counts) if step.counts else np.ones(len(rows), np.uint32)
    keep = rows != row
    return msgspec.structs.replace(
        step,
        rows=pack_u32(rows[keep]),
        token_ids=pack_u32(ids[np.repeat(keep, counts)]),
        counts=pack_u32(counts[keep]),
    )


TestAgainstHistories = AgainstHistories.TestCase
TestAgainstHistories.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
