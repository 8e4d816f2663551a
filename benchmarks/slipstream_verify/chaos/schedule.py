"""Draws which process is hit by which fault, and when. Pure: the same seed gives the same schedule.

- Faults come in rounds. Between two rounds everything recovers, in most rounds the spares too, and
  then some time passes, mostly enough for the processes to count as steady; the faults of a burst
  lie within a second. is_quick: never that much time.
- Every requested kind of fault occurs once, and so does every combination of two or more deaths
  within a second, before any repeats. Faults other than kills are rarer: each takes until the
  supervisor notices, or until it is undone.
- A whole replica dies together with one other process at a time, or alone.
- If client, worker and core die at once, a stream's output exists nowhere and is computed again
  from its beginning. A real model's output may then differ at near ties, so bursts do not combine
  the three there (is_exact: the model reproduces its output exactly). So it is with a client and a
  replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

import numpy as np
from msgspec import Struct

Target = Literal["worker", "core", "front", "client", "prompts", "rank", "replica", "disk"]
Action = Literal["kill", "stop", "limit", "fill", "drain"]
KILLED: tuple[Target, ...] = ("worker", "core", "front", "client", "prompts", "rank", "replica")
LIMITED: tuple[Target, ...] = ("worker", "core", "front")
_COMBINED: tuple[Target, ...] = ("worker", "core", "front", "client")

_BURST_SHARE = 0.35
_BURST_S = 0.9
_AWAITED_SHARE = 0.7
_PAUSE_S = (2.2, 4.5)  # restarts back off if a process dies within 2 s of being ready
_SHORT_PAUSE_S = (0.3, 2.0)
_SHORT_SHARE = 0.3
_OTHERS_TO_KILLS = 0.25


class PlannedFault(Struct, frozen=True):
    """A fault: SIGKILL, SIGSTOP, a file limit that leaves the process no new file, a full disk
    under the stack's folders, or a replica's drain. A file limit, a full disk and the stop of a
    replica, all of whose processes are stopped, are undone after a while.

    target: `prompts` is the worker's tokenizer process, `rank` one of the core's. after_s: since
    the beginning of its round. pick: in [0, 1), selects the client, front or replica, and the
    duration.
    """

    target: Target
    action: Action
    after_s: float = 0.0
    pick: float = 0.0

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.action} {self.target}"


class FaultKinds(Struct, frozen=True):
    """The allowed faults. kill, stop, limit: the targets; fill: the disk; drain: a replica."""

    kill: tuple[Target, ...] = ()
    stop: tuple[Target, ...] = ()
    limit: tuple[Target, ...] = ()
    fill: bool = False
    drain: bool = False

    @property
    def kinds(self) -> list[tuple[Target, Action]]:
        """Every allowed (target, action) pair."""
        kinds: list[tuple[Target, Action]] = [(target, "kill") for target in self.kill]
        kinds += [(target, "stop") for target in self.stop]
        kinds += [(target, "limit") for target in self.limit]
        kinds += [("disk", "fill")] if self.fill else []
        return [*kinds, ("replica", "drain")] if self.drain else kinds

    def combinations(self, *, is_exact: bool = True) -> list[tuple[Target, ...]]:
        """All sets of two or more of the processes that may be killed and hold streams; of those
        with a replica, the pairs.
        """
        targets = [target for target in _COMBINED if target in self.kill]
        sizes = range(2, len(targets) + 1)
        found = [each for size in sizes for each in combinations(targets, size)]
        if "replica" in self.kill:
            found += [("replica", target) for target in targets]
        return [each for each in found if is_exact or not _loses_all_state(each)]

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
    faults: tuple[PlannedFault, ...]

    @property
    def is_burst(self) -> bool:
        """Whether the round has several faults."""
        return len(self.faults) > 1


def make_schedule(
    seed: int,
    may: FaultKinds,
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
    weights = np.array([1.0 if action == "kill" else _OTHERS_TO_KILLS for _, action in kinds])
    if not may.kill:
        weights[:] = 1.0
    first: list[tuple[tuple[Target, ...], Action]] = [
        ((target,), action) for target, action in kinds
    ]
    first += [(targets, "kill") for targets in may.combinations(is_exact=is_exact)]
    order = random.permutation(len(first)).tolist()
    rounds: list[Round] = []
    for number in range(num_rounds):
        if number < len(first):
            faults = _at_once(random, *first[order[number]])
        else:
            target, action = kinds[int(random.choice(len(kinds), p=weights / weights.sum()))]
            faults = _at_once(random, (target,), action)
            if may.kill and random.random() < _BURST_SHARE:
                _add_others(random, faults, may.kill, is_exact=is_exact)
        is_short = is_quick or random.random() < _SHORT_SHARE
        low, high = _SHORT_PAUSE_S if is_short else _PAUSE_S
        pause_s = float(random.uniform(low, high))
        awaits_spares = bool(random.random() < _AWAITED_SHARE)
        rounds.append(
            Round(pause_s, awaits_spares, tuple(sorted(faults, key=lambda fault: fault.after_s)))
        )
    return rounds


def _at_once(
    random: np.random.Generator, targets: Sequence[Target], action: Action
) -> list[PlannedFault]:
    """One fault per target within a second, in random order."""
    faults = [
        PlannedFault(
            targets[at], action, float(random.uniform(0.02, _BURST_S)), float(random.random())
        )
        for at in random.permutation(len(targets)).tolist()
    ]
    return [PlannedFault(faults[0].target, action, 0.0, faults[0].pick), *faults[1:]]


def _add_others(
    random: np.random.Generator,
    faults: list[PlannedFault],
    kill: Sequence[Target],
    *,
    is_exact: bool,
) -> None:
    for _ in range(int(random.integers(1, 3))):
        other = kill[int(random.integers(len(kill)))]
        after_s = float(random.uniform(0.02, _BURST_S))
        fault = PlannedFault(other, "kill", after_s, float(random.random()))
        if is_exact or not _loses_all_state([each.target for each in [*faults, fault]]):
            faults.append(fault)


def _loses_all_state(targets: Sequence[Target]) -> bool:
    return any(
        all_ <= set(targets) for all_ in ({"client", "worker", "core"}, {"client", "replica"})
    )
