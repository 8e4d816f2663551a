"""`slipstream replicas`: what each replica of a fleet says of itself."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import zmq

from slipstream.cli.options.parser import Parser
from slipstream.client.connection.cluster import Cluster
from slipstream.client.endpoints import default_address, server_endpoint
from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.poller import Poller

_WITHIN_S = 3.0  # for all replicas to say something
_POLL_MS = 50
_EVERY_S = 1.0
_HEAD = (
    "REPLICA",
    "MODEL",
    "STATE",
    "RUNNING",
    "WAITING",
    "QUEUED TOKENS",
    "FREE BLOCKS",
    "ADDRESS",
)


def add_replicas(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "[ADDRESS...] [options]",
        (
            "slipstream replicas",
            "slipstream replicas tcp://10.0.0.5:7001 tcp://10.0.0.6:7001 --keys KEYS --watch",
        ),
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        metavar="ADDRESS",
        help="as of `slipstream route`, or one of a fleet, which names the others (default: the "
        "replicas of this user's server)",
    )
    parser.add_argument("--keys", metavar="DIR", help="folder with the keys for tcp:// addresses")
    parser.add_argument("--insecure", action="store_true", help="use tcp:// without keys")
    parser.add_argument("--watch", action="store_true", help="show it again every second")
    parser.set_defaults(run=replicas)


def replicas(arguments: argparse.Namespace) -> int:
    """Show a table; exit code 1 if no replica serves."""
    arguments.option_names["address"] = "ADDRESS"
    address = ",".join(arguments.addresses) or default_address()
    endpoint = server_endpoint(address, arguments.keys, insecure=arguments.insecure)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = Poller()
    until = time.monotonic() + _WITHIN_S
    fleet = _fleet(context, address, poller, until, endpoint.access)
    try:
        statuses = _statuses(fleet, poller, until)
        show_replicas(statuses)
        while arguments.watch:
            statuses = _statuses(fleet, poller, time.monotonic() + _EVERY_S, is_whole=True)
            show_replicas(statuses)
    finally:
        fleet.say_goodbye(time.monotonic())
        fleet.close()
        context.destroy(linger=0)
    return 0 if any(each.condition == "serving" for each in statuses) else 1


def _fleet(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    poller: Poller,
    until: float,
    access: Access | None,
) -> Cluster:
    """The session with the replicas at an address, or with all of the fleet that the one at it
    belongs to.
    """
    now = time.monotonic()
    cluster = Cluster(context, address, _WITHIN_S, poller, now, access=access)
    while not (cluster.is_fleet or cluster.is_attached) and now < until:
        now = time.monotonic()
        cluster.turn(now, dict(poller.poll(_POLL_MS)))
    cluster.become_fleet(now)
    return cluster


def _statuses(
    fleet: Cluster, poller: zmq.Poller, until: float, *, is_whole: bool = False
) -> list[ReplicaStatus]:
    """Turn the session until all replicas have said something, or `until`.

    is_whole: until `until` in any case.
    """
    while (now := time.monotonic()) < until:
        fleet.turn(now, dict(poller.poll(_POLL_MS)))
        if not is_whole and all(each.load is not None for each in fleet.statuses()):
            break
    return fleet.statuses()


def show_replicas(statuses: Sequence[ReplicaStatus]) -> None:
    """Print a table, a line for each."""
    lines = [_HEAD, *map(_cells, statuses)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.flush()


def _cells(status: ReplicaStatus) -> tuple[str, ...]:
    state = status.condition if not status.why else f"{status.condition}: {status.why}"
    name = status.name.partition(".")[0] or "-"
    load = status.load
    if load is None:
        return (name, status.model or "-", state, *["-"] * 4, status.address)
    numbers = (load.running, load.waiting, load.queued_tokens)
    blocks = f"{load.free_blocks:,} of {load.blocks:,}"
    shown = [f"{number:,}" for number in numbers]
    return (name, status.model or "-", state, *shown, blocks, status.address)
