"""Which blocks of the cache are free.

Owns: the free blocks, as a stack in one numpy array, so that giving a thousand requests a block
each is one slice.

Does not know: requests, tables, what a block holds. A shared or remembered block (prefix cache)
is this module's to add: callers only ever allocate and release.

Rules:
- Block 0 is the null block: padding points at it, nobody owns it, it is never handed out.
- A block has one owner from allocate() to release().
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

NULL_BLOCK = 0


class BlockPool:
    """A stack of free block ids; the block released last is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, needs at least 2: block 0 is the null")
        self._num_blocks = num_blocks
        self._num_free = num_blocks - 1
        # [num_blocks - 1] int32, the first num_free entries are free; low ids are handed out first
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._owned = np.zeros(num_blocks, np.bool_)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that allocate() could hand out."""
        return self._num_free

    def allocate(self, n: int) -> Int32s:
        """`n` blocks, [n]. The caller has looked at num_free."""
        assert 0 <= n <= self._num_free, f"{n} blocks asked of {self._num_free}"
        start = self._num_free - n
        ids = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._owned[ids] = True
        return ids

    def release(self, ids: Int32s) -> None:
        """Give blocks back, [n], each of them owned."""
        assert self._owned[ids].all(), f"not owned: {ids[~self._owned[ids]]}"
        self._owned[ids] = False
        end = self._num_free + len(ids)
        self._stack[self._num_free : end] = ids
        self._num_free = end
