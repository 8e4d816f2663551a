"""Connecting to Ray, and the actors and placement groups of fleets by their names.

A fleet is a detached actor of the fleet's name, and for each replica a detached actor and a
placement group, both named FLEET/REPLICA. Detached ones outlive the command that starts them, and
Ray never removes such a group: what ends them is here.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup

from slipstream.errors import ConnectionLostError
from slipstream_ipc.messages import Fault
from slipstream_ray.cluster_address import check_reachable, cluster_address, no_cluster
from slipstream_ray.controller import replica_name

NAMESPACE = "slipstream"
CALL_S = 20.0  # for an actor to answer
_PAUSE_S = 0.2
_CREATED, _REMOVED = "CREATED", "REMOVED"  # states of placement groups


def connect(address: str | None = None) -> None:
    """Connect this process to a Ray cluster. Idempotent.

    address: HOST:PORT; None: $RAY_ADDRESS, else the cluster that runs on this machine.

    Raises: ConnectionLostError where there is none, within seconds where nothing listens.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where = cluster_address(address)
    check_reachable(where)
    try:
        ray.init(
            where,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise no_cluster(where, _first_line(error)) from None


def has_cards() -> bool:
    """True if the cluster has cards."""
    return bool(ray.cluster_resources().get("GPU"))


def call(actor: ActorHandle, method: str, *arguments: bytes | str | int) -> Any:
    """The result of an actor's method, which may be called again while the actor is restarted.

    Raises: ConnectionLostError.
    """
    deadline = time.monotonic() + CALL_S
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=left_s)
        except (GetTimeoutError, RayError) as error:
            if not isinstance(error, ActorUnavailableError) or not left_s:
                why = f"the fleet's actor does not answer: {_first_line(error)}"
                raise _gone(why) from None
        time.sleep(_PAUSE_S)


def find(name: str) -> ActorHandle | None:
    """The actor of this name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def remove_fleet(name: str) -> int:
    """End what there is of a fleet: its actor first, so that it starts nothing more. Returns how
    many actors and placement groups there were.
    """
    num = kill(name)
    for each in actors_of(name):
        num += kill(each)
    for each in groups_of(name):
        num += remove_group(each)
    return num


def actors_of(fleet: str) -> list[str]:
    """The names of the actors of a fleet's replicas."""
    form = re.compile(re.escape(f"{fleet}/") + re.escape(replica_name(0))[:-1] + r"\d+")
    return [name for name in ray.util.list_named_actors() if form.fullmatch(name)]


def groups_of(fleet: str) -> list[str]:
    """The names of the placement groups of a fleet's replicas."""
    table = ray.util.placement_group_table().values()
    names = [each["name"] for each in table if each["state"] != _REMOVED]
    return [name for name in names if name.startswith(f"{fleet}/")]


def is_placed(name: str) -> bool:
    """True if Ray has found room for the placement group of this name."""
    found = _group(name)
    return found is not None and ray.util.placement_group_table(found).get("state") == _CREATED


def kill(name: str) -> int:
    """End the actor of this name for good. Returns how many there were."""
    actor = find(name)
    if actor is None:
        return 0
    with suppress(RayError):
        ray.kill(actor, no_restart=True)
    return 1


def remove_group(name: str) -> int:
    """Remove the placement group of this name. Returns how many there were."""
    found = _group(name)
    if found is None:
        return 0
    ray.util.remove_placement_group(found)
    return 1


def _group(name: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def _gone(why: str) -> ConnectionLostError:
    return ConnectionLostError(Fault("engine", why))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
