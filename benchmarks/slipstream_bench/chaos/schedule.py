"""Draws which process is hit by which fault, and when. Pure: the same seed gives the same schedule.

- Faults come in rounds. Between two rounds everything recovers, in most rounds the spares too, and
  then some time passes, mostly enough for the processes to count as steady; the faults of a burst
  lie within a second. is_quick: never that much time.
- Every requested kind of fault occurs once, and so does every combination of two or more deaths
  within a second, before any repeats. Faults other than kills are rarer: each takes until the
  supervisor notices, or until it is undone.
- If client, worker and core die at once, a stream's output exists nowhere and is computed again
  from its beginning. A real model's output may then differ at near ties, so bursts do not combine
  the three there (is_exact: the model reproduces its output exactly).
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
_PAUSE_S = (2.2, 4.5)  # restarts back off if a process dies within 2 s of being ready
_SHORT_PAUSE_S = (0.3, 2.0)
_SHORT_SHARE = 0.3
_OTHERS_TO_KILLS = 0.25


class Blow(Struct, frozen=True):
    """A fault: SIGKILL, SIGSTOP, a file limit that leaves the process no new file, or a full disk
    under the stack's folders. The last two are undone after a while.

    place: `prompts` is the worker's prompt process. after_s: since the beginning of its round.
    pick: in [0, 1), selects the client or front, and the duration.
    """

    place: Place
    means: Means
    after_s: float = 0.0
    pick: float = 0.0

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.means} {self.place}"


class Blows(Struct, frozen=True):
    """The allowed faults. kill, stop, limit: the places; fill: the disk."""

    kill: tuple[Place, ...] = ()
    stop: tuple[Place, ...] = ()
    limit: tuple[Place, ...] = ()
    fill: bool = False

    @property
    def kinds(self) -> list[tuple[Place, Means]]:
        """Every allowed (place, means) pair."""
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
        """The number of rounds that it takes for each kind to occur."""
        return len(self.kinds) + len(self.combinations())


class Round(Struct, frozen=True):
    """Faults that come together, once everything has recovered and `pause_s` have passed.

    awaits_spares: the spares must be ready again as well.
    """

    pause_s: float
    awaits_spares: bool
    blows: tuple[Blow, ...]

    @property
    def is_burst(self) -> bool:
        """Whether the round has several faults."""
        return len(self.blows) > 1


def make_schedule(
    seed: int,
    may: Blows,
    num_rounds: int,
    *,
    is_quick: bool = False,
    is_exact: bool = True,
) -> list[Round]:
    """The rounds of a run; empty if no fault is allowed."""
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
    """One fault per place within a second, in random order."""
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
