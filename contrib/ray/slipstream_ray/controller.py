"""Keeps as many replicas as a fleet is to have. No Ray and no clock: a launcher starts and removes.

- A replica has an index, which is a part of its name. The lowest free one is taken.
- One that could not be started, or whose actor is gone, is removed and started again after a
  pause. Ray itself restarts an actor that dies; its replica has another address then.
- Fewer are wanted: those that do not serve yet go first, then the one with the fewest requests
  drains. A drain is not taken back.
- The controller keeps nothing that its replicas could not tell: one that begins anew finds them and
  the goal that they were told, and decides nothing until they have answered.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream_ipc.restart_backoff import RestartBackoff
from slipstream_ray.actor_messages import FleetSpec, FleetStatus, ReplicaReport, ScaleGoal
from slipstream_ray.scaling import Autoscaler, ReplicaBounds

NoReport = Literal["unplaced", "silent", "away", "gone"]
"""Why a replica has no report: Ray has no room for it; it has not answered yet; its actor is being
restarted; its actor is gone for good.
"""
_FIND_S = 30.0  # for replicas that were found to answer
_DRAIN_MARGIN_S = 30.0  # beside the stack's own bound
_NO_BOUNDS = ReplicaBounds(0, 0)

logger = logging.getLogger(__name__)


class ReplicaLauncher(Protocol):
    """Starts, asks and removes replicas. Its methods do not wait for what a replica does."""

    def found(self) -> Collection[int]:
        """The replicas that exist."""

    def start(self, index: int) -> None:
        """Start a replica that does not exist."""

    def reports(self, indices: Collection[int]) -> Mapping[int, ReplicaReport | NoReport]:
        """The reports of these replicas."""

    def tell_goal(self, index: int, goal: ScaleGoal) -> None:
        """Have a replica remember the goal."""

    def drain(self, index: int) -> None:
        """Have a replica take nothing new, and end with what it has."""

    def remove(self, index: int) -> None:
        """End what there is of a replica, and release its resources."""


@dataclass(eq=False, slots=True)
class _Replica:
    """A replica that is wanted or drains. due_at: when it is started again; None: it exists."""

    index: int
    due_at: float | None = None
    answer: ReplicaReport | NoReport = "silent"
    report: ReplicaReport | None = None  # the last one of its actor
    serves_since: float | None = None
    drains_since: float | None = None
    error: str = ""
    backoff: RestartBackoff = field(default_factory=RestartBackoff)

    @property
    def exists(self) -> bool:
        """True if the replica has an actor, as far as is known."""
        return self.due_at is None

    @property
    def num_requests(self) -> int:
        """Running and waiting ones."""
        load = None if self.report is None else self.report.load
        return 0 if load is None else load.running + load.waiting

    @property
    def is_there(self) -> bool:
        """True if the replica may have streams."""
        return self.report is not None and self.answer != "away"


class Controller:
    """Decides in turns."""

    def __init__(self, spec: FleetSpec, launcher: ReplicaLauncher, now: float) -> None:
        self._spec = spec
        self._launcher = launcher
        self._goal = spec.goal
        self._replicas = {index: _Replica(index) for index in sorted(launcher.found())}
        self._finds_until: float | None = now + _FIND_S if self._replicas else None
        self._wanted = self._goal.bounds.least
        self._asked: ReplicaBounds | None = None  # while not all replicas are found
        self._autoscaler = Autoscaler(now)

    @property
    def is_finding(self) -> bool:
        """True if replicas of an earlier controller have not answered yet."""
        return self._finds_until is not None

    def turn(self, now: float) -> None:
        """Ask all replicas, and do what is to be done."""
        existing = [each.index for each in self._replicas.values() if each.exists]
        for index, answer in self._launcher.reports(existing).items():
            self._note(self._replicas[index], answer, now)
        if self._finds_until is not None and not self._has_found(now):
            return
        self._decide_wanted(now)
        self._keep_number(now)
        for replica in self._replicas.values():
            if replica.due_at is not None and now >= replica.due_at:
                self._start(replica)

    def scale(self, bounds: ReplicaBounds) -> None:
        """Have as many replicas from now on."""
        self._goal = ScaleGoal(bounds, self._goal.version + 1)
        self._asked = bounds if self.is_finding else None
        self._wanted = min(max(self._wanted, bounds.least), bounds.most)

    def remove_all(self) -> None:
        """End at once, without a drain."""
        self.scale(_NO_BOUNDS)
        for replica in list(self._replicas.values()):
            self._remove(replica)

    def addresses(self) -> list[str]:
        """The addresses at which clients reach the replicas. A restarted one keeps its old address
        until it has a new one.
        """
        reports = [each.report for each in self._replicas.values()]
        return [each.address for each in reports if each and each.address and not each.has_ended]

    def status(self) -> FleetStatus:
        """The replicas in their order."""
        return FleetStatus(
            self._goal,
            self._wanted,
            tuple(_status(self._replicas[index]) for index in sorted(self._replicas)),
        )

    # ---- what replicas say -------------------------------------------------------------------

    def _note(self, replica: _Replica, answer: ReplicaReport | NoReport, now: float) -> None:
        replica.answer = answer
        if answer == "gone":
            self._lost(replica, "its actor is gone", now)
        if not isinstance(answer, ReplicaReport):
            return
        if answer.error:
            self._lost(replica, answer.error, now)
        elif answer.has_ended:
            self._remove(replica)
        else:
            is_new = replica.report is None or replica.report.address != answer.address
            if is_new:
                replica.serves_since, replica.error = now, ""
            replica.report = answer
            self._tell(replica, answer, now)

    def _tell(self, replica: _Replica, report: ReplicaReport, now: float) -> None:
        if report.goal is not None and report.goal.version > self._goal.version:
            self._goal = report.goal  # this controller is the younger one
        elif report.goal is None or report.goal.version < self._goal.version:
            self._launcher.tell_goal(replica.index, self._goal)
        if report.is_draining and replica.drains_since is None:
            replica.drains_since = now
        elif replica.drains_since is not None and not report.is_draining:
            self._launcher.drain(replica.index)  # its actor was restarted meanwhile

    def _lost(self, replica: _Replica, why: str, now: float) -> None:
        if replica.drains_since is not None:
            self._remove(replica)
            return
        self._launcher.remove(replica.index)
        served_s = 0.0 if replica.serves_since is None else now - replica.serves_since
        replica.due_at = now + replica.backoff.after(served_s)
        replica.answer, replica.report, replica.serves_since = "silent", None, None
        if why != replica.error:
            logger.warning("replica %d is started again: %s", replica.index, why)
        replica.error = why

    def _has_found(self, now: float) -> bool:
        """True if all replicas found have answered, or had the time to."""
        assert self._finds_until is not None
        is_waiting = any(each.exists and each.report is None for each in self._replicas.values())
        if is_waiting and now < self._finds_until:
            return False
        self._finds_until = None
        self._wanted = len(self._staying())
        if self._asked is not None:  # later than whatever replicas remember
            self.scale(self._asked)
        return True

    # ---- what is done ------------------------------------------------------------------------

    def _staying(self) -> list[_Replica]:
        return [each for each in self._replicas.values() if each.drains_since is None]

    def _decide_wanted(self, now: float) -> None:
        bounds = self._goal.bounds
        loads = [each.report.load for each in self._replicas.values() if each.report]
        known = [load for load in loads if load is not None]
        max_num_seqs = max((load.max_seqs for load in known), default=0)
        if bounds.least < bounds.most and max_num_seqs:
            num_requests = sum([load.running + load.waiting for load in known])
            self._wanted = self._autoscaler.wanted(
                num_requests, max_num_seqs, self._wanted, bounds, now
            )
        self._wanted = min(max(self._wanted, bounds.least), bounds.most)

    def _keep_number(self, now: float) -> None:
        staying = self._staying()
        for _ in range(self._wanted - len(staying)):
            index = next(each for each in count() if each not in self._replicas)
            self._replicas[index] = _Replica(index, due_at=now)
        staying.sort(key=lambda each: (each.is_there, each.num_requests, -each.index))
        for replica in staying[: max(0, len(staying) - self._wanted)]:
            if not replica.is_there:
                self._remove(replica)
            else:
                replica.drains_since = now
                self._launcher.drain(replica.index)
        late_s = self._spec.settings.drain_s + _DRAIN_MARGIN_S
        for replica in list(self._replicas.values()):
            if replica.drains_since is not None and now > replica.drains_since + late_s:
                logger.warning("replica %d has not ended with its drain", replica.index)
                self._remove(replica)

    def _start(self, replica: _Replica) -> None:
        replica.due_at = None
        self._launcher.start(replica.index)

    def _remove(self, replica: _Replica) -> None:
        if replica.exists:
            self._launcher.remove(replica.index)
        del self._replicas[replica.index]


def replica_name(index: int) -> str:
    """A replica's name within its fleet."""
    return f"replica-{index}"


def _status(replica: _Replica) -> ReplicaStatus:
    name = replica_name(replica.index)
    report, answer = replica.report, replica.answer
    if report is None:
        why = "Ray has no room for it yet" if answer == "unplaced" else "it starts"
        if replica.error:
            return ReplicaStatus("-", "refused", name, replica.error)
        return ReplicaStatus("-", "away", name, why)
    if answer == "away":
        return ReplicaStatus(report.address, "away", name, "its actor is restarted")
    if replica.drains_since is not None:
        return ReplicaStatus(report.address, "draining", name, load=report.load)
    condition = "serving" if report.load is None else report.load.state
    return ReplicaStatus(report.address, condition, name, load=report.load)
