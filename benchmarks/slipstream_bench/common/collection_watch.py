"""What the garbage collector does while something runs.

Owns: collections and their pauses by generation, and the allocations that bring them about. Does
not know: what runs. The collector is watched, never changed: its thresholds are Python's own.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Literal

_NUM_GENERATIONS = 3


class CollectionWatch:
    """Watches from entering until leaving; the numbers are there afterwards."""

    def __init__(self) -> None:
        self.num_collections = [0] * _NUM_GENERATIONS
        self.pause_ns = [0] * _NUM_GENERATIONS  # all of them, in this thread's CPU time
        self.longest_pause_ns = 0
        self.num_tracked_net = 0  # containers made, less those freed, as the collector counts
        self.num_blocks_net = 0  # memory blocks, likewise
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
        """Containers made less those freed; only differences mean something.

        A collection of any generation begins when one more than the first threshold has been
        counted, and the count begins anew.
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
