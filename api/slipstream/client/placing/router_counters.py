"""A router's own counters: where it sent requests, and why streams left a replica."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from slipstream.client.placing.placement import Reason

PlacedWhy = Reason | Literal["waited"]
MovedWhy = Literal["lost", "core_away", "draining", "overloaded", "leaving", "refused", "other"]
Why = TypeVar("Why", bound=Hashable)

# The counters have to fit into a beat (`slipstream_ipc.process`).
MOST_PAIRS = 10  # of a model and a cause that are counted apart
LONGEST_NAME = 42  # of such a model, bytes in JSON
OTHER_MODELS = ""  # for all other pairs


@dataclass(slots=True)
class RouterCounters:
    """Counters of one session with a fleet.

    placed: streams by model and by why their first replica was chosen; waited: none was there at
    first. moved: streams that went on at another replica, by model and by what became of the one
    before. Pairs beyond the first MOST_PAIRS, and those of long names, are of OTHER_MODELS.
    choose_s: time spent on choosing.
    """

    placed: dict[tuple[str, PlacedWhy], int] = field(default_factory=dict)
    moved: dict[tuple[str, MovedWhy], int] = field(default_factory=dict)
    choose_s: float = 0.0

    def note_placed(self, model: str, why: PlacedWhy) -> None:
        """A stream began at a replica of this model."""
        self._note(self.placed, model, why)

    def note_moved(self, model: str, why: MovedWhy) -> None:
        """A stream goes on at another replica, or at the same one again."""
        self._note(self.moved, model, why)

    def _note(self, counts: dict[tuple[str, Why], int], model: str, why: Why) -> None:
        if (model, why) not in counts and not self._is_room_for(model):
            model = OTHER_MODELS
        counts[model, why] = counts.get((model, why), 0) + 1

    def _is_room_for(self, model: str) -> bool:
        pairs = [pair for pair in (*self.placed, *self.moved) if pair[0] != OTHER_MODELS]
        return len(pairs) < MOST_PAIRS and len(msgspec.json.encode(model)) - 2 <= LONGEST_NAME
