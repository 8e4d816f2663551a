"""`slipstream ray`: replicas that Ray starts, places and restarts."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from slipstream.cli.options.parser import Command, Parser, add_commands
from slipstream.cli.options.stack_options import add_settings, given_settings
from slipstream.cli.serving.event_printer import write_line
from slipstream.cli.serving.replicas import show_replicas
from slipstream.client.endpoints import KEYS_VARIABLE, default_runtime_dir
from slipstream.client.placing.discovery import FLEET_NAME, INSTALL_RAY, MAX_MEMBERS, RAY, has_ray
from slipstream.errors import missing_option, wrong_option
from slipstream.stack.plan.fleet_plan import needs_no_card
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import HTTP, StackSettings, group_of, settings_from
from slipstream.stack.supervisor_process import StackError
from slipstream_ray.actor_messages import FleetSpec, FleetStatus, ScaleGoal, decoded
from slipstream_ray.cluster_address import check_reachable, cluster_address
from slipstream_ray.replica import at_host
from slipstream_ray.scaling import ReplicaBounds

_COMMANDS = {
    "up": Command("start replicas of a model", "slipstream_ray.commands:add_up"),
    "status": Command("show what the replicas do", "slipstream_ray.commands:add_status"),
    "scale": Command("have more or fewer replicas", "slipstream_ray.commands:add_scale"),
    "down": Command("drain and end all replicas", "slipstream_ray.commands:add_down"),
}
_NOT_OF_REPLICAS = {"listen", "members", "trace", "node_rank", "master_addr", "master_port"}
REPLICA_SETTINGS = frozenset(
    name
    for name in StackSettings.__struct_fields__
    if group_of(name) != HTTP and name not in _NOT_OF_REPLICAS
)
"""The settings of a stack that count where Ray starts it."""
_A_FLEET = "one that `slipstream ray up` has started"
_LOOK_EVERY_S = 0.5
_NUMBER = re.compile(r"(\d{1,3})(?::(\d{1,3}))?")
_NAME = "slipstream"
_ANY_HOST = "127.0.0.1"  # a replica listens at the address of its machine


def add_ray(parser: Parser) -> None:
    """Add the commands."""
    add_commands(parser, "command", _COMMANDS)


def add_up(parser: Parser) -> None:
    """Add the options of `slipstream ray up`."""
    parser.introduce(
        "[MODEL] [options]",
        (
            "slipstream ray up Qwen/Qwen3-0.6B --replicas 2 --keys KEYS",
            "slipstream ray up Qwen/Qwen3-0.6B --replicas 1:8 --num-gpus 1 --keys KEYS",
            "slipstream ray up Qwen/Qwen3-32B --tensor-parallel-size 8 --nnodes 2 --keys KEYS",
        ),
    )
    _add_common(parser)
    parser.add_argument(
        "--replicas",
        default="1",
        metavar="N",
        help="how many; MIN:MAX follows the requests (default: %(default)s)",
    )
    parser.add_argument(
        "--num-cpus",
        type=float,
        default=1.0,
        metavar="N",
        help="CPU cores that Ray keeps for a replica on each of its machines, where it has as many "
        "threads without --threads (default: %(default)g)",
    )
    parser.add_argument(
        "--num-gpus",
        type=float,
        metavar="N",
        help="cards that Ray keeps for a replica on each of its machines (default: one for each of "
        "its ranks there where Ray has any, none with --device cpu)",
    )
    _add_within(parser)
    add_settings(parser, names=REPLICA_SETTINGS)
    parser.set_defaults(run=up)


def add_status(parser: Parser) -> None:
    """Add the options of `slipstream ray status`."""
    parser.introduce("[options]", ("slipstream ray status", "slipstream ray status --name chat"))
    _add_common(parser)
    parser.set_defaults(run=status)


def add_scale(parser: Parser) -> None:
    """Add the options of `slipstream ray scale`."""
    parser.introduce("N [options]", ("slipstream ray scale 4", "slipstream ray scale 1:8"))
    parser.add_argument("replicas", metavar="N", help="how many; MIN:MAX follows the requests")
    _add_common(parser)
    _add_within(parser)
    parser.set_defaults(run=scale)


def add_down(parser: Parser) -> None:
    """Add the options of `slipstream ray down`."""
    parser.introduce("[options]", ("slipstream ray down", "slipstream ray down --now"))
    _add_common(parser)
    parser.add_argument("--now", action="store_true", help="without a drain")
    _add_within(parser)
    parser.set_defaults(run=down)


def up(arguments: argparse.Namespace) -> int:
    """Start a fleet, and wait until its replicas serve. Returns 1 where they do not in time."""
    bounds = _bounds(arguments, fewest=1)
    settings = _settings(arguments)
    _connect(arguments)
    from slipstream_ray.cluster import find, has_cards, remove_fleet
    from slipstream_ray.fleet import start_fleet

    num_gpus = arguments.num_gpus
    if num_gpus is None:
        needs_cards = not needs_no_card(settings) and has_cards()
        num_gpus = float(settings.tensor_parallel_size // settings.nnodes * needs_cards)
    if find(arguments.name) is not None:
        allowed = "a new name; `slipstream ray scale` and `down` are for the fleet of this one"
        raise wrong_option("name", arguments.name, allowed)
    remove_fleet(arguments.name)  # what is left of one that was not ended
    goal = ScaleGoal(bounds)
    fleet = start_fleet(FleetSpec(arguments.name, settings, arguments.num_cpus, num_gpus, goal))
    try:
        missing = _wait(fleet, arguments.within, is_first=True)
    except (KeyboardInterrupt, StackError):
        remove_fleet(arguments.name)
        raise
    if not missing:
        write_line(sys.stdout, f"`slipstream route {RAY}{arguments.name}` serves them over HTTP")
    return missing


def status(arguments: argparse.Namespace) -> int:
    """Show a table; exit code 1 if no replica serves."""
    found = _status(_fleet(arguments))
    show_replicas(found.replicas)
    write_line(sys.stdout, f"wanted: {_shown(found)}")
    return 0 if any(each.condition == "serving" for each in found.replicas) else 1


def scale(arguments: argparse.Namespace) -> int:
    """Set the number of replicas, and wait until there are as many."""
    bounds = _bounds(arguments, fewest=1)
    fleet = _fleet(arguments)
    from slipstream_ray.cluster import call

    call(fleet, "scale", bounds.least, bounds.most)
    return _wait(fleet, arguments.within)


def down(arguments: argparse.Namespace) -> int:
    """End a fleet. Returns 1 where it does not end in time, and was ended without its drain."""
    _connect(arguments)
    from slipstream_ray.cluster import call, find, remove_fleet

    fleet = find(arguments.name)
    code = 0
    if fleet is not None and not arguments.now:
        call(fleet, "scale", 0, 0)
        code = _wait(fleet, arguments.within)
    elif fleet is not None:
        call(fleet, "remove_all")
    if not remove_fleet(arguments.name):
        raise wrong_option("name", arguments.name, _A_FLEET)
    write_line(sys.stdout, f"{arguments.name} has ended")
    return code


# ---- options -------------------------------------------------------------------------------------


def _add_common(parser: Parser) -> None:
    parser.add_argument(
        "--name", default=_NAME, help="of the fleet, as in ray://NAME (default: %(default)s)"
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="of the Ray cluster (default: $RAY_ADDRESS, else the one that runs on this machine)",
    )


def _add_within(parser: Parser) -> None:
    parser.add_argument(
        "--within",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the replicas (default: %(default)g)",
    )


def _bounds(arguments: argparse.Namespace, fewest: int) -> ReplicaBounds:
    """The numbers of replicas. Raises: BadRequestError."""
    given = str(arguments.replicas)
    allowed = f"N or MIN:MAX, from {fewest} to {MAX_MEMBERS}"
    if (found := _NUMBER.fullmatch(given)) is None:
        raise wrong_option("replicas", given, allowed)
    bounds = ReplicaBounds(int(found[1]), int(found[2] or found[1]))
    if not fewest <= bounds.least <= bounds.most <= MAX_MEMBERS:
        raise wrong_option("replicas", given, allowed)
    return bounds


def _settings(arguments: argparse.Namespace) -> StackSettings:
    """The settings of each replica, with paths that mean the same in another folder.

    Raises: BadRequestError for what would keep every replica from starting.
    """
    given = given_settings(arguments)
    if not {"keys", "insecure"} & given.keys():
        given["keys"] = os.environ.get(KEYS_VARIABLE) or None
        arguments.option_names["keys"] = f"${KEYS_VARIABLE}"
        if given["keys"] is None:
            raise missing_option(
                "--keys", "a folder of `slipstream keys`, or --insecure where Ray is on loopback"
            )
    if arguments.num_cpus < 0:
        raise wrong_option("num_cpus", arguments.num_cpus, "a number >= 0")
    given.setdefault("spare_core", False)  # the other replicas are the spares
    num_ranks = max(1, (given.get("tensor_parallel_size") or 1) // (given.get("nnodes") or 1))
    given.setdefault("threads", max(1, int(arguments.num_cpus) // num_ranks))
    for name in ("model", "tokenizer", "keys"):
        path = Path(given.get(name) or "").expanduser()
        if given.get(name) and path.is_dir():
            given[name] = str(path.absolute())
    settings = settings_from(given)
    plan_stack(at_host(settings, _ANY_HOST), default_runtime_dir())
    return settings


# ---- the fleet -----------------------------------------------------------------------------------


def _connect(arguments: argparse.Namespace) -> None:
    """Connect to Ray. Raises: BadRequestError, ConnectionLostError."""
    if not re.fullmatch(FLEET_NAME, arguments.name):
        raise wrong_option("name", arguments.name, "letters, digits, - and _")
    if not has_ray():
        raise missing_option("Ray", INSTALL_RAY)
    check_reachable(cluster_address(arguments.ray_address))  # importing Ray takes longer
    from slipstream_ray.cluster import connect

    connect(arguments.ray_address)


def _fleet(arguments: argparse.Namespace) -> Any:
    """The fleet's actor. Raises: BadRequestError where there is none."""
    _connect(arguments)
    from slipstream_ray.cluster import find

    fleet = find(arguments.name)
    if fleet is None:
        raise wrong_option("name", arguments.name, _A_FLEET)
    return fleet


