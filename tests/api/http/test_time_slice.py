"""Work that can wait: whose part is done when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.http import time_slice
from slipstream.http.time_slice import Parts, TimeSlicedQueue, run_all


def told_by(share_s: float, monkeypatch: Any) -> list[str]:
    """What is done in which order where some work has three parts, some one, and others run."""
    monkeypatch.setattr(time_slice, "SLICE_S", share_s)
    told: list[str] = []

    def work(name: str, num_parts: int) -> Callable[[], bool]:
        left = [num_parts]

        def part() -> bool:
            told.append(name)
            left[0] -= 1
            return left[0] > 0

        return part

    async def main() -> None:
        loop, slices = asyncio.get_running_loop(), TimeSlicedQueue()
        slices.add(work("long", 3))
        slices.add(work("short", 1))

        def other(num_left: int) -> None:
            told.append("other")
            if num_left:
                loop.call_soon(other, num_left - 1)

        loop.call_soon(other, 3)
        while told.count("other") < 4:  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)
        slices.add(work("late", 1))
        await asyncio.sleep(0)

    asyncio.run(main())
    return told


def test_who_has_little_does_not_wait_for_who_has_much(monkeypatch):
    done = ["long", "short", "long", "long"]
    assert told_by(1000.0, monkeypatch) == [*done, *["other"] * 4, "late"]


def test_without_time_others_have_a_turn_after_each_part(monkeypatch):
    done = ["long", "other", "short", "other", "long", "other", "long", "other"]
    assert told_by(0.0, monkeypatch) == [*done, "late"]


def test_all_parts_at_once_have_the_same_result():
    def parts(fault: Exception | None) -> Parts[str]:
        yield
        if fault is not None:
            raise fault
        return "all"

    assert run_all(parts(None)) == "all"
    with pytest.raises(KeyError):
        run_all(parts(KeyError()))
