"""`slipstream ray` on a cluster of a test, and what there is of fleets afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ray_cluster import RayCluster

from slipstream.client.endpoints import check_member
from slipstream.client.placing.discovery import member_source
from slipstream_ipc.transport.curve import Access

# what a connection to Ray finds there of fleets
_LEFT = """
import ray
from slipstream_ray.cluster import connect
connect()
table = ray.util.placement_group_table().values()
groups = [each["name"] for each in table if each["state"] != "REMOVED"]
print(len(groups), len(ray.util.list_named_actors(all_namespaces=True)))
"""


@contextmanager
def in_cluster(cluster: RayCluster) -> Iterator[RayCluster]:
    """Lets this process, and those that it starts, find the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster


def ray_command(*words: str) -> str:
    """What a command of `slipstream ray` says."""
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "ray", *words],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def groups_and_actors() -> tuple[int, int]:
    """How many placement groups and named actors there are in the cluster."""
    done = subprocess.run(
        [sys.executable, "-c", _LEFT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    groups, actors = map(int, done.stdout.split())
    return groups, actors


class Members:
    """The addresses of a fleet as a router hears them."""

    def __init__(self, fleet: str) -> None:
        access = Access(insecure=True)
        self._source = member_source(fleet, partial(check_member, access=access))

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def until(self, number: int, *, other_than: frozenset[str] = frozenset()) -> frozenset[str]:
        """Wait for so many that are not all the same as these."""
        patience = Patience()
        while True:
            found = frozenset(self._source.addresses(0.0))
            if len(found) == number and found != other_than:
                return found
            patience.wait(found)