def _status(fleet: Any) -> FleetStatus:
    from slipstream_ray.cluster import call

    return decoded(call(fleet, "status"), FleetStatus)


def _wait(fleet: Any, within_s: float, *, is_first: bool = False) -> int:
    """Wait until as many replicas serve as are wanted, and no others are there. Returns 1 where
    they do not in time.

    is_first: no replica has ever served.

    Raises: StackError where the first one cannot be started.
    """
    deadline = time.monotonic() + within_s
    said: set[str] = set()
    while True:
        found = _status(fleet)
        for each in found.replicas:
            line = f"{each.name}: {each.why}" if each.why else f"{each.name}: {each.condition}"
            if each.condition == "serving":
                line = f"{each.name} serves at {each.address}"
                is_first = False
            elif each.condition == "refused" and is_first:
                raise StackError(each.why)
            if line not in said:
                said.add(line)
                write_line(sys.stdout, line)
        serving = [each for each in found.replicas if each.condition == "serving"]
        if len(serving) == len(found.replicas) == found.wanted:
            return 0
        if time.monotonic() >= deadline:
            others = len(found.replicas) - len(serving)
            late = (
                f"{len(serving)} replicas serve, {others} start or drain, {found.wanted} are wanted"
            )
            write_line(
                sys.stdout, f"{late} after {within_s:g} s; `slipstream ray status` shows the others"
            )
            return 1
        time.sleep(_LOOK_EVERY_S)


def _shown(status: FleetStatus) -> str:
    bounds = status.goal.bounds
    if bounds.least == bounds.most:
        return str(status.wanted)
    return f"{status.wanted}, of {bounds.least} to {bounds.most}"
