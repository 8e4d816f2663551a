"""The place of a process among the ranks that compute one model together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `size` processes with equal shares of the model; the first one is the core.

    num_nodes: machines that they are on, each with equally many neighbouring ones.
    """

    index: int
    size: int
    num_nodes: int = 1

    @property
    def leads(self) -> bool:
        """True if this rank schedules and samples; the others compute the plans that it sends."""
        return self.index == 0

    @property
    def num_local(self) -> int:
        """The ranks of each machine."""
        return self.size // self.num_nodes

    @property
    def local_index(self) -> int:
        """Its place among the ranks of its machine."""
        return self.index % self.num_local
