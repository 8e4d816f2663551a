"""Which blocks of the cache are free, and how many requests hold each of the others.

Owns: the blocks' reference counts, and the free blocks in two heaps: those whose content nobody
wants, as a stack, and those that are kept, as a queue, the one that was freed longest ago first.
All of it is numpy arrays, so that giving a thousand requests a block each is a few operations.

Does not know: requests, tables, what a block holds or by which name it is found again (see
`prefix_cache`, which says what is to be kept).

Rules:
- Block 0 is the null block: padding points at it, nobody holds it, it is never handed out.
- A block is written only by who got it from allocate(); share() gives it to others, who read it.
- A kept block that is free is still there to be handed out: allocate() takes what nobody wants
  first, then the oldest of those that are kept, whose content is then forgotten.
- The queue is lazy: a block that is shared while it lies there leaves a dead entry behind, known by
  its stamp. Half of the queue's room is for those.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NULL_BLOCK = 0

_NOT_QUEUED = 0
_WINDOW = 256  # entries of the queue that are looked at together, at least


class BlockPool:
    """Reference counts of all blocks; the unwanted block released last is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, needs at least 2: block 0 is the null")
        self._num_blocks = num_blocks
        # [num_blocks - 1] int32, the first num_stacked are free; low ids are handed out first
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        self._refs = np.zeros(num_blocks, np.int32)
        self._kept = np.zeros(num_blocks, np.bool_)
        # free and kept: entries [head, tail) that are alive have the stamp of their block
        self._queue = np.zeros(2 * num_blocks, np.int32)
        self._queue_stamps = np.zeros(2 * num_blocks, np.int64)
        self._head = self._tail = 0
        self._num_queued = 0  # entries alive
        self._num_taken = 0  # that were alive, and then were not
        self._num_owed = 0  # blocks in use that were not handed out yet
        self._stamps = np.full(num_blocks, _NOT_QUEUED, np.int64)
        self._next_stamp = _NOT_QUEUED + 1
        self._places = np.zeros(num_blocks, np.int64)  # scratch of `_distinct`

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that allocate() could hand out: those that nobody holds."""
        return self._num_stacked + self._num_queued - self._num_owed

    @property
    def num_kept_free(self) -> int:
        """Those of the free blocks whose content is kept."""
        return self._num_queued

    @property
    def num_kept_taken(self) -> int:
        """How often a kept block that was free ceased to be that: shared, handed out, forgotten."""
        return self._num_taken

    def refs(self, ids: Int32s) -> Int32s:
        """How many hold each of `ids`, [n]."""
        return self._refs.take(ids)

    def is_kept(self, block: int) -> bool:
        """Whether the content of `block` is worth something."""
        return bool(self._kept[block])

    def allocate(self, n: int) -> Int32s:
        """`n` blocks for one holder each, [n]. The caller has looked at num_free."""
        self._num_owed = max(self._num_owed - n, 0)
        assert 0 <= n <= self.num_free, f"{n} blocks asked of {self.num_free}"
        start = max(self._num_stacked - n, 0)
        ids = self._stack[start : self._num_stacked][::-1].copy()
        self._num_stacked = start
        if len(ids) < n:
            oldest = self._oldest(n - len(ids))
            self._kept[oldest] = False
            ids = np.concatenate([ids, oldest])
        self._refs[ids] = 1
        return ids

    def upcoming(self, n: int) -> Int32s:
        """The blocks that allocate(n) would hand out, or fewer where there are fewer, [<= n]."""
        ids = self._stack[max(self._num_stacked - n, 0) : self._num_stacked][::-1].copy()
        found, head, missing = [ids], self._head, n - len(ids)
        while missing and head < self._tail:
            end = min(self._tail, head + max(missing, _WINDOW))
            found.append(self._queue[head:end][self._alive(head, end)][:missing])
            missing -= len(found[-1])
            head = end
        return np.concatenate(found) if len(found) > 1 else ids

    def owe(self, n: int) -> None:
        """The next `n` blocks are in use, and free no more. They are to be allocated before any
        other block is taken or freed.
        """
        self._num_owed += n
        assert self.num_free >= 0

    def share(self, ids: Int32s) -> None:
        """One more holder for each of the kept blocks `ids`, [n], all different."""
        assert not self._num_owed
        assert self._kept[ids].all(), f"not kept: {ids[~self._kept[ids]]}"
        self._unqueue(ids[self._stamps[ids] != _NOT_QUEUED])
        self._refs[ids] += 1

    def release(self, ids: Int32s) -> None:
        """One holder less of each of `ids`, [n]; one that n holders had may be there n times.

        Of those that are kept, the first are handed out first.
        """
        assert not self._num_owed
        assert (self._refs[ids] > 0).all(), f"not owned: {ids[self._refs[ids] <= 0]}"
        np.subtract.at(self._refs, ids, 1)
        assert (self._refs[ids] >= 0).all(), f"not owned so often: {ids[self._refs[ids] < 0]}"
        freed = self._distinct(ids[self._refs[ids] == 0])
        kept = self._kept[freed]
        if kept.any():
            self._enqueue(freed[kept])
            freed = freed[~kept]
        self._push(freed)

    def keep(self, ids: Int32s) -> None:
        """The content of these blocks, [n], all of them held, is worth something from here on."""
        assert (self._refs[ids] > 0).all(), f"free, so nobody's to name: {ids[self._refs[ids] < 1]}"
        self._kept[ids] = True

    def forget(self, ids: Int32s) -> None:
        """The content of these blocks, [n], all different, held or free, is worth nothing."""
        assert not self._num_owed
        self._kept[ids] = False
        free = ids[self._stamps[ids] != _NOT_QUEUED]
        self._unqueue(free)
        self._push(free)

    def forget_all(self) -> None:
        """As `forget`, for every block."""
        self.forget(np.flatnonzero(self._kept).astype(np.int32))

    def _push(self, ids: Int32s) -> None:
        """Free blocks that nobody wants."""
        end = self._num_stacked + len(ids)
        self._stack[self._num_stacked : end] = ids
        self._num_stacked = end

    def _enqueue(self, ids: Int32s) -> None:
        """Free blocks that are kept, behind those that are there."""
        end = self._tail + len(ids)
        if end > len(self._queue):
            alive = self._alive(self._head, self._tail)
            live_ids = self._queue[self._head : self._tail][alive]
            live_stamps = self._queue_stamps[self._head : self._tail][alive]
            self._head, self._tail = 0, len(live_ids)
            self._queue[: self._tail] = live_ids
            self._queue_stamps[: self._tail] = live_stamps
            end = self._tail + len(ids)
        stamps = np.arange(self._next_stamp, self._next_stamp + len(ids))
        self._next_stamp += len(ids)
        self._stamps[ids] = stamps
        self._queue[self._tail : end] = ids
        self._queue_stamps[self._tail : end] = stamps
        self._tail = end
        self._num_queued += len(ids)

    def _oldest(self, n: int) -> Int32s:
        """Take the first `n` that are alive from the queue."""
        found: list[Int32s] = []
        missing = n
        while missing:
            end = min(self._tail, self._head + max(missing, _WINDOW))
            at = np.flatnonzero(self._alive(self._head, end))[:missing]
            found.append(self._queue[self._head + at])
            missing -= len(at)
            self._head = end if missing else self._head + int(at[-1]) + 1
        ids = np.concatenate(found)
        self._unqueue(ids)
        return ids

    def _unqueue(self, ids: Int32s) -> None:
        """The entries of these blocks are alive no more."""
        self._stamps[ids] = _NOT_QUEUED
        self._num_queued -= len(ids)
        self._num_taken += len(ids)

    def _alive(self, start: int, stop: int) -> Bools:
        """Which of these entries of the queue are still meant, [stop - start]."""
        alive: Bools = self._queue_stamps[start:stop] == self._stamps[self._queue[start:stop]]
        return alive

    def _distinct(self, ids: Int32s) -> Int32s:
        """`ids` without repetitions, where each was last."""
        order = np.arange(len(ids))
        self._places[ids] = order
        last = self._places[ids] == order
        return ids if last.all() else ids[last]
