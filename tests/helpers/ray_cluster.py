"""A Ray cluster on loopback, of one node or several, and what runs and listens there."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port

_OBJECT_STORE_BYTES = 80_000_000  # Ray's least is 75 MB
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_METRICS_COLLECTION": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "token",  # another user of the machine may not command it
    # else Ray takes the machine's own address where it is given 127.0.0.1; see decision 039
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
_STARTED = b"Ray runtime started"  # as `ray start` says
# `ray start` refuses a second node where it is to stay on loopback
_OTHER_NODE = """
import signal, sys
from ray._private.node import Node
from ray._private.parameter import RayParams
address, num_cpus, object_store_bytes = sys.argv[1:]
node = Node(
    RayParams(
        gcs_address=address,
        redis_address=address,
        node_ip_address="127.0.0.1",
        num_cpus=float(num_cpus),
        num_gpus=0,
        object_store_memory=int(object_store_bytes),
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=None,
        include_log_monitor=False,
    ),
    head=False,
    shutdown_at_exit=True,
    spawn_reaper=False,
)
print("Ray runtime started", flush=True)
signal.pause()
"""


@dataclass(frozen=True)
class RayCluster:
    """environment: what processes need to find it, beside their own. nodes: what runs each of
    its nodes.
    """

    nodes: Sequence[subprocess.Popen[bytes]]
    address: str
    environment: Mapping[str, str]

    def processes(self) -> list[psutil.Process]:
        """All that run, those of stacks among them."""
        return [
            each
            for node in self.nodes
            if node.poll() is None
            for each in psutil.Process(node.pid).children(recursive=True)
        ]

    def of_actors(self, kind: str) -> list[psutil.Process]:
        """Those of the actors of a class."""
        return [each for each in self.processes() if title_of(each) == f"ray::{kind}"]

    def listeners(self) -> set[str]:
        """The addresses at which any of them listens, without ports."""
        found = set()
        for process in self.processes():
            try:
                sockets = process.net_connections("tcp")
            except psutil.Error:
                continue  # it has ended
            found |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        return found


def title_of(process: psutil.Process) -> str:
    """What `ps` calls it: of an actor's process, Ray's name for it. Empty: it has ended."""
    try:
        return process.cmdline()[0]
    except (psutil.Error, IndexError):
        return ""


def is_loopback(address: str) -> bool:
    """Whether nothing but this machine reaches it."""
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


@contextmanager
def ray_cluster(num_cpus: int = 2, num_nodes: int = 1) -> Iterator[RayCluster]:
    """Starts the cluster, and ends all of its processes. num_cpus: of each node."""
    # a short path, as Ray has sockets below it
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    address = f"127.0.0.1:{free_port()}"
    environment = {**_QUIET, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": address}
    head = [
        *("-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", address.partition(":")[2], "--temp-dir", str(folder)),
        *("--num-cpus", str(num_cpus), "--num-gpus", "0"),
        *("--object-store-memory", str(_OBJECT_STORE_BYTES)),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--include-dashboard", "false", "--include-log-monitor", "false"),
        "--disable-usage-stats",
    ]
    other = ["-c", _OTHER_NODE, address, str(num_cpus), str(_OBJECT_STORE_BYTES)]
    nodes: list[subprocess.Popen[bytes]] = []
    cluster = RayCluster(nodes, address, environment)
    try:
        for index in range(num_nodes):
            log = folder / f"start-{index}.log"
            with log.open("wb") as said:
                node = subprocess.Popen(
                    [sys.executable, *(other if index else head)],
                    env={**without_ray(), **environment},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            nodes.append(node)
            patience = Patience()
            while _STARTED not in log.read_bytes():
                assert node.poll() is None, log.read_text()
                patience.check(log.read_text())
        yield cluster
    finally:
        everything = cluster.processes()
        for each in [*everything, *nodes]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for node in nodes:
            node.wait(PATIENCE_S)
        psutil.wait_procs(everything, PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def without_ray() -> dict[str, str]:
    """This process's environment without what would name another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
