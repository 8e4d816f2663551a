"""Which kernels a device ran, how often and for how long, by the profiler.

On a card these are kernels and copies. On the CPU they are torch's operators, those that no other
operator called, on every thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

_LONGEST_NAME = 120


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel's launches."""

    name: str
    count: float
    us: float  # all launches together


def profiled(device: str, work: Callable[[], object]) -> list[KernelUse]:
    """What ran on the device while `work` did."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    config = _ExperimentalConfig(profile_all_threads=device == "cpu")
    session: Any = profile(activities=[activity], experimental_config=config)
    _synchronize(device)
    session.start()
    work()
    _synchronize(device)
    session.stop()
    return counted(
        (event.name, event.time_range.elapsed_us())
        for event in session.events()
        if (
            event.device_type.name == "CUDA"
            if device == "cuda"
            else event.cpu_parent is None and event.name.startswith("aten::")
        )
    )


def counted(events: Iterable[tuple[str, float]]) -> list[KernelUse]:
    """Events (name, µs) by short name, the longest in all first."""
    found: dict[str, tuple[int, float]] = {}
    for name, us in events:
        short = short_name(name)
        count, total = found.get(short, (0, 0.0))
        found[short] = count + 1, total + us
    return _by_time(KernelUse(name, count, us) for name, (count, us) in found.items())


def per_run(
    more: Iterable[KernelUse], fewer: Iterable[KernelUse], num_runs: int
) -> list[KernelUse]:
    """What one run launches, from a profile with `num_runs` more of them than another.

    What both have besides, such as filling buffers beforehand, cancels out.
    """
    beside = {use.name: use for use in fewer}
    nothing = KernelUse("", 0, 0.0)
    found = []
    for use in more:
        other = beside.get(use.name, nothing)
        if use.count > other.count:
            us = max(0.0, use.us - other.us) / num_runs
            found.append(KernelUse(use.name, (use.count - other.count) / num_runs, us))
    return _by_time(found)


def short_name(name: str) -> str:
    """A kernel's name without return type, arguments and namespaces that all of them share."""
    name = re.sub(r"^void ", "", name)
    name = name.replace("at::native::", "").replace("(anonymous namespace)::", "")
    depth = 0
    for at, letter in enumerate(name):  # the arguments begin outside of template brackets
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and at:
            name = name[:at]
            break
    return name[:_LONGEST_NAME].strip()


def _by_time(uses: Iterable[KernelUse]) -> list[KernelUse]:
    return sorted(uses, key=lambda use: (-use.us, use.name))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
