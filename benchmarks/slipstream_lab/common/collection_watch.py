"""Measures the garbage collector while a block of code runs: collections, their pauses by
generation, and the net allocations that cause them. Thresholds stay at Python's defaults; the
collector is only observed.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Literal

_NUM_GENERATIONS = 3


class CollectionWatch:
    """A context manager that counts collections inside its block; results are valid on exit."""

    def __init__(self) -> None:
        self.num_collections = [0] * _NUM_GENERATIONS
        self.pause_ns = [0] * _NUM_GENERATIONS  # total per generation, CPU time of this thread
        self.longest_pause_ns = 0
        self.num_tracked_net = 0  # containers allocated minus freed
        self.num_blocks_net = 0  # memory blocks allocated minus freed
        self._total = 0  # collections of any generation
        self._threshold = gc.get_threshold()[0]
        self._started_ns = 0

    def __enter__(self) -> CollectionWatch:
        gc.callbacks.append(self._on_collection)
        self._blocks = sys.getallocatedblocks()
        self._count = gc.get_count()[0]
        return self

    def __exit__(self, *_error: object) -> None:
        self.num_tracked_net = self.tracked_so_far() - self._count
        self.num_blocks_net = sys.getallocatedblocks() - self._blocks
        gc.callbacks.remove(self._on_collection)

    def tracked_so_far(self) -> int:
        """Containers allocated minus freed; only differences are meaningful.

        A collection starts once the count exceeds the first threshold, and resets the count.
        """
        return gc.get_count()[0] + self._total * (self._threshold + 1)

    def _on_collection(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        now = time.thread_time_ns()
        if phase == "start":
            self._started_ns = now
            return
        generation, pause_ns = info["generation"], now - self._started_ns
        self.num_collections[generation] += 1
        self._total += 1
        self.pause_ns[generation] += pause_ns
        self.longest_pause_ns = max(self.longest_pause_ns, pause_ns)
