"""The place of a process among the ranks that compute one model together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `size` processes with equal shares of the model; the first one is the core."""

    index: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether it schedules and samples; the others compute what it says."""
        return self.index == 0
