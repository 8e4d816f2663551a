"""Copies of recurrent states at the ends of cached blocks, for prompts with equal beginnings.

- A snapshot is named by the digest of the block that ends where it was taken, so it stands for all
  tokens up to there. It is of use only together with the blocks in front of it.
- Snapshots have memory of their own, and the one that was used least recently goes first.
- What a step saves can be loaded from the next plan on. A snapshot that a plan loads may be
  replaced in the same plan: a runner loads before its forward, and saves within it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Snapshots:
    """The snapshots 0 to `num` - 1 of a runner's state pool."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._free = list(range(num))[::-1]
        self._of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._saved: dict[bytes, int] = {}  # by the step that is being planned
        self.version = 0  # it ascends when more can be found
        self.num_saved = 0
        self.num_loaded = 0
        self.num_evicted = 0

    def find(self, digests: Sequence[bytes]) -> int:
        """How many of a request's first blocks, with these digests, end in a snapshot; 0: none."""
        for num in range(len(digests), 0, -1):
            if digests[num - 1] in self._of:
                return num
        return 0

    def load(self, digest: bytes) -> int:
        """Return the snapshot of a digest that `find` has found, which is now the last to go."""
        self._of.move_to_end(digest)
        self.num_loaded += 1
        return self._of[digest]

    def save(self, digest: bytes) -> int | None:
        """Return where the planned step saves this state; None if it need not, or has no room."""
        if digest in self._of:
            self._of.move_to_end(digest)
            return None
        if digest in self._saved:
            return None
        if self._free:
            snapshot = self._free.pop()
        elif self._of:
            _, snapshot = self._of.popitem(last=False)
            self.num_evicted += 1
        else:  # the planned step saves as many as there are
            return None
        self._saved[digest] = snapshot
        self.num_saved += 1
        return snapshot

    def publish(self) -> None:
        """The step is planned: what it saves can be found by the next one."""
        self.version += bool(self._saved)
        self._of.update(self._saved)
        self._saved.clear()

    def forget(self, snapshots: Iterable[int]) -> None:
        """Drop these: they do not hold what they should. No step is being planned."""
        wrong = set(snapshots)
        for digest in [each for each, snapshot in self._of.items() if snapshot in wrong]:
            self._free.append(self._of.pop(digest))

    def reset(self) -> None:
        """Drop all. No step is being planned."""
        self.forget(range(self.num))
