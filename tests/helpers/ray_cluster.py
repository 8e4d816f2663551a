"""A Ray cluster of one node on loopback, and what runs and listens there."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
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
    # else Ray takes the machine's own address where it is given 127.0.0.1; see decision 102
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@dataclass(frozen=True)
class RayCluster:
    """environment: what processes need to find it, beside their own."""

    process: subprocess.Popen[bytes]
    address: str
    environment: Mapping[str, str]

    def processes(self) -> list[psutil.Process]:
        """All that run, those of stacks among them."""
        return psutil.Process(self.process.pid).children(recursive=True)

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
def ray_cluster(num_cpus: int = 2) -> Iterator[RayCluster]:
    """Starts the cluster, and ends all of its processes."""
    # a short path, as Ray has sockets below it
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    address = f"127.0.0.1:{free_port()}"
    environment = {**_QUIET, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": address}
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", address.partition(":")[2], "--temp-dir", str(folder)),
        *("--num-cpus", str(num_cpus), "--num-gpus", "0"),
        *("--object-store-memory", str(_OBJECT_STORE_BYTES)),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--include-dashboard", "false", "--include-log-monitor", "false"),
        "--disable-usage-stats",
    ]
    log = folder / "start.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            env={**without_ray(), **environment},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    cluster = RayCluster(process, address, environment)
    try:
        patience = Patience()
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            patience.check(log.read_text())
        yield cluster
    finally:
        everything = [*cluster.processes(), psutil.Process(process.pid)]
        for each in everything:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(PATIENCE_S)
        psutil.wait_procs(everything, PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


def without_ray() -> dict[str, str]:
    """This process's environment without what would name another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
