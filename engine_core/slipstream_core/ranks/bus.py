"""Plans from the first rank to others on its machine: a ring of slots in shared memory, with
doorbells.

- A plan is written once, whatever the number of ranks. Each rank has an eventfd that counts the
  plans it has not taken yet, so it sleeps until there is one. Writing to the eventfd and reading
  from it are system calls, which order the memory around them.
- A slot is written again once every rank has released it. Ranks compute steps together, so none can
  fall behind by as many plans as there are slots; waiting for room is a safeguard.
- The memory has no name. It takes pages only where plans were written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from typing import Final

import numpy as np

from slipstream_core.step.buffer import PlanBounds, PlanBuffer
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.arrays import Int64s

NUM_SLOTS = 4  # one step runs, another one waits; two more that slower ranks still read

_PAGE: Final = mmap.PAGESIZE
_LINE: Final = 64  # bytes of one rank's counter
_MAX_READERS = _PAGE // _LINE


class BusStalledError(RuntimeError):
    """A rank has not released its plans in time."""


class PlanBus:
    """The first rank's end."""

    def __init__(self, num_readers: int) -> None:
        assert num_readers <= _MAX_READERS
        self.memory_fd = os.memfd_create("slipstream-plans", os.MFD_CLOEXEC)
        self.room_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
        self.doorbells = tuple(os.eventfd(0, flags) for _ in range(num_readers))
        os.ftruncate(self.memory_fd, _PAGE)
        self._memory = _Memory(self.memory_fd)
        self._num_written = 0

    def wake(self) -> None:
        """Ring without a plan: once, before the first one."""
        self._ring()

    def allocate(self, slot_bytes: int, bounds: PlanBounds | None = None) -> None:
        """Make room for plans of `slot_bytes`, which are within `bounds`; before the first one."""
        self._memory.close()
        size = slot_bytes + -slot_bytes % _PAGE
        os.ftruncate(self.memory_fd, _PAGE + NUM_SLOTS * size)
        self._memory = _Memory(self.memory_fd, bounds)

    def put(self, plan: StepPlan, *, timeout_s: float) -> memoryview:
        """Write a plan and ring. Returns its bytes, which are good until the next call.

        Raises PlanBytesError where it does not fit into a slot, PlanBoundsError where it is not
        within its bounds, and then no rank hears of it; BusStalledError where no slot is released
        within `timeout_s`.
        """
        self._wait_for_room(timeout_s)
        slot = self._memory.slots[self._num_written % NUM_SLOTS]
        size = slot.pack(plan)
        self._num_written += 1
        self._ring()
        return slot.written(size)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        self._memory.close()
        for fd in (self.memory_fd, self.room_fd, *self.doorbells):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.memory_fd, self.room_fd, self.doorbells = -1, -1, ()

    @property
    def _num_free(self) -> int:
        if not self.doorbells:
            return NUM_SLOTS
        released = self._memory.released
        slowest = min(int(released[at]) for at in range(0, len(self.doorbells) * 8, 8))
        return NUM_SLOTS - (self._num_written - slowest)

    def _wait_for_room(self, timeout_s: float) -> None:
        if self._num_free:
            return
        end, room = time.monotonic() + timeout_s, select.poll()
        room.register(self.room_fd, select.POLLIN)
        while not self._num_free:
            left = end - time.monotonic()
            if left <= 0:
                raise BusStalledError(f"a rank has released no plan for {timeout_s:g} s")
            room.poll(left * 1e3)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.room_fd)

    def _ring(self) -> None:
        for doorbell in self.doorbells:
            os.eventfd_write(doorbell, 1)


class PlanReader:
    """The end of another rank."""

    def __init__(self, index: int, memory_fd: int, doorbell: int, room_fd: int) -> None:
        """index: among the readers, from 0."""
        self._at = index * 8
        self._memory_fd = memory_fd
        self._doorbell = doorbell
        self._room_fd = room_fd
        self._memory: _Memory | None = None
        self._num_taken = 0
        self._num_released = 0

    def fileno(self) -> int:
        """Readable while a plan waits to be taken."""
        return self._doorbell

    @property
    def any_waiting(self) -> bool:
        """True if `take`, or `wait`, would return at once."""
        return bool(select.select([self._doorbell], [], [], 0)[0])

    def wait(self) -> None:
        """Wait for the ring without a plan."""
        try:
            os.eventfd_read(self._doorbell)
        except BlockingIOError:
            select.select([self._doorbell], [], [])
            os.eventfd_read(self._doorbell)

    def take(self) -> StepPlan:
        """Wait for the next plan, whose arrays are good until it is released.

        Raises PlanBytesError.
        """
        self.wait()
        if self._memory is None:
            self._memory = _Memory(self._memory_fd)
        slot = self._memory.slots[self._num_taken % NUM_SLOTS]
        self._num_taken += 1
        return slot.view()

    def release(self) -> None:
        """Give back the slot of the oldest plan taken."""
        assert self._memory is not None
        self._num_released += 1
        self._memory.released[self._at] = self._num_released
        with contextlib.suppress(BlockingIOError):  # it is full of wakings, which is one
            os.eventfd_write(self._room_fd, 1)


class _Memory:
    """The mapping: a page of counters of released plans, one to a cache line, then the slots."""

    def __init__(self, fd: int, bounds: PlanBounds | None = None) -> None:
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        whole = memoryview(self._map)
        self.released: Int64s = np.frombuffer(whole, np.int64, _PAGE // 8)
        step = (size - _PAGE) // NUM_SLOTS
        starts = range(_PAGE, size, step) if step else ()
        self.slots = [PlanBuffer(whole[at : at + step], bounds) for at in starts]

    def close(self) -> None:
        """Unmap, once no array refers to it."""
        self.released = np.empty(0, np.int64)
        self.slots = []


def slot_bytes(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int, max_scored: int
) -> int:
    """Bytes in which every usual plan has room; one that has none fails alone.

    max_blocks: of a request's table. max_scored: prompt positions that a step may score.
    """
    tokens = 4 * 8 * max_num_batched_tokens
    rows = max_num_seqs * (32 + 20 * max_blocks)
    scored = 8 * max_scored
    return 2 * (tokens + rows + scored) + _PAGE
