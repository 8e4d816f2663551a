"""The processes of a run: which there are, what each one holds, and the CPU time it uses.

- A mark in the environment is inherited by every process of a run, so it also finds processes that
  a run leaves behind after their parent is gone.
- The CPU time of a tree includes ended children that have been waited for, in ticks of mostly
  10 ms. That of a single process is the scheduler's count for its living threads, in nanoseconds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
from msgspec import Struct

from slipstream.errors import BadRequestError, wrong_option

MARK_VARIABLE = "SLIPSTREAM_RUN_MARK"
_PROC = Path("/proc")
_SAMPLE_S = 0.05
_OPEN_FILES = 65536


class Holding(Struct, frozen=True):
    """What a process holds: resident memory, open file descriptors, and anonymous memory.

    own_bytes: anonymous memory, resident or swapped out. Resident memory also counts pages of
    files, which vary with other load on the machine, and omits swapped pages.
    """

    rss_bytes: int
    num_fds: int
    own_bytes: int


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """Yield a mark carried by every process started inside, directly or by a descendant."""
    mark = secrets.token_hex(16)
    before = os.environ.get(MARK_VARIABLE)
    os.environ[MARK_VARIABLE] = mark
    try:
        yield mark
    finally:
        if before is None:
            del os.environ[MARK_VARIABLE]
        else:
            os.environ[MARK_VARIABLE] = before


def marked_pids(mark: str, variable: str = MARK_VARIABLE) -> dict[int, str]:
    """Living processes that carry the mark in their environment, with their command lines."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(variable) == mark:
                found[process.pid] = " ".join(process.cmdline())
    found.pop(os.getpid(), None)
    return found


def descendants(pid: int) -> set[int]:
    """The process and all of its descendants."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}


def commands(pids: Iterable[int]) -> dict[int, str]:
    """The command lines of those that are alive."""
    found: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found[pid] = " ".join(psutil.Process(pid).cmdline())
    return found


def strays(mark: str) -> dict[int, str]:
    """Marked processes that no longer descend from this one, which nothing would end."""
    ours = descendants(os.getpid())
    return {pid: command for pid, command in marked_pids(mark).items() if pid not in ours}


def holding(pid: int) -> Holding | None:
    """What the process holds; None if it has ended."""
    try:
        status = Path("/proc", str(pid), "status").read_text()  # psutil omits anonymous memory
        num_fds = psutil.Process(pid).num_fds()
    except (OSError, psutil.Error):
        return None
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in ("VmRSS", "RssAnon", "VmSwap")
    }
    if "VmRSS" not in kib:
        return None  # a zombie
    return Holding(1024 * kib["VmRSS"], num_fds, 1024 * (kib["RssAnon"] + kib["VmSwap"]))


def holdings(pids: dict[str, int]) -> dict[str, Holding]:
    """The same for several processes, by name; those that have ended are missing."""
    return {name: held for name, pid in pids.items() if (held := holding(pid)) is not None}


def tree_pids(root: int, names: dict[int, str]) -> dict[str, int]:
    """`root` and every process below it, by name; a process missing from `names` is named after its
    parent and its command.
    """
    found: dict[str, int] = {}
    for pid in sorted(descendants(root)):
        name = names.get(pid) or _name_of(pid, names)
        while name in found:
            name += "'"
        found[name] = pid
    return found


def _name_of(pid: int, names: dict[int, str]) -> str:
    try:
        process = psutil.Process(pid)
        words, parent = process.cmdline(), process.ppid()
    except psutil.Error:
        return "unknown: ended"
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1].partition(".")[2]
    else:
        module = " ".join(words[:3]).strip() or "unnamed"
    return f"{names.get(parent, 'unknown')}: {module}"


def tree_cpu_s(pid: int) -> float:
    """User and system time of the process tree so far, in seconds.

    Raises: BadRequestError if there is no such process.
    """
    try:
        root = psutil.Process(pid)
        used_s = sum(root.cpu_times()[:4])  # user and system, with those of waited-for children
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                used_s += sum(child.cpu_times()[:4])
    except psutil.Error:
        raise _no_process(pid) from None
    return float(used_s)


def process_cpu_s(pid: int) -> float:
    """User and system time of the living threads of this process alone, in seconds.

    Raises: BadRequestError if there is no such process, or no /proc.
    """
    total_ns = 0
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            try:
                total_ns += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
    except OSError:
        raise _no_process(pid) from None
    return total_ns / 1e9


def _no_process(pid: int) -> BadRequestError:
    return wrong_option("pid", pid, "the id of a process that runs here (Linux only)")


class CpuSamples:
    """A context manager that samples the CPU time of each of `pids`, by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._times: list[float] = []
        self._used: dict[str, list[float]] = {name: [] for name in pids}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-samples", daemon=True)

    def __enter__(self) -> CpuSamples:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Seconds of CPU time that each process used between the two times."""
        return {
            name: float(np.diff(np.interp([begin_s, end_s], self._times, used))[0])
            for name, used in self._used.items()
        }

    def _run(self) -> None:
        is_over = False
        while not is_over:  # one more sample after the end
            is_over = self._is_over.wait(_SAMPLE_S)
            self._times.append(time.perf_counter())
            for name, pid in self._pids.items():
                self._used[name].append(process_cpu_s(pid))


def allow_many_files() -> None:
    """Raise this process's limit to the system's maximum, at most 65536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
