"""Turns the settings of a fleet on one machine into the stacks to start.

A replica is a whole stack with its own folder, sockets, CPU cores and cards. The HTTP fronts are a
stack of their own, which has the addresses of all replicas.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.client.endpoints import client_address
from slipstream.client.placing.discovery import MAX_MEMBERS
from slipstream.errors import wrong_option
from slipstream.stack.plan.nodes import one_machine
from slipstream.stack.plan.process_plan import plan_fronts, plan_stack
from slipstream.stack.settings import StackSettings
from slipstream.stack.supervisor_events import SupervisorConfig
from slipstream.tracing.part_files import checked_trace
from slipstream_ipc.transport.addresses import TCP
from slipstream_ipc.validation.simulated_model import SIMULATED
from slipstream_ipc.worker_deal import worker_address

FRONTS = "http"  # the name of the fronts' stack, and of its folder
_CARDS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_CARD_FILES = "nvidia[0-9]*"
T = TypeVar("T")


class PlannedStack(msgspec.Struct, frozen=True):
    """A stack of a fleet. cpus: those it may use; empty: all. environment: added to ours."""

    name: str
    config: SupervisorConfig
    cpus: frozenset[int] = frozenset()
    environment: Mapping[str, str] = {}

    @property
    def is_replica(self) -> bool:
        """True if it computes streams; the others are HTTP fronts."""
        return self.name != FRONTS


class FleetPlan(msgspec.Struct, frozen=True):
    """The stacks of a fleet. address: of all replicas, as `Client` takes it. listen: the same over
    TCP; None without `listen`. traces: files that the replicas' timelines go to.
    """

    stacks: tuple[PlannedStack, ...]
    address: str
    runtime_dir: str
    drain_s: float
    max_restarts: int
    restart_window_s: float
    log_format: str
    listen: str | None = None
    traces: tuple[str, ...] = ()


def plan_fleet(settings: StackSettings, runtime_dir: Path, num_replicas: int) -> FleetPlan:
    """The plan of a fleet, whose replicas get equal shares of this machine's cores and cards.

    A replica listens at `listen`, each one on the ports behind those of the one before. Each writes
    a trace of its own, where one is wanted.

    Raises: BadRequestError, as `plan_stack`, and for a number of replicas that is out of range or
    that there are too few cards for.
    """
    if not 1 <= num_replicas <= MAX_MEMBERS:
        raise wrong_option("replicas", num_replicas, f"an integer >= 1 and <= {MAX_MEMBERS}")
    one_machine(settings, "replicas")
    if "," in str(runtime_dir):
        raise wrong_option("runtime_dir", str(runtime_dir), "a path without a comma")
    cards = [] if needs_no_card(settings) else visible_cards()
    per_replica = settings.tensor_parallel_size
    if cards and len(cards) < num_replicas * per_replica:
        most = len(cards) // per_replica
        allowed = f"at most {most}, as many as there are cards for (or device=cpu)"
        raise wrong_option("replicas", num_replicas, allowed)
    cpus = shares(sorted(os.sched_getaffinity(0)), num_replicas)
    card_shares = shares(cards, num_replicas)
    stacks = []
    names = [f"replica-{index}" for index in range(num_replicas)]
    members = [client_address(runtime_dir / name) for name in names]
    alone = [_of_replica(settings, index, name) for index, name in enumerate(names)]
    listens = [each.listen or "" for each in alone]
    if (
        settings.members is None
        and settings.listen is not None
        and _can_be_connected_to(settings.listen)
    ):
        members += listens
    for index, name in enumerate(names):
        config = plan_stack(
            alone[index],
            runtime_dir / name,
            os.getpid(),
            replica=_replica_id(name, runtime_dir),
            members=tuple(members),
        )
        environment = {_CARDS_VARIABLE: ",".join(card_shares[index])} if cards else {}
        stacks.append(PlannedStack(name, config, frozenset(cpus[index]), environment))
    address = ",".join([stack.config.address for stack in stacks])
    if settings.http_port is not None or settings.uds is not None:
        fronts = plan_fronts(settings, address, runtime_dir / FRONTS, os.getpid())
        stacks.append(PlannedStack(FRONTS, fronts))
    return FleetPlan(
        tuple(stacks),
        address,
        str(runtime_dir),
        settings.drain_s,
        settings.max_restarts,
        settings.restart_window_s,
        settings.log_format,
        None if settings.listen is None else ",".join(listens),
        tuple([each.trace for each in alone if each.trace is not None]),
    )


def shares(items: Sequence[T], num: int) -> list[Sequence[T]]:
    """Neighbouring items for each of `num` owners, with sizes that differ by one at most; nothing
    for any of them where there are fewer items than owners.
    """
    if len(items) < num:
        return [()] * num
    ends = [len(items) * index // num for index in range(num + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def visible_cards() -> list[str]:
    """The cards that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(_CARDS_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(index) for index in range(len(list(Path("/dev").glob(_CARD_FILES))))]


def _replica_id(name: str, runtime_dir: Path) -> str:
    """The id by which clients know a replica: the same after a restart, different on each
    machine.
    """
    where = f"{socket.gethostname()}:{runtime_dir}"
    return f"{name}.{blake2b(where.encode(), digest_size=6).hexdigest()}"


def _can_be_connected_to(listen: str) -> bool:
    """True if clients can connect to the address that is listened on, which is not every
    address.
    """
    host = listen.removeprefix(TCP).rpartition(":")[0]
    return host not in ("0.0.0.0", "[::]")  # noqa: S104  (compared, not bound)


def needs_no_card(settings: StackSettings) -> bool:
    """True if a stack computes nothing on a card."""
    is_simulated = f"{settings.model}:".startswith(SIMULATED)
    return settings.device == "cpu" or is_simulated


def _of_replica(settings: StackSettings, index: int, name: str) -> StackSettings:
    """The settings of one replica, which has no HTTP fronts."""
    trace = checked_trace(settings.trace)
    if trace is not None:
        path = Path(trace)
        trace = str(path.with_name(f"{path.stem}-{name}{path.suffix}"))
    listen = settings.listen
    if listen is not None:
        listen = worker_address(listen, index * settings.output_workers)
    return msgspec.structs.replace(
        settings,
        listen=listen,
        trace=trace,
        http_port=None,
        uds=None,
        http_workers=1,
        ssl_certfile=None,
        ssl_keyfile=None,
    )
