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


def told_of_lanes(*works: tuple[str, float, int]) -> list[str]:
    """Which lane's parts are done in which order. works: lane, seconds of a part, how many."""
    now, told = [0.0], []

    def work(lane: str, part_s: float, num_parts: int) -> Callable[[], bool]:
        left = [num_parts]

        def part() -> bool:
            told.append(lane)
            now[0] += part_s
            left[0] -= 1
            return left[0] > 0

        return part

    async def main() -> None:
        slices = TimeSlicedQueue(lambda: now[0])
        for lane, part_s, num_parts in works:
            slices.add(work(lane, part_s, num_parts), lane)
        while len(told) < sum([num for _, _, num in works]):  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)

    asyncio.run(main())
    return told


def test_a_lane_waits_for_one_part_of_another_however_much_work_that_has():
    hundred = [("large", 0.2, 1)] * 100
    assert told_of_lanes(*hundred, ("small", 0.001, 1))[:2] == ["large", "small"]


def test_lanes_have_equal_time_not_equal_parts():
    told = told_of_lanes(*[("large", 0.2, 1)] * 4, *[("small", 0.001, 1)] * 300)
    second = told.index("large", told.index("large") + 1)
    assert told[:second].count("small") == 200


def test_an_idle_lane_gains_nothing_by_idling_and_lanes_are_forgotten():
    now = [0.0]
    slices, told = TimeSlicedQueue(lambda: now[0]), []

    def part(lane: str, part_s: float) -> Callable[[], bool]:
        def run() -> bool:
            told.append(lane)
            now[0] += part_s
            return False

        return run

    async def main() -> None:
        for number in range(5000):
            slices.add(part(f"lane {number}", 0.001), f"lane {number}")
            await asyncio.sleep(0)
        slices.add(part("late", 0.001), "late")
        slices.add(part("lane 4999", 0.001), "lane 4999")
        while told[-1] != "lane 4999" or told[-2] != "late":  # noqa: ASYNC110
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(slices._used) <= time_slice._MAX_IDLE_LANES
