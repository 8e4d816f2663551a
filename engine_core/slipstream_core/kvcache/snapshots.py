"""Copies of recurrent states at the ends of cached blocks, for prompts with equal beginnings.

- A snapshot is named by the digest of the block that ends where it was taken, so it stands for all
  tokens up to there. It is of use only together with the blocks in front of it.
- Snapshots have memory of their own, and the one that was used least recently goes first.
- What a step saves can be loaded from the next plan on. A plan replaces none that it loads: with
  few of them, those that many requests share would be lost to those that are of no further use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Snapshots:
    """The snapshots 0 to `num` - 1 of a runner's state pool. num_loads: states that steps began
    with. num_evictions: snapshots that were replaced by others.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._free = list(range(num))[::-1]
        self._of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        # by the step that is being planned
        self._saved: dict[bytes, int] = {}
        self._loaded: set[bytes] = set()
        self.num_loads = self.num_evictions = 0

    @property
    def num_used(self) -> int:
        """Snapshots that hold a state."""
        return self.num - len(self._free)

    def find(self, digests: Sequence[bytes]) -> int:
        """The number of a request's first blocks, with these digests, that end in a snapshot; 0:
        none.
        """
        for num in range(len(digests), 0, -1):
            if digests[num - 1] in self._of:
                return num
        return 0

    def load(self, digest: bytes) -> int:
        """Have the planned step load the state of a digest that `find` has found; returns its
        snapshot, which is now the last to go.
        """
        self._of.move_to_end(digest)
        self._loaded.add(digest)
        self.num_loads += 1
        return self._of[digest]

    def take(self) -> int | None:
        """Return a snapshot for another use than the prefix cache's, until `give_back`; None if
        there is no room.
        """
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._of), None)
        if oldest is None or oldest in self._loaded:  # all are of the planned step
            return None
        self.num_evictions += 1
        return self._of.pop(oldest)

    def give_back(self, snapshot: int) -> None:
        """Make room: a snapshot that was taken."""
        self._free.append(snapshot)

    def save(self, digest: bytes) -> int | None:
        """Return the snapshot that the planned step makes of this state; None where there is one
        already, or no room.
        """
        if digest in self._of:
            self._of.move_to_end(digest)
            return None
        if digest in self._saved:
            return None
        snapshot = self.take()
        if snapshot is None:
            return None
        self._saved[digest] = snapshot
        return snapshot

    def name(self, snapshot: int, digest: bytes) -> bool:
        """Let a snapshot that was taken be found by this digest; False where there is one already,
        and this one is free.
        """
        if digest in self._of or digest in self._saved:
            if digest in self._of:
                self._of.move_to_end(digest)
            self._free.append(snapshot)
            return False
        self._of[digest] = snapshot
        return True

    def publish(self) -> None:
        """The step is planned: what it saves can be found by the next one."""
        self._loaded.clear()
        self._of.update(self._saved)
        self._saved.clear()

    def forget(self, snapshots: Iterable[int]) -> None:
        """Drop these: they do not hold what they should. No step is being planned."""
        wrong = set(snapshots)
        for digest in [each for each, snapshot in self._of.items() if snapshot in wrong]:
            self._free.append(self._of.pop(digest))

    def forget_digests(self, digests: Iterable[bytes]) -> None:
        """Drop those that are found by these. No step is being planned."""
        for digest in digests:
            if digest in self._of:
                self._free.append(self._of.pop(digest))

    def reset(self) -> None:
        """Drop all. No step is being planned."""
        self.forget(range(self.num))
