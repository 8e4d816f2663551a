"""How much of a time span the device was busy.

Owns: the two ways to know. On a card the profiler names every kernel and copy with its times, so
idle is what lies between them, gaps between two kernels of one step included. On the CPU the
device is the runner's thread, busy as long as it computes. Does not know: who uses the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE_THREAD = "device"  # the name that the runner gives its thread


class DeviceUse(Protocol):
    """Measures one span."""

    def start(self) -> None:
        """The span begins."""

    def stop(self) -> float:
        """The span ends: the share of it, 0 to 1, in which the device had nothing to do."""


def device_use(device: str) -> DeviceUse:
    """What fits the device."""
    return CardUse() if device == "cuda" else ThreadUse()


class CardUse:
    """By the profiler; its span is from the first thing that the card did to the last."""

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """Also what is slow about the first profile of a process."""
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> float:
        """Takes a while after the span: the trace is read."""
        torch.cuda.synchronize()
        self._profile.stop()
        return idle_share(
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type.name == "CUDA"
        )


class ThreadUse:
    """By the processor time of the runner's thread, which must be the only one of its name."""

    def start(self) -> None:
        """Find the thread, read its clock."""
        (thread,) = (t for t in threading.enumerate() if t.name == DEVICE_THREAD)
        assert thread.ident is not None
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._begin = time.monotonic(), time.clock_gettime(self._clock)

    def stop(self) -> float:
        """Read it again."""
        span = time.monotonic() - self._begin[0]
        return max(0.0, 1 - (time.clock_gettime(self._clock) - self._begin[1]) / span)


def idle_share(busy: Iterable[tuple[float, float]]) -> float:
    """The share of the whole span that no interval covers. Raises ValueError without any."""
    intervals = sorted(busy)
    if not intervals:
        raise ValueError("the profiler saw nothing on the device")
    first, end = intervals[0]
    idle = 0.0
    for start, stop in intervals:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / (end - first) if end > first else 0.0
