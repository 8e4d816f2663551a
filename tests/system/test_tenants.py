"""What many requests of one client cost the others: a turn, whoever dies in between."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("dies", ["nobody", "worker", "core", "both"])
def test_one_tenants_queue_is_not_everybodys(make_stack, dies) -> None:
    stack = make_stack(max_num_seqs=4, grace_s=60)
    many, one = stack.client(), stack.client()
    flood = [many.submit(f"number {n}", max_tokens=8) for n in range(200)]
    stack.until(lambda: all(it.accepted for it in flood))
    if dies in ("worker", "both"):
        stack.kill_worker()
    if dies in ("core", "both"):
        stack.kill_core()
        stack.start_core()
    if dies in ("worker", "both"):
        stack.start_worker()
    stack.until(lambda: many.hop.is_attached and one.hop.is_attached)
    stack.until(lambda: stack.core.scheduler.num_running == 4)
    num_before = sum(it.is_over for it in flood)
    it = one.submit("just this", max_tokens=8)
    stack.until(lambda: it.is_over)
    # those that ran already, one that goes first, and what ends while messages are under way
    assert sum(it.is_over for it in flood) - num_before < 60
    stack.until(lambda: all(it.is_over for it in flood))
    assert {it.end.reason for it in flood} == {"length"}


def test_whom_a_stream_is_for_outlives_everybody(make_stack) -> None:
    stack = make_stack()
    client, other = stack.client(), stack.client()
    mine = [client.submit(f"number {n}", max_tokens=300) for n in range(2)]
    its = other.submit("other", max_tokens=300)
    stack.until(lambda: its.accepted and all(it.accepted for it in mine))

    def tenants() -> list[bytes]:
        return sorted(stack.core.scheduler._requests.tenants.values())

    expected = tenants()
    assert len(set(expected)) == 2
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: tenants() == expected)
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: len(stack.worker.lives.streams) == 3)
    found = sorted(it.registration.tenant for it in stack.worker.lives.streams.all())
    assert found == expected
