"""The actor of a fleet, under the name that Ray shows."""

from __future__ import annotations

import logging
import threading
import time

import ray
from ray.actor import ActorHandle

from slipstream_ipc.telemetry.logs import configure_logging
from slipstream_ray.actor_messages import FleetSpec, decoded, encoded
from slipstream_ray.cluster import NAMESPACE
from slipstream_ray.controller import Controller
from slipstream_ray.replica_launcher import RayLauncher
from slipstream_ray.scaling import ReplicaBounds

_EVERY_S = 0.5
_AT_ONCE = 8  # calls of its methods

logger = logging.getLogger(__name__)


class Fleet:
    """Keeps the replicas of a fleet, and says where they are. It may be restarted at any time.

    Its methods wait for a turn of the controller at most.
    """

    def __init__(self, spec: bytes) -> None:
        """spec: a FleetSpec."""
        configure_logging("fleet")
        given = decoded(spec, FleetSpec)
        self._controller = Controller(given, RayLauncher(given), time.monotonic())
        self._lock = threading.Lock()  # of the controller
        self._acts = threading.Event()
        threading.Thread(target=self._run, name="slipstream-fleet", daemon=True).start()

    def members(self) -> str:
        """The addresses of the replicas, a line each; empty while not all are known again."""
        with self._lock:
            if self._controller.is_finding:
                return ""
            return "\n".join(self._controller.addresses())

    def status(self) -> bytes:
        """A FleetStatus."""
        with self._lock:
            return encoded(self._controller.status())

    def scale(self, least: int, most: int) -> None:
        """Have so many replicas; none: drain all."""
        with self._lock:
            self._controller.scale(ReplicaBounds(least, most))
        self._acts.set()

    def remove_all(self) -> None:
        """End all replicas at once."""
        with self._lock:
            self._controller.remove_all()

    def _run(self) -> None:
        while True:
            self._acts.wait(_EVERY_S)
            self._acts.clear()
            try:
                with self._lock:
                    self._controller.turn(time.monotonic())
            except Exception:  # of Ray, which may be away; without this loop nothing is kept
                logger.exception("a turn has failed; the next one is taken all the same")


def start_fleet(spec: FleetSpec) -> ActorHandle:
    """Start the actor of a fleet, which starts the replicas."""
    actor = ray.remote(Fleet).options(
        name=spec.name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=_AT_ONCE,
    )
    return actor.remote(encoded(spec))
