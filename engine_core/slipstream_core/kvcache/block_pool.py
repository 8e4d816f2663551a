"""Reference counts and free lists of the KV cache's blocks.

Free blocks without useful content are a stack; free blocks with cached content ("kept") are a
queue, released first to last. All state is in numpy arrays, so that giving a thousand requests a
block each takes a few operations.

- Block 0 is the null block: padding points at it, and it is never allocated.
- Only the request that got a block from allocate() writes it; share() adds readers.
- A free kept block can still be allocated: allocate() takes blocks without content first, then the
  oldest kept ones, whose content is lost.
- The queue is lazy: sharing a block that is in it leaves a dead entry behind, recognized by its
  stamp. Half of the queue's room is for those.
"""

from __future__ import annotations

import numpy as np

from slipstream_ipc.arrays import Bools, Int32s

NULL_BLOCK = 0

_NOT_QUEUED = 0
_WINDOW = 256  # entries of the queue that are scanned together, at least


class BlockPool:
    """Reference counts and free lists of all blocks."""

    def __init__(self, num_blocks: int, *, has_draft_model: bool = False) -> None:
        """has_draft_model: there is one, with a cache of its own in the same blocks.

        Raises ValueError for fewer than 2 blocks, of which one is the null block.
        """
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}, allowed: 2 or more (one is the null block)"
            )
        self._num_blocks = num_blocks
        # [num_blocks - 1] int32, the first num_stacked are free; low ids are allocated first
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        self._refs = np.zeros(num_blocks, np.int32)
        self._kept = np.zeros(num_blocks, np.bool_)
        # free and kept: entries in [head, tail) are alive if their stamp is that of their block
        self._queue = np.zeros(2 * num_blocks, np.int32)
        self._queue_stamps = np.zeros(2 * num_blocks, np.int64)
        self._head = self._tail = 0
        self._num_queued = 0  # live entries
        self._num_taken = 0  # live entries that were taken out, in all
        self._num_reserved = 0  # blocks in use that are not allocated yet
        self._stamps = np.full(num_blocks, _NOT_QUEUED, np.int64)
        self._next_stamp = _NOT_QUEUED + 1
        self._last_evicted = _NOT_QUEUED  # the stamp of the kept block that was allocated last
        self._last_index = np.zeros(num_blocks, np.int64)  # scratch of `_distinct`
        # where a draft model has filled the block as well; None: there is none
        self._drafted = np.zeros(num_blocks, np.bool_) if has_draft_model else None

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, including the null block."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that allocate() could return: those without a holder."""
        return self._num_stacked + self._num_queued - self._num_reserved

    @property
    def next_stamp(self) -> int:
        """The stamp of the kept block that becomes free next; stamps ascend."""
        return self._next_stamp

    @property
    def last_evicted(self) -> int | None:
        """The stamp of the kept block whose content was lost last to an allocation; None where none
        was.
        """
        return None if self._last_evicted == _NOT_QUEUED else self._last_evicted

    @property
    def num_kept_taken(self) -> int:
        """The number of times that a free kept block was shared, allocated or forgotten."""
        return self._num_taken

    def refs(self, ids: Int32s) -> Int32s:
        """The number of holders of each of `ids`, [n]."""
        return self._refs.take(ids)

    def is_kept(self, block: int) -> bool:
        """True if the content of `block` is cached."""
        return bool(self._kept[block])

    def allocate(self, n: int) -> Int32s:
        """Allocate `n` blocks, [n], with one holder each. The caller has checked num_free."""
        self._num_reserved = max(self._num_reserved - n, 0)
        assert 0 <= n <= self.num_free, f"{n} blocks requested, {self.num_free} free"
        start = max(self._num_stacked - n, 0)
        ids = self._stack[start : self._num_stacked][::-1].copy()
        self._num_stacked = start
        if len(ids) < n:
            oldest = self._oldest(n - len(ids))
            self._kept[oldest] = False
            ids = np.concatenate([ids, oldest])
        self._refs[ids] = 1
        if self._drafted is not None:
            self._drafted[ids] = False
        return ids

    def set_drafted(self, ids: Int32s) -> None:
        """The draft model has filled these blocks, [n], too, with the tokens that they are for."""
        assert self._drafted is not None
        self._drafted[ids] = True

    def num_drafted(self, ids: Int32s) -> int:
        """The number of these blocks, [n], that the draft model has filled, up to one that it has
        not.
        """
        if self._drafted is None or not len(ids):
            return 0
        lacking = ~self._drafted[ids]
        return int(np.argmax(lacking)) if lacking.any() else len(ids)

    def upcoming(self, n: int) -> Int32s:
        """The blocks that allocate(n) would return, or as many as are free, [<= n]."""
        ids = self._stack[max(self._num_stacked - n, 0) : self._num_stacked][::-1].copy()
        found, head, missing = [ids], self._head, n - len(ids)
        while missing and head < self._tail:
            end = min(self._tail, head + max(missing, _WINDOW))
            found.append(self._queue[head:end][self._alive(head, end)][:missing])
            missing -= len(found[-1])
            head = end
        return np.concatenate(found) if len(found) > 1 else ids

    def reserve(self, n: int) -> None:
        """Count the next `n` blocks as in use. They have to be allocated before any other block is
        taken or freed.
        """
        self._num_reserved += n
        assert self.num_free >= 0

    def share(self, ids: Int32s) -> None:
        """Add a holder to each of the kept blocks `ids`, [n], all different."""
        assert not self._num_reserved
        assert self._kept[ids].all(), f"not kept: {ids[~self._kept[ids]]}"
        self._unqueue(ids[self._stamps[ids] != _NOT_QUEUED])
        self._refs[ids] += 1

    def release(self, ids: Int32s) -> None:
        """Remove a holder from each of `ids`, [n]; a block may occur once per holder.

        Of the kept ones that become free, the first are allocated first.
        """
        assert not self._num_reserved
        assert (self._refs[ids] > 0).all(), f"not owned: {ids[self._refs[ids] <= 0]}"
        np.subtract.at(self._refs, ids, 1)
        assert (self._refs[ids] >= 0).all(), (
            f"released more often than held: {ids[self._refs[ids] < 0]}"
        )
        freed = self._distinct(ids[self._refs[ids] == 0])
        kept = self._kept[freed]
        if kept.any():
            self._enqueue(freed[kept])
            freed = freed[~kept]
        self._push(freed)

    def keep(self, ids: Int32s) -> None:
        """Keep the content of these blocks, [n], all of which are held."""
        assert (self._refs[ids] > 0).all(), (
            f"free blocks cannot be kept: {ids[self._refs[ids] < 1]}"
        )
        self._kept[ids] = True

    def forget(self, ids: Int32s) -> None:
        """Drop the content of these blocks, [n], all different, held or free."""
        assert not self._num_reserved
        self._kept[ids] = False
        free = ids[self._stamps[ids] != _NOT_QUEUED]
        self._unqueue(free)
        self._push(free)

    def forget_all(self) -> None:
        """Drop the content of every block."""
        self.forget(np.flatnonzero(self._kept).astype(np.int32))

    def _push(self, ids: Int32s) -> None:
        """Add free blocks without content to the stack."""
        end = self._num_stacked + len(ids)
        self._stack[self._num_stacked : end] = ids
        self._num_stacked = end

    def _enqueue(self, ids: Int32s) -> None:
        """Append free kept blocks to the queue."""
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
        """Take the first `n` live entries from the queue."""
        found: list[Int32s] = []
        missing = n
        while missing:
            end = min(self._tail, self._head + max(missing, _WINDOW))
            at = np.flatnonzero(self._alive(self._head, end))[:missing]
            found.append(self._queue[self._head + at])
            missing -= len(at)
            self._head = end if missing else self._head + int(at[-1]) + 1
        ids = np.concatenate(found)
        self._last_evicted = int(self._stamps[ids[-1]])
        self._unqueue(ids)
        return ids

    def _unqueue(self, ids: Int32s) -> None:
        """Mark the entries of these blocks as dead."""
        self._stamps[ids] = _NOT_QUEUED
        self._num_queued -= len(ids)
        self._num_taken += len(ids)

    def _alive(self, start: int, stop: int) -> Bools:
        """True for the entries of the queue that are live, bool [stop - start]."""
        alive: Bools = self._queue_stamps[start:stop] == self._stamps[self._queue[start:stop]]
        return alive

    def _distinct(self, ids: Int32s) -> Int32s:
        """`ids` without repetitions, each at its last position."""
        order = np.arange(len(ids))
        self._last_index[ids] = order
        last = self._last_index[ids] == order
        return ids if last.all() else ids[last]
