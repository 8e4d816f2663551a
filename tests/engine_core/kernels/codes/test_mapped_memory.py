"""Pages of a mapped file that are given back."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream_core.kernels.codes import mapped_memory

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def _resident(path: Path) -> int:
    """Bytes of a file's mappings that are in memory."""
    lines, found, is_ours = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in lines:
        name, _, rest = line.partition(":")
        if "-" in line.split()[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and name == "Rss":
            found += int(rest.split()[0]) << 10
    return found


def test_whole_pages_are_given_back_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(np.arange(40 * PAGE // 8).tobytes())
    mapped = np.memmap(path, np.int64, "c")
    total = int(mapped.sum())
    before = _resident(path)
    assert before >= 40 * PAGE
    part = mapped[PAGE // 16 : 30 * PAGE // 8]  # from the middle of a page on
    assert mapped_memory.release(part.ctypes.data, part.nbytes) == 29 * PAGE
    assert _resident(path) == before - 29 * PAGE
    assert int(mapped.sum()) == total


def test_memory_that_is_no_file_s_stays() -> None:
    own = np.arange(10 * PAGE)
    assert mapped_memory.release(own.ctypes.data, own.nbytes) == 0
    assert own[-1] == 10 * PAGE - 1
    assert mapped_memory.release(own.ctypes.data, 100) == 0
