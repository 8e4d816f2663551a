"""Numbers that a benchmark is to reach, each printed as a line: goal, value, met or not."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A bound of a measured value: at least `bound`, or, with is_most, at most."""

    name: str
    value: float
    bound: float
    is_most: bool = False

    def __str__(self) -> str:
        is_met = self.value <= self.bound if self.is_most else self.value >= self.bound
        about, met = "most" if self.is_most else "least", "met" if is_met else "not met"
        return f"{self.name}: {self.value:.2f}, goal at {about} {self.bound:g}: {met}"
