"""Which process is struck when. Pure: the same seed, the same blows.

Owns: the order and the timing of blows. Does not know: processes, whether there is one to be struck
(`fault_injector`).

Rules:
- Blows come in rounds. Between two of them everything recovers, the spares too in most rounds, and
  then some time passes, mostly enough for them to count as steady; the blows of a burst lie within
  a second. is_quick: never that much.
- Every kind of blow that was asked for comes once, and so does every combination of two or more
  deaths within a second, before any comes twice. Other blows than kills are the rarer ones: each
  takes the time until the supervisor notices, or until what was taken is given back.
- Where client, worker and core die at once, what a stream has said is nowhere: it is computed again
  from its beginning. Of a real model that may differ at near ties, so no burst does that there
  (is_exact: of models that compute the same again).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import numpy as np
from msgspec import Struct

Place = Literal["worker", "core", "front", "client", "prompts", "disk"]
Means = Literal["kill", "stop", "limit", "fill"]
KILLED: tuple[Place, ...] = ("worker", "core", "front", "client", "prompts")
LIMITED: tuple[Place, ...] = ("worker", "core", "front")
_COMBINED: tuple[Place, ...] = ("worker", "core", "front", "client")

_BURST_SHARE = 0.35
_BURST_S = 0.9
_AWAITED_SHARE = 0.7
_PAUSE_S = (2.2, 4.5)  # whoever dies sooner than 2 s after his start is replaced with more patience
_SHORT_PAUSE_S = (0.3, 2.0)
_SHORT_SHARE = 0.3
_OTHERS_TO_KILLS = 0.25


class Blow(Struct, frozen=True):
    """A process is struck: by SIGKILL, by SIGSTOP, by a file limit that leaves it no new file; or
    the disk under the stack's folders is filled. The last two are undone after a while.

    place: `prompts` is the worker's prompt process. after_s: from the beginning of its round. pick:
    in [0, 1), which client or front it is, and how long it lasts.
    """

    place: Place
    means: Means
    after_s: float = 0.0
    pick: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.means} {self.place}"


class Blows(Struct, frozen=True):
    """What may be done. kill, stop, limit: where; fill: the disk."""

    kill: tuple[Place, ...] = ()
    stop: tuple[Place, ...] = ()
    limit: tuple[Place, ...] = ()
    fill: bool = False

    @property
    def kinds(self) -> list[tuple[Place, Means]]:
        """One by one."""
        kinds: list[tuple[Place, Means]] = [(place, "kill") for place in self.kill]
        kinds += [(place, "stop") for place in self.stop]
        kinds += [(place, "limit") for place in self.limit]
        return [*kinds, ("disk", "fill")] if self.fill else kinds

    def combinations(self, *, is_exact: bool = True) -> list[tuple[Place, ...]]:
        """All sets of two or more of the processes that may be killed and hold streams."""
        places = [place for place in _COMBINED if place in self.kill]
        sizes = range(2, len(places) + 1)
        found = [each for size in sizes for each in combinations(places, size)]
        return [each for each in found if is_exact or not _leaves_nobody(each)]

    @property
    def num_rounds(self) -> int:
        """How many rounds it takes for each to come."""
        return len(self.kinds) + len(self.combinations())


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
    may: Blows,
    num_rounds: int,
    *,
    is_quick: bool = False,
    is_exact: bool = True,
) -> list[Round]:
    """The rounds of a run; none where nothing is to be struck."""
    random = np.random.default_rng((seed, 2))
    kinds = may.kinds
    if not kinds:
        return []
    weights = np.array([1.0 if means == "kill" else _OTHERS_TO_KILLS for _, means in kinds])
    if not may.kill:
        weights[:] = 1.0
    first: list[tuple[tuple[Place, ...], Means]] = [((place,), means) for place, means in kinds]
    first += [(places, "kill") for places in may.combinations(is_exact=is_exact)]
    order = random.permutation(len(first)).tolist()
    rounds: list[Round] = []
    for number in range(num_rounds):
        if number < len(first):
            blows = _at_once(random, *first[order[number]])
        else:
            place, means = kinds[int(random.choice(len(kinds), p=weights / weights.sum()))]
            blows = _at_once(random, (place,), means)
            if may.kill and random.random() < _BURST_SHARE:
                _add_others(random, blows, may.kill, is_exact=is_exact)
        is_short = is_quick or random.random() < _SHORT_SHARE
        low, high = _SHORT_PAUSE_S if is_short else _PAUSE_S
        pause_s = float(random.uniform(low, high))
        awaits_spares = bool(random.random() < _AWAITED_SHARE)
        rounds.append(
            Round(pause_s, awaits_spares, tuple(sorted(blows, key=lambda blow: blow.after_s)))
        )
    return rounds


def _at_once(random: np.random.Generator, places: Sequence[Place], means: Means) -> list[Blow]:
    """One blow to each place within a second, in any order."""
    blows = [
        Blow(places[at], means, float(random.uniform(0.02, _BURST_S)), float(random.random()))
        for at in random.permutation(len(places)).tolist()
    ]
    return [Blow(blows[0].place, means, 0.0, blows[0].pick), *blows[1:]]


def _add_others(
    random: np.random.Generator, blows: list[Blow], kill: Sequence[Place], *, is_exact: bool
) -> None:
    for _ in range(int(random.integers(1, 3))):
        other = kill[int(random.integers(len(kill)))]
        after_s = float(random.uniform(0.02, _BURST_S))
        blow = Blow(other, "kill", after_s, float(random.random()))
        if is_exact or not _leaves_nobody([each.place for each in [*blows, blow]]):
            blows.append(blow)


def _leaves_nobody(places: Sequence[Place]) -> bool:
    return {"client", "worker", "core"} <= set(places)
