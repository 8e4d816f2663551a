"""Measures how much of a time span the device was busy.

On a card the profiler records every kernel and copy, so idle time is what lies between them,
including gaps between two kernels of one step. On the CPU the device is the runner's thread, busy
while it computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE_THREAD = "device"  # name of the runner's thread


class DeviceUse(Protocol):
    """Measures one span."""

    def start(self) -> None:
        """Begin the span."""

    def stop(self) -> float:
        """End the span; returns the share of it, 0 to 1, in which the device was idle."""


def device_use(device: str) -> DeviceUse:
    """The implementation for the device."""
    return CardUse() if device == "cuda" else ThreadUse()


class CardUse:
    """Uses the profiler; its span is from the card's first activity to its last."""

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin the span, after the slow first profile of a process."""
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> float:
        """End the span and read the trace, which takes a while."""
        torch.cuda.synchronize()
        self._profile.stop()
        return idle_share(
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type.name == "CUDA"
        )


class ThreadUse:
    """Uses the CPU time of the runner's thread, whose name must be unique in the process."""

    def start(self) -> None:
        """Find the thread and read its clock."""
        (thread,) = (t for t in threading.enumerate() if t.name == DEVICE_THREAD)
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._begin = time.monotonic(), time.clock_gettime(self._clock)

    def stop(self) -> float:
        """Read the clock again; returns the idle share."""
        span = time.monotonic() - self._begin[0]
        return max(0.0, 1 - (time.clock_gettime(self._clock) - self._begin[1]) / span)


def idle_share(busy: Iterable[tuple[float, float]]) -> float:
    """The share of the whole span that no interval covers. Raises ValueError without intervals."""
    intervals = sorted(busy)
    if not intervals:
        raise ValueError("the profiler saw nothing on the device")
    first, end = intervals[0]
    idle = 0.0
    for start, stop in intervals:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - first) if end > first else 0.0
