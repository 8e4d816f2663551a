"""Memory of a mapped file that is not needed any more.

A mapping lives as long as one tensor in it; pages of others can be given back before. They are
clean, so they are read again from the file if they are needed after all.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)


def release(address: int, num_bytes: int) -> int:
    """Give the whole pages of a range back, if a file is mapped there privately; returns their
    bytes, which are 0 elsewhere and on systems other than Linux.

    What has been written to them is lost.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0 or not _is_mapped_file(first, first + size):
        return 0
    libc = ctypes.CDLL(None)
    failed: int = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONTNEED)
    return 0 if failed else size


def _is_mapped_file(first: int, last: int) -> bool:
    """True if one private mapping of a file covers the addresses [first, last)."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        span, permissions, _, _, inode, *_ = line.split(None, 5)
        start, _, end = span.partition("-")
        if int(start, 16) <= first and last <= int(end, 16):
            return inode != "0" and permissions.endswith("p")
    return False
