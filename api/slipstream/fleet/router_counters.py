"""What a router counts of its own: where it sent requests, and why streams left a replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.fleet.placement import Reason

PlacedWhy = Reason | Literal["waited"]
MovedWhy = Literal["lost", "core_away", "draining", "overloaded", "leaving", "refused", "other"]


@dataclass(slots=True)
class RouterCounters:
    """Counters of one session with a fleet.

    placed: streams by why their first replica was chosen; waited: none was there at first. moved:
    streams that went on at another replica, by what became of the one before. choose_s: time spent
    on choosing.
    """

    placed: dict[PlacedWhy, int] = field(default_factory=dict)
    moved: dict[MovedWhy, int] = field(default_factory=dict)
    choose_s: float = 0.0

    def note_placed(self, why: PlacedWhy) -> None:
        """A stream began at a replica."""
        self.placed[why] = self.placed.get(why, 0) + 1

    def note_moved(self, why: MovedWhy) -> None:
        """A stream goes on at another replica, or at the same one again."""
        self.moved[why] = self.moved.get(why, 0) + 1
