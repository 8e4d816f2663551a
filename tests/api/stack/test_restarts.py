"""Pauses and budgets of restarts, on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slipstream.stack.children.process import ChildExit, ChildSpec
from slipstream.stack.children.restarts import RestartPolicy
from slipstream.stack.children.roles import Role
from slipstream_ipc.restart_backoff import STEADY_S


def test_the_first_restart_is_immediate_and_the_pauses_grow_to_ten_seconds() -> None:
    policy = RestartPolicy(max_restarts=100, window_s=1000.0)
    pauses = [policy.pause_s(now, served_s=0.0) for now in range(8)]
    assert pauses == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_whoever_served_for_a_while_is_replaced_at_once() -> None:
    policy = RestartPolicy(max_restarts=100, window_s=1000.0)
    assert [policy.pause_s(now, STEADY_S) for now in range(5)] == [0] * 5
    assert policy.pause_s(5, 0.1) == 0.5
    assert policy.pause_s(6, 0.1) == 1
    assert policy.pause_s(7, STEADY_S) == 0
    assert policy.pause_s(8, 0.1) == 0.5


def test_the_budget_is_what_the_window_holds() -> None:
    policy = RestartPolicy(max_restarts=2, window_s=10.0)
    assert policy.pause_s(0.0, STEADY_S) is not None
    assert policy.pause_s(5.0, STEADY_S) is not None
    assert policy.pause_s(9.9, STEADY_S) is None
    assert policy.pause_s(10.0, STEADY_S) is not None
    assert policy.pause_s(14.9, STEADY_S) is None


@pytest.mark.parametrize("served_s", [0.0, STEADY_S])
def test_no_budget_no_restart(served_s: float) -> None:
    assert RestartPolicy(max_restarts=0, window_s=10.0).pause_s(0.0, served_s) is None


def test_a_very_long_row_of_deaths_does_not_outgrow_a_number() -> None:
    policy = RestartPolicy(max_restarts=5000, window_s=1e9)
    assert [policy.pause_s(now, 0.0) for now in range(5000)][-1] == 10.0


def test_spares_have_a_budget_too_and_whoever_used_it_up_is_told_so() -> None:
    role = Role(ChildSpec("core", ("nothing",), msgspec.Raw(b"{}"), has_spare=True), 1, 60.0)
    told = []
    for now in (1.0, 2.0):
        spare: Any = SimpleNamespace(available_at=0.0)
        role.spare = spare
        told.append(role.note_exit(spare, ChildExit("signal SIGKILL", is_own_fault=False), now))
        assert role.spare is None
    assert told == [True, False]
    assert role.spare_due_at is None
