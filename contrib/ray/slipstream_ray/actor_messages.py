"""The messages between the actors of a fleet, and between them and commands.

Arguments and results of their methods are bytes that are encoded here, text and integers: Ray would
pickle anything else.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.stack.settings import StackSettings
from slipstream_ipc.messages import Load
from slipstream_ray.scaling import ReplicaBounds

Message = TypeVar("Message", bound=Struct)


class ScaleGoal(Struct, frozen=True):
    """The number of replicas that a fleet should have. version: the highest one counts; replicas
    remember it for a fleet's actor that starts anew.
    """

    bounds: ReplicaBounds
    version: int = 0


class FleetSpec(Struct, frozen=True):
    """The specification of a fleet. settings: of each replica's stack, without a listener and HTTP.
    num_cpus, num_gpus: what Ray reserves for one replica on each of its machines.
    """

    name: str
    settings: StackSettings
    num_cpus: float
    num_gpus: float
    goal: ScaleGoal


class ReplicaReport(Struct, frozen=True):
    """The report of a replica's actor about its stack.

    address: where clients reach it; empty where it does not run. error: why it could not be
    started. has_ended: it has drained, and is over. load: None until it is known. goal: as it was
    told last.
    """

    address: str = ""
    error: str = ""
    is_draining: bool = False
    has_ended: bool = False
    load: Load | None = None
    goal: ScaleGoal | None = None


class FleetStatus(Struct, frozen=True):
    """A fleet's replicas, those that are still starting or draining among them. wanted: how many
    there are to be.
    """

    goal: ScaleGoal
    wanted: int
    replicas: tuple[ReplicaStatus, ...] = ()


def encoded(message: Struct) -> bytes:
    """A message as Ray is to carry it."""
    return msgspec.msgpack.encode(message)


def decoded(data: bytes, kind: type[Message]) -> Message:
    """The message in these bytes. Raises: msgspec.ValidationError, msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=kind)
