"""All that is asked of Ray: connecting to it, and the actors and placement groups of fleets.

A fleet is a detached actor of the fleet's name, and for each replica a detached actor and a
placement group, both named FLEET/REPLICA. Detached ones outlive the command that starts them, and
Ray never removes such a group: what ends them is here.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.errors import ConnectionLostError
from slipstream.ray_fleet.controller import NoReport, replica_name
from slipstream.ray_fleet.messages import FleetSpec, ReplicaReport, ScaleGoal, decoded, encoded
from slipstream_ipc.messages import Fault

NAMESPACE = "slipstream"
ADDRESS_VARIABLE = "RAY_ADDRESS"
CALL_S = 20.0  # for an actor that runs to answer
_ASK_S = 0.5  # for replicas to answer together
_REMOVED = "REMOVED"


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster. Idempotent.

    address: HOST:PORT; None: $RAY_ADDRESS, else the cluster that runs on this machine.

    Raises: ConnectionLostError where there is none.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = address or os.environ.get(ADDRESS_VARIABLE) or "auto"
    try:
        ray.init(
            where,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise _gone(f"no Ray cluster at {where}: {_first_line(error)}") from None


def disconnect() -> None:
    """The inverse of `connect`."""
    ray.shutdown()


def has_cards() -> bool:
    """Whether the cluster has any."""
    return bool(ray.cluster_resources().get("GPU"))


def call(actor: ActorHandle, method: str, *arguments: bytes | str | int) -> Any:
    """The result of an actor's method. Raises: ConnectionLostError."""
    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=CALL_S)
    except (GetTimeoutError, RayError) as error:
        raise _gone(f"the fleet's actor does not answer: {_first_line(error)}") from None


def find(name: str) -> ActorHandle | None:
    """The actor of this name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def start_fleet(spec: FleetSpec) -> ActorHandle:
    """Start the actor of a fleet, which starts the replicas."""
    from slipstream.ray_fleet.actors import Fleet

    options = {"name": spec.name, "namespace": NAMESPACE, "lifetime": "detached"}
    restarts = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 8}
    return ray.remote(Fleet).options(**options, **restarts).remote(encoded(spec))


def remove_fleet(name: str) -> int:
    """End what there is of a fleet: its actor first, so that it starts nothing more. Returns how
    many actors and placement groups there were.
    """
    num = _kill(name)
    for each in _actors_of(name):
        num += _kill(each)
    for each in _groups_of(name):
        num += _remove_group(each)
    return num


class RayHost:
    """The replicas of one fleet. See `controller.Host`."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._data = encoded(spec)
        self._asked: dict[int, Any] = {}  # the answers that are awaited, by replica
        self._handles: dict[int, ActorHandle] = {}
        known = set(_actors_of(spec.name))
        for group in _groups_of(spec.name):
            if group not in known:  # it was begun and not finished
                _remove_group(group)

    def found(self) -> Collection[int]:
        """See `Host`."""
        names = [name.rpartition("-")[2] for name in _actors_of(self._spec.name)]
        return [int(number) for number in names]

    def start(self, index: int) -> None:
        """See `Host`."""
        from slipstream.ray_fleet.actors import Replica

        spec, name = self._spec, self._name(index)
        resources = {"CPU": spec.num_cpus, "GPU": spec.num_gpus}
        bundle = {kind: number for kind, number in resources.items() if number}
        group = placement_group(
            [bundle or {"CPU": 0.01}], strategy="STRICT_PACK", name=name, lifetime="detached"
        )
        self._handles[index] = (
            ray.remote(Replica)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=spec.num_cpus,
                num_gpus=spec.num_gpus,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(self._data, f"{replica_name(index)}.{spec.name}")
        )

    def reports(self, indices: Collection[int]) -> Mapping[int, ReplicaReport | NoReport]:
        """See `Host`. An answer that comes late is that of a later turn."""
        found: dict[int, ReplicaReport | NoReport] = {}
        for index in indices:
            handle = self._handle(index)
            if handle is None:
                found[index] = "gone"
            elif index not in self._asked:
                self._asked[index] = handle.report.remote()
        awaited = [self._asked[index] for index in indices if index not in found]
        if awaited:
            ray.wait(awaited, num_returns=len(awaited), timeout=_ASK_S)
        return found | {index: self._answer(index) for index in indices if index not in found}

    def tell_goal(self, index: int, goal: ScaleGoal) -> None:
        """See `Host`."""
        if handle := self._handle(index):
            handle.remember.remote(encoded(goal))

    def drain(self, index: int) -> None:
        """See `Host`."""
        if handle := self._handle(index):
            handle.drain.remote()

    def remove(self, index: int) -> None:
        """See `Host`."""
        self._handles.pop(index, None)
        self._asked.pop(index, None)
        _kill(self._name(index))
        _remove_group(self._name(index))

    def _name(self, index: int) -> str:
        return f"{self._spec.name}/{replica_name(index)}"

    def _handle(self, index: int) -> ActorHandle | None:
        handle = self._handles.get(index) or find(self._name(index))
        if handle is not None:
            self._handles[index] = handle
        return handle

    def _answer(self, index: int) -> ReplicaReport | NoReport:
        try:
            data = ray.get(self._asked[index], timeout=0)
        except GetTimeoutError:
            return "silent" if self._is_placed(index) else "unplaced"
        except ActorUnavailableError:
            answer: NoReport = "away"
        except RayActorError:
            answer = "gone"
        else:
            del self._asked[index]
            return decoded(data, ReplicaReport)
        del self._asked[index]
        return answer

    def _is_placed(self, index: int) -> bool:
        group = _group(self._name(index))
        return group is not None and _state(group) == "CREATED"


def _actors_of(fleet: str) -> list[str]:
    """The names of the actors of a fleet's replicas."""
    form = re.compile(re.escape(f"{fleet}/") + re.escape(replica_name(0))[:-1] + r"\d+")
    return [name for name in ray.util.list_named_actors() if form.fullmatch(name)]


def _groups_of(fleet: str) -> list[str]:
    """The names of the placement groups of a fleet's replicas."""
    table = ray.util.placement_group_table().values()
    names = [each["name"] for each in table if each["state"] != _REMOVED]
    return [name for name in names if name.startswith(f"{fleet}/")]


def _state(group: PlacementGroup) -> str:
    return str(ray.util.placement_group_table(group).get("state"))


def _group(name: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def _kill(name: str) -> int:
    actor = find(name)
    if actor is None:
        return 0
    with suppress(RayError):
        ray.kill(actor, no_restart=True)
    return 1


def _remove_group(name: str) -> int:
    group = _group(name)
    if group is None:
        return 0
    ray.util.remove_placement_group(group)
    return 1


def _gone(why: str) -> ConnectionLostError:
    return ConnectionLostError(Fault("engine", why))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
