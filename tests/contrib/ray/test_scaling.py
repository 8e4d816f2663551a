"""The wanted number of replicas against the rule in words, by hypothesis."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ray.scaling import CALM_S, Autoscaler, ReplicaBounds, replicas_for


@given(st.integers(0, 10**6), st.integers(1, 2048))
def test_as_many_as_run_the_requests_at_three_quarters(num_requests: int, max_num_seqs: int):
    exact = ceil(Fraction(num_requests) / (Fraction(3, 4) * max_num_seqs))
    assert replicas_for(num_requests, max_num_seqs) == exact


@pytest.mark.parametrize(
    ("num_requests", "replicas"), [(0, 0), (1, 1), (24, 1), (25, 2), (48, 2), (49, 3)]
)
def test_of_replicas_that_run_32_at_a_time(num_requests: int, replicas: int):
    assert replicas_for(num_requests, 32) == replicas


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 30.0, 100.0, 299.5, 301.0]), st.integers(0, 60))),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_up_at_once_and_down_after_the_calm(history, least: int, room: int):
    bounds = ReplicaBounds(least, least + room)
    scaler = Autoscaler(0.0)
    now, current = 0.0, least
    asked: list[tuple[float, int]] = []
    for pause_s, num_requests in history:
        now += pause_s
        before = current
        current = scaler.wanted(num_requests, 4, before, bounds, now)
        needed = ceil(num_requests / 3)
        asked.append((now, needed))
        recent = [number for at, number in asked if at >= now - CALM_S]
        assert bounds.least <= current <= bounds.most
        assert current >= min(needed, bounds.most)
        if current < before:
            assert now >= CALM_S
            assert current == max(max(recent), bounds.least)
        if current > before:
            assert max(recent) >= current
        if now >= CALM_S:
            assert current == min(max(max(recent), bounds.least), bounds.most)


def test_a_short_lull_takes_no_replica():
    scaler, bounds = Autoscaler(0.0), ReplicaBounds(1, 8)
    current = scaler.wanted(12, 4, 1, bounds, 0.0)
    assert current == 4
    for now in range(1, 301):
        current = scaler.wanted(0, 4, current, bounds, float(now))
        assert current == 4
    assert scaler.wanted(0, 4, current, bounds, 300.5) == 1


def test_one_that_begins_anew_keeps_what_there_is():
    scaler, bounds = Autoscaler(1000.0), ReplicaBounds(1, 8)
    assert scaler.wanted(0, 4, 5, bounds, 1000.0) == 5
    assert scaler.wanted(0, 4, 5, bounds, 1299.0) == 5
    assert scaler.wanted(0, 4, 5, bounds, 1300.0) == 1
