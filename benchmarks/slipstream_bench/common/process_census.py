"""Which processes belong to a run, and what they hold, from Linux's /proc.

Owns: a mark in the environment that every process of a run inherits, and reading memory and file
descriptors. Does not know: what the processes do.

The mark finds processes that nobody is the parent of any more: what a run leaves behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

MARK_VARIABLE = "SLIPSTREAM_RUN_MARK"
_PROC = Path("/proc")


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
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found: dict[int, str] = {}
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            found[int(folder.name)] = command.strip()
    found.pop(os.getpid(), None)
    return found


def descendants(pid: int) -> set[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree = [pid]
    for one in tree:
        tree += children.get(one, ())
    return set(tree)


def commands(pids: Iterable[int]) -> dict[int, str]:
    """The command lines of those that live."""
    found: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            command = (_PROC / str(pid) / "cmdline").read_bytes()
            found[pid] = command.replace(b"\0", b" ").decode().strip()
    return found


def strays(mark: str) -> dict[int, str]:
    """Marked processes that do not descend from this one any more: nobody would end them."""
    ours = descendants(os.getpid())
    return {pid: command for pid, command in marked_pids(mark).items() if pid not in ours}


def holding(pid: int) -> Holding | None:
    """What it holds; None where it has ended."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
        num_fds = sum(1 for _ in (_PROC / str(pid) / "fd").iterdir())
    except OSError:
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
        name = names.get(pid)
        if name is None:
            name = f"{names.get(_parent_of(pid), 'unknown')}: {_module_of(pid)}"
        while name in found:
            name += "'"
        found[name] = pid
    return found


def _parent_of(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _module_of(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return "ended"
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    return " ".join(words[:3]).strip() or "unnamed"
