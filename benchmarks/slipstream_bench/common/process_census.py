"""Finds the processes of a run and measures what they hold.

A mark in the environment is inherited by every process of a run, so it also finds processes that a
run leaves behind after their parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from msgspec import Struct

MARK_VARIABLE = "SLIPSTREAM_RUN_MARK"


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


def marked_pids(mark: str) -> dict[int, str]:
    """Living processes that carry the mark, with their command lines."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(MARK_VARIABLE) == mark:
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
