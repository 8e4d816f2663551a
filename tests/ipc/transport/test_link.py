"""The numbers of one attach: what is delivered, what is a gap, who owes what, who is dead."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream_ipc.messages import Control, Frame
from slipstream_ipc.transport.link import Beat, Link, LinkVerdict


def pair(window: int = 4) -> tuple[Link[int], Link[int]]:
    return Link(7, 0.0, window=window), Link(7, 0.0, window=window)


def send(link: Link[int], receipt: int = 0) -> Frame[Any]:
    header = link.numbered("body")
    link.sent(receipt)
    return header


def ack(link: Link[int]) -> Frame[Control]:
    header = link.control(None)
    link.ack_sent()
    return header


def test_numbers_begin_at_one_and_are_delivered_in_order() -> None:
    a, b = pair()
    headers = [send(a), send(a)]
    assert [header.seq for header in headers] == [1, 2]
    assert [b.receive(header, True, 0.0) for header in headers] == [LinkVerdict.DELIVER] * 2


def test_a_frame_seen_before_and_one_of_another_life_are_ignored() -> None:
    a, b = pair()
    header = send(a)
    assert b.receive(header, True, 0.0) is LinkVerdict.DELIVER
    assert b.receive(header, True, 0.0) is LinkVerdict.IGNORE
    assert b.receive(replace(send(a), epoch=6), True, 0.0) is LinkVerdict.IGNORE
    assert b.receive(Frame(8, 0, 0), False, 0.0) is LinkVerdict.IGNORE


def test_a_lost_frame_is_a_gap_and_a_lost_tail_shows_in_the_next_control_frame() -> None:
    a, b = pair()
    send(a)
    assert b.receive(send(a), True, 0.0) is LinkVerdict.GAP
    assert b.receive(ack(a), False, 0.0) is LinkVerdict.GAP


def test_credit_runs_out_and_comes_back() -> None:
    a, b = pair(window=2)
    first, second = send(a, 1), send(a, 2)
    assert not a.has_credit
    b.receive(first, True, 0.0)
    assert b.owes_ack
    a.receive(ack(b), False, 0.0)
    assert not b.owes_ack
    assert (a.has_credit, a.num_unacked) == (True, 1)
    assert a.take_receipts() == [1]
    assert a.take_receipts() == []
    b.receive(second, True, 0.0)
    a.receive(ack(b), False, 0.0)
    assert a.take_receipts() == [2]


def test_acknowledgements_never_go_back() -> None:
    a, b = pair()
    b.receive(send(a, 1), True, 0.0)
    early = Frame(7, 0, 0)
    a.receive(ack(b), False, 0.0)
    assert a.receive(early, False, 0.0) is LinkVerdict.DELIVER
    assert a.receive(Frame(7, 0, -5), False, 0.0) is LinkVerdict.DELIVER
    assert a.num_unacked == 0


@pytest.mark.parametrize("ahead", [1, 2**63])
def test_an_acknowledgement_of_what_was_never_sent_counts_for_nothing(ahead: int) -> None:
    a, _ = pair()
    send(a, 1)
    assert a.receive(Frame(7, 1, 1 + ahead), True, 0.0) is LinkVerdict.IGNORE
    assert (a.num_unacked, a.take_receipts(), a.owes_ack) == (1, [], False)


def test_an_acknowledgement_is_owed_until_it_has_left() -> None:
    """A control frame whose sending failed told nobody anything."""
    a, b = pair()
    b.receive(send(a), True, 0.0)
    b.control(None)
    assert b.owes_ack
    b.ack_sent()
    assert not b.owes_ack


def test_a_numbered_frame_tells_too() -> None:
    a, b = pair()
    b.receive(send(a, 5), True, 0.0)
    back = b.numbered("body")
    assert b.owes_ack
    b.sent(0)
    assert not b.owes_ack
    a.receive(back, True, 0.0)
    assert a.take_receipts() == [5]


def test_the_end_keeps_the_receipts_that_were_acknowledged_and_no_others() -> None:
    a, b = pair()
    first = send(a, 1)
    send(a, 2)
    b.receive(first, True, 0.0)
    a.receive(ack(b), False, 0.0)
    a.end()
    a.end()
    assert a.take_receipts() == [1]
    assert a.take_receipts() == []
    assert a.num_unacked == 0


def test_silence_asks_once_and_only_an_unanswered_ping_is_a_death() -> None:
    link: Link[int] = Link(1, 100.0, ping_after_s=2.0, dead_after_s=8.0)
    beats = [link.beat(100.0 + at) for at in (0, 1.9, 2.0, 5.0, 9.9, 10.0, 10.5)]
    assert beats == [
        Beat.NOTHING, Beat.NOTHING, Beat.PING, Beat.NOTHING, Beat.NOTHING, Beat.NOTHING, Beat.DEAD,
    ]  # fmt: skip


def test_any_frame_of_this_life_is_a_sign_of_it() -> None:
    link: Link[int] = Link(1, 0.0, ping_after_s=2.0, dead_after_s=8.0)
    assert link.beat(2.0) is Beat.PING
    link.receive(Frame(1, 0, 0), False, 9.0)
    assert [link.beat(at) for at in (10.9, 11.0)] == [Beat.NOTHING, Beat.PING]
    link.receive(Frame(2, 0, 0), False, 12.0)  # of another life
    assert [link.beat(at) for at in (19.0, 19.5)] == [Beat.NOTHING, Beat.DEAD]


def test_who_was_too_busy_to_read_kills_nobody() -> None:
    """The pong has long been here when we wake up: it is read before the next beat."""
    link: Link[int] = Link(1, 0.0, ping_after_s=2.0, dead_after_s=8.0)
    assert link.beat(2.0) is Beat.PING
    assert link.beat(60.0) is Beat.NOTHING
    link.receive(Frame(1, 0, 0), False, 60.1)
    assert [link.beat(at) for at in (60.2, 62.1, 70.1)] == [Beat.NOTHING, Beat.PING, Beat.NOTHING]


@given(st.lists(st.sampled_from(["a", "b", "a>", "b>", "ack a", "ack b"]), max_size=80))
def test_in_order_delivery_over_a_fifo(actions: list[str]) -> None:
    """Both ends send and read as they like: everything arrives once, all receipts come back."""
    ends = dict(zip("ab", pair(window=3), strict=True))
    wires: dict[str, deque[tuple[Frame[Any], bool]]] = {"a": deque(), "b": deque()}
    num_sent = {"a": 0, "b": 0}
    num_read = {"a": 0, "b": 0}
    receipts: dict[str, list[int]] = {"a": [], "b": []}

    def read(name: str) -> None:
        other = "b" if name == "a" else "a"
        while wires[name]:
            header, numbered = wires[name].popleft()
            assert ends[other].receive(header, numbered, 0.0) is LinkVerdict.DELIVER
            num_read[name] += numbered
        receipts[other] += ends[other].take_receipts()

    for action in actions:
        name = action[-1] if action.startswith("ack") else action[0]
        if action.startswith("ack"):
            wires[name].append((ack(ends[name]), False))
        elif action.endswith(">"):
            read(name)
        elif ends[name].has_credit:
            num_sent[name] += 1
            wires[name].append((send(ends[name], num_sent[name]), True))
        for end in ends.values():
            assert 0 <= end.num_unacked <= 3
    for name in "abab":
        read(name)
        wires["b" if name == "a" else "a"].append((ack(ends["b" if name == "a" else "a"]), False))
    read("a")
    read("b")
    assert num_read == num_sent
    for name in "ab":
        assert receipts[name] == list(range(1, num_sent[name] + 1))


def stalling() -> tuple[Link[int], Link[int]]:
    return Link(7, 0.0, stalled_after_s=30.0), Link(7, 0.0)


def lives_on(a: Link[int], b: Link[int], now: float) -> Beat:
    """`b` gives a sign of life that acknowledges nothing new; `a` has its beat."""
    header = Frame(7, 0, a.num_acked)
    assert a.receive(header, False, now) is LinkVerdict.DELIVER
    return a.beat(now)


def test_a_peer_that_lives_and_acknowledges_nothing_has_stalled() -> None:
    a, b = stalling()
    assert [lives_on(a, b, float(now)) for now in range(100)] == [
        Beat.NOTHING
    ] * 100  # nothing sent
    send(a)
    beats = [lives_on(a, b, 100.0 + now) for now in range(31)]
    # at the second look: what it said may have lain unread
    assert beats == [Beat.NOTHING] * 30 + [Beat.STALLED]


def test_each_acknowledgement_is_progress() -> None:
    a, b = stalling()
    for _ in range(10):
        b.receive(send(a), True, 0.0)
    headers = [Frame(7, 0, ack) for ack in range(1, 11)]
    for number, header in enumerate(headers):
        for tick in range(28):
            assert lives_on(a, b, 28.0 * number + tick) is Beat.NOTHING
        a.receive(header, False, 28.0 * number + 28)
    assert [lives_on(a, b, 280.0 + now) for now in range(100)] == [Beat.NOTHING] * 100


def test_who_was_away_himself_reads_before_he_takes_anybody_for_stalled() -> None:
    a, b = stalling()
    b.receive(send(a), True, 0.0)
    assert lives_on(a, b, 0.0) is Beat.NOTHING
    assert a.beat(1000.0) is Beat.PING
    a.receive(ack(b), False, 1000.0)
    assert a.beat(1000.1) is Beat.NOTHING
