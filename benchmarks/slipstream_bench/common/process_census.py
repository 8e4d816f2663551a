"""Which processes belong to a run, and what they hold.

A mark in the environment is inherited by every process of a run. It finds those whose parent is
gone: what a run leaves behind.
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
    """What a process holds: resident memory, open file descriptors, and memory of its own.

    own_bytes: anonymous memory, resident or swapped out. Resident memory besides counts pages of
    files, which come and go with what else the machine does, and leaves out what was swapped.
    """

    rss_bytes: int
    num_fds: int
    own_bytes: int


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """Processes started inside, by this process or by those it started, carry the mark given."""
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
    """Living processes that carry the mark, and their command lines."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is another user's
            if process.environ().get(MARK_VARIABLE) == mark:
                found[process.pid] = " ".join(process.cmdline())
    found.pop(os.getpid(), None)
    return found


def descendants(pid: int) -> set[int]:
    """The process and all that descend from it."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.Error:
        return {pid}


def commands(pids: Iterable[int]) -> dict[int, str]:
    """The command lines of those that live."""
    found: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found[pid] = " ".join(psutil.Process(pid).cmdline())
    return found


def strays(mark: str) -> dict[int, str]:
    """Marked processes that do not descend from this one any more: nobody would end them."""
    ours = descendants(os.getpid())
    return {pid: command for pid, command in marked_pids(mark).items() if pid not in ours}


def holding(pid: int) -> Holding | None:
    """What it holds; None where it has ended."""
    try:
        status = Path("/proc", str(pid), "status").read_text()  # psutil tells no anonymous memory
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
    """Of several, by name; those that have ended are missing."""
    return {name: held for name, pid in pids.items() if (held := holding(pid)) is not None}


def tree_pids(root: int, names: dict[int, str]) -> dict[str, int]:
    """`root` and every process below it, by name; one that is not named in `names` is called after
    its parent and what it runs.
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
