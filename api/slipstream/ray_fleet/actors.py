"""The classes that Ray runs as actors, under these names."""

from __future__ import annotations

import logging
import threading
import time

import ray
from ray.exceptions import RayError

from slipstream.ray_fleet import replica
from slipstream.ray_fleet.cluster import RayHost
from slipstream.ray_fleet.controller import Controller
from slipstream.ray_fleet.messages import FleetSpec, decoded, encoded
from slipstream.ray_fleet.scaling import Bounds
from slipstream_ipc.telemetry.logs import configure_logging

_EVERY_S = 0.5

logger = logging.getLogger(__name__)


class Fleet:
    """Keeps the replicas of a fleet, and says where they are. It may be restarted at any time.

    Its methods wait for a turn of the controller at most.
    """

    def __init__(self, spec: bytes) -> None:
        """spec: a FleetSpec."""
        configure_logging("fleet")
        given = decoded(spec, FleetSpec)
        self._controller = Controller(given, RayHost(given), time.monotonic())
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
            self._controller.scale(Bounds(least, most))
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
            except (RayError, RuntimeError, ValueError):
                logger.exception("Ray did not do what it was asked; it is asked again")


class Replica(replica.Replica):
    """A replica at the address of its Ray node."""

    def __init__(self, spec: bytes, name: str) -> None:
        configure_logging("replica")
        super().__init__(spec, name, ray.util.get_node_ip_address())
