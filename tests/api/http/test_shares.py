"""What long work may hold at once: the budget of a front and each tenant's part of it."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.shares import Share, Shares


class Asked:
    """Takes shares of 100 bytes, and writes down who has got one."""

    def __init__(self) -> None:
        self.shares = Shares(100)
        self.got: list[str] = []
        self.taken: dict[str, Share] = {}

    def take(self, name: str, num_bytes: int) -> Share:
        def ready(share: Share) -> None:
            self.got.append(name)
            self.taken[name] = share

        return self.shares.take(name[0].encode(), num_bytes, ready)


def test_a_tenant_has_at_most_half() -> None:
    asked = Asked()
    for number in range(5):
        asked.take(f"a{number}", 20)
    assert asked.got == ["a0", "a1"]
    asked.take("b0", 50)
    assert asked.got == ["a0", "a1", "b0"]
    asked.taken["a0"].shrink(0)
    assert asked.got[3:] == ["a2"]
    asked.taken["a2"].shrink(5)
    asked.taken["a1"].shrink(5)
    assert asked.got[4:] == ["a3", "a4"]


def test_tenants_take_turns_and_none_is_passed() -> None:
    asked = Asked()
    for name in ("a0", "a1", "b0", "b1", "b2", "c0"):
        asked.take(name, 50)
    assert asked.got == ["a0", "b0"]
    asked.taken["a0"].shrink(0)
    assert asked.got[2:] == ["c0"]  # b has all that it may
    asked.taken["b0"].shrink(0)
    assert asked.got[3:] == ["a1"]
    asked.take("d0", 50)
    asked.taken["c0"].shrink(0)
    assert asked.got[4:] == ["b1"]


def test_a_share_that_is_too_large_is_a_tenants_only_one() -> None:
    asked = Asked()
    asked.take("a0", 10**9)
    asked.take("a1", 1)
    assert asked.got == ["a0"]
    asked.taken["a0"].shrink(0)
    assert asked.got == ["a0", "a1"]


def test_who_gives_up_waiting_gets_none() -> None:
    asked = Asked()
    asked.take("a0", 50)
    waiting = asked.take("a1", 50)
    asked.take("a2", 50)
    waiting.shrink(0)
    asked.taken["a0"].shrink(0)
    assert asked.got == ["a0", "a2"]


def test_nobody_waits_behind_a_share_that_is_not_wanted_any_more() -> None:
    asked = Asked()
    asked.take("a0", 30)
    waiting = asked.take("a1", 50)
    asked.take("a2", 10)
    assert asked.got == ["a0"]
    waiting.shrink(0)
    assert asked.got == ["a0", "a2"]


def test_a_budget_may_have_room_for_more_tenants() -> None:
    shares, got = Shares(100, num_tenants=4), list[bytes]()
    for tenant in (b"a", b"a", b"b", b"c", b"d", b"e"):
        shares.take(tenant, 25, lambda share: got.append(share.tenant))
    assert got == [b"a", b"b", b"c", b"d"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 120), st.booleans()), max_size=40))
def test_no_more_is_taken_than_there_is_and_all_get_theirs(steps: Any) -> None:
    shares, running, num_got = Shares(100), deque[Share](), 0

    def ready(share: Share) -> None:
        nonlocal num_got
        num_got += 1
        running.append(share)
        by_tenant = {each.tenant: 0 for each in running}
        for each in running:
            by_tenant[each.tenant] += each.num_bytes
        assert shares.num_bytes == sum(by_tenant.values()) <= 100
        assert max(by_tenant.values()) <= 50

    for tenant, num_bytes, ends in steps:
        shares.take(tenant.encode(), num_bytes, ready)
        if ends and running:
            running.popleft().shrink(0)
    while running:
        running.popleft().shrink(0)
    assert num_got == len(steps)
    assert shares.num_bytes == 0
