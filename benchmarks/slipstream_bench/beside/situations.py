"""The situations in which an engine computes: beside spinning processes, or within a CPU quota. The
spinners and the cgroup end with the block.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextmanager
def spinners(num: int) -> Iterator[list[int]]:
    """Start `num` processes that only spin; yields their pids."""
    with ExitStack() as stack:
        processes = []
        for _ in range(num):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process.pid)
        yield processes


@contextmanager
def quota(cpus: float, root: Path = _CGROUPS) -> Iterator[None]:
    """Limit this process and its children to the time of `cpus` CPUs.

    Children started within must have ended before the block does. Raises OSError if the cgroup
    cannot be made.
    """
    parent, is_second = _own_cgroup(root)
    folder = parent / f"slipstream-bench-{os.getpid()}"
    folder.mkdir()
    try:
        limit_us = int(cpus * _PERIOD_US)
        if is_second:
            (folder / "cpu.max").write_text(f"{limit_us} {_PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(limit_us))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (parent / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        folder.rmdir()


def _own_cgroup(root: Path) -> tuple[Path, bool]:
    """The folder of this process's CPU cgroup, and whether it is of version 2."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "cpu" in controllers.split(","):
            return root / controllers / path.lstrip("/"), False
    for _, controllers, path in lines:
        if not controllers:
            return root / path.lstrip("/"), True
    raise OSError("this process is in no cgroup")
