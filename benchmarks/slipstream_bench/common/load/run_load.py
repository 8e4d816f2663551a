"""Starts each request of a load at its time.

The load is open (a Poisson process of a given rate, or everything at once) unless `concurrency`
bounds it: then a due request waits for a place, and its clock starts when it gets one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from slipstream_bench.common.measures import RequestTimeline

SendRequest = Callable[[], Awaitable[RequestTimeline]]  # sends one prepared request


def poisson_starts(num_requests: int, rate: float, random: np.random.Generator) -> list[float]:
    """When each request is due, in seconds after the first; all 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = random.exponential(1 / rate, num_requests)
    gaps[0] = 0.0
    starts: list[float] = np.cumsum(gaps).tolist()
    return starts


async def run_load(
    sends: Sequence[SendRequest],
    starts_s: Sequence[float],
    concurrency: int | None,
    on_done: Callable[[RequestTimeline], None],
) -> list[RequestTimeline]:
    """Start every request when it is due; returns timelines in the order of `sends`."""
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(concurrency or len(sends))
    begin = loop.time()

    async def one(ask: SendRequest, start_s: float) -> RequestTimeline:
        if (early := begin + start_s - loop.time()) > 0:
            await asyncio.sleep(early)
        async with places:
            timeline = await ask()
        on_done(timeline)
        return timeline

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(sends, starts_s, strict=True)]
    return [task.result() for task in tasks]
