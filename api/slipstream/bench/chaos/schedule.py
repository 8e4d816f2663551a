"""Which process is struck when. Pure: the same seed, the same blows.

Owns: the order and the timing of kills and stops. Does not know: processes, whether anybody is
there to be struck (`conductor`).

Rules:
- Blows come in rounds. Between two of them everything recovers, the spares too in most rounds, and
  then some time passes, mostly enough for them to count as steady; the blows of a burst lie within
  a second. is_quick: never that much.
- Every kind of blow that was asked for comes once before any comes twice. Stops are the rarer ones:
  each takes the time until the supervisor notices.
- Where client, worker and core all die at once, nobody is left who has what a stream has said: no
  burst does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

Place = Literal["worker", "core", "front", "client"]
Means = Literal["kill", "stop"]
PLACES: tuple[Place, ...] = get_args(Place)

_BURST_SHARE = 0.35
_BURST_S = 0.9
_AWAITED_SHARE = 0.7
_PAUSE_S = (2.2, 4.5)  # whoever dies sooner than 2 s after his start is replaced with more patience
_SHORT_PAUSE_S = (0.3, 2.0)
_SHORT_SHARE = 0.3
_STOPS_TO_KILLS = 0.25


class Blow(Struct, frozen=True):
    """One process is struck: by SIGKILL, or by SIGSTOP.

    after_s: from the beginning of its round. pick: in [0, 1), which client or front it is.
    """

    place: Place
    means: Means
    after_s: float = 0.0
    pick: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.means} {self.place}"


class Round(Struct, frozen=True):
    """Blows that come together, when everything has recovered and `pause_s` have passed.

    awaits_spares: they wait again by then.
    """

    pause_s: float
    awaits_spares: bool
    blows: tuple[Blow, ...]

    @property
    def is_burst(self) -> bool:
        """Whether there are several."""
        return len(self.blows) > 1


def make_schedule(
    seed: int,
    kill: Sequence[Place],
    stop: Sequence[Place],
    num_rounds: int,
    *,
    is_quick: bool = False,
) -> list[Round]:
    """The rounds of a run; none where nothing is to be struck."""
    random = np.random.default_rng((seed, 2))
    kinds: list[tuple[Place, Means]] = [(place, "kill") for place in kill]
    kinds += [(place, "stop") for place in stop]
    if not kinds:
        return []
    weights = np.array([1.0 if means == "kill" else _STOPS_TO_KILLS for _, means in kinds])
    if not kill:
        weights[:] = 1.0
    first = [kinds[at] for at in random.permutation(len(kinds))]
    rounds: list[Round] = []
    for number in range(num_rounds):
        place, means = (
            first[number]
            if number < len(first)
            else kinds[int(random.choice(len(kinds), p=weights / weights.sum()))]
        )
        blows = [Blow(place, means, 0.0, float(random.random()))]
        if kill and random.random() < _BURST_SHARE:
            for _ in range(int(random.integers(1, 3))):
                other = kill[int(random.integers(len(kill)))]
                after_s = float(random.uniform(0.02, _BURST_S))
                blow = Blow(other, "kill", after_s, float(random.random()))
                if not _leaves_nobody([*blows, blow]):
                    blows.append(blow)
        is_short = is_quick or random.random() < _SHORT_SHARE
        low, high = _SHORT_PAUSE_S if is_short else _PAUSE_S
        pause_s = float(random.uniform(low, high))
        awaits_spares = bool(random.random() < _AWAITED_SHARE)
        rounds.append(
            Round(pause_s, awaits_spares, tuple(sorted(blows, key=lambda blow: blow.after_s)))
        )
    return rounds


def _leaves_nobody(blows: Sequence[Blow]) -> bool:
    return {"client", "worker", "core"} <= {blow.place for blow in blows}
