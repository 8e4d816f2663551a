"""Starts the replicas of a fleet as Ray actors, asks and removes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import ray
from msgspec.structs import replace
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.stack.settings import StackSettings
from slipstream_ipc.telemetry.logs import configure_logging
from slipstream_ray.actor_messages import (
    FleetSpec,
    ReplicaReport,
    ScaleGoal,
    decoded,
    encoded,
)
from slipstream_ray.cluster import (
    NAMESPACE,
    actors_of,
    find,
    groups_of,
    is_placed,
    kill,
    remove_group,
)
from slipstream_ray.controller import NoReport, replica_name
from slipstream_ray.rank_host import RankHost
from slipstream_ray.replica import RayReplica

_ASK_S = 0.5  # for replicas to answer together
_LITTLE = {"CPU": 0.01}  # a placement group has to ask for something


class ReplicaActor(RayReplica):
    """The actor of a replica, which clients reach at the address of its Ray node."""

    def __init__(self, spec: bytes, name: str) -> None:
        configure_logging("replica")
        host = ray.util.get_node_ip_address()
        super().__init__(spec, name, host, start_ranks=partial(_start_ranks, spec))


class RankActor(RankHost):
    """The actor of a replica's ranks on another machine. It ends with the replica's actor, which
    has started it.
    """

    def __init__(self, settings: bytes) -> None:
        configure_logging("ranks")
        super().__init__(settings)


class RayLauncher:
    """The replicas of one fleet. See `controller.ReplicaLauncher`."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._data = encoded(spec)
        self._asked: dict[int, Any] = {}  # the answers that are awaited, by replica
        self._handles: dict[int, ActorHandle] = {}
        known = set(actors_of(spec.name))
        for name in groups_of(spec.name):
            if name not in known:  # it was begun and not finished
                remove_group(name)

    def found(self) -> Collection[int]:
        """See `ReplicaLauncher`."""
        names = [name.rpartition("-")[2] for name in actors_of(self._spec.name)]
        return [int(number) for number in names]

    def start(self, index: int) -> None:
        """See `ReplicaLauncher`."""
        spec, name = self._spec, self._name(index)
        resources = {"CPU": spec.num_cpus, "GPU": spec.num_gpus}
        bundle = {kind: number for kind, number in resources.items() if number}
        num = spec.settings.nnodes
        group = placement_group(
            [bundle or _LITTLE] * num,
            strategy="STRICT_PACK" if num == 1 else "STRICT_SPREAD",
            name=name,
            lifetime="detached",
        )
        self._handles[index] = (
            ray.remote(ReplicaActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                **_share(spec, group, 0),
            )
            .remote(self._data, f"{replica_name(index)}.{spec.name}")
        )

    def reports(self, indices: Collection[int]) -> Mapping[int, ReplicaReport | NoReport]:
        """See `ReplicaLauncher`. An answer that comes late is that of a later turn."""
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
        """See `ReplicaLauncher`."""
        if handle := self._handle(index):
            handle.remember.remote(encoded(goal))

    def drain(self, index: int) -> None:
        """See `ReplicaLauncher`."""
        if handle := self._handle(index):
            handle.drain.remote()

    def remove(self, index: int) -> None:
        """See `ReplicaLauncher`."""
        self._handles.pop(index, None)
        self._asked.pop(index, None)
        kill(self._name(index))
        remove_group(self._name(index))

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
            return "silent" if is_placed(self._name(index)) else "unplaced"
        except ActorUnavailableError:
            answer: NoReport = "away"
        except RayActorError:
            answer = "gone"
        else:
            del self._asked[index]
            return decoded(data, ReplicaReport)
        del self._asked[index]
        return answer


def _start_ranks(spec: bytes, settings: StackSettings) -> list[ActorHandle]:
    """Start the ranks of a replica's other machines from its actor. They end with the handles."""
    if settings.nnodes == 1:
        return []
    group, given = ray.util.get_current_placement_group(), decoded(spec, FleetSpec)
    return [
        ray.remote(RankActor)
        .options(**_share(given, group, index))
        .remote(encoded(replace(settings, node_rank=index, listen=None)))
        for index in range(1, settings.nnodes)
    ]


def _share(spec: FleetSpec, group: PlacementGroup, index: int) -> dict[str, Any]:
    """The options of an actor that has this bundle of its replica's group, one of each machine."""
    return {
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
    }
