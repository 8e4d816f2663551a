"""A replica whose ranks Ray spreads over machines: a cluster of two nodes, whose actors are killed.

Run by `scripts/ray-tests`. The tests share a fleet of one replica, and follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.rank_streams import once_under_way, texts
from tests.helpers.ray_cluster import RayCluster, is_loopback, ray_cluster
from tests.helpers.ray_commands import Members, groups_and_actors, in_cluster, ray_command
from tests.helpers.stacks import spareless_stack

import slipstream
from slipstream.client.placing.discovery import has_ray

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed here: scripts/ray-tests"),
]

FLEET = "ray://spread"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Ray on two nodes, which this process and those that it starts find."""
    with ray_cluster(num_cpus=1, num_nodes=2) as running, in_cluster(running):
        yield running


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The texts of one rank."""
    with spareless_stack(device="cpu") as stack, stack.client() as client:
        return texts(client, lambda _: None)


@pytest.fixture(scope="module")
def fleet(cluster: RayCluster) -> str:
    """A fleet of one replica, with a rank on each node."""
    sizes = ["--tensor-parallel-size", "2", "--nnodes", "2", "--num-cpus", "1"]
    said = ray_command("up", "--name", "spread", "--device", "cpu", "--insecure", *sizes)
    assert f"slipstream route {FLEET}" in said
    return FLEET


def test_two_nodes_say_what_one_rank_says(
    cluster: RayCluster, fleet: str, expected: list[str]
) -> None:
    [replica], [ranks] = cluster.of_actors("ReplicaActor"), cluster.of_actors("RankActor")
    assert replica.ppid() != ranks.ppid()  # each node has a parent of its own
    assert groups_and_actors() == (1, 2)
    assert all(map(is_loopback, cluster.listeners())), cluster.listeners()
    with slipstream.Client(fleet, insecure=True) as client:
        assert texts(client, lambda _: None) == expected


def test_streams_outlive_the_actor_of_ranks(
    cluster: RayCluster, fleet: str, expected: list[str]
) -> None:
    [ranks] = cluster.of_actors("RankActor")
    with slipstream.Client(fleet, insecure=True) as client:
        assert texts(client, once_under_way(ranks.kill)) == expected
    [successor] = cluster.of_actors("RankActor")
    assert successor != ranks


def test_ranks_end_with_their_replica_and_come_back_with_it(
    cluster: RayCluster, fleet: str, expected: list[str]
) -> None:
    [replica], [ranks] = cluster.of_actors("ReplicaActor"), cluster.of_actors("RankActor")
    theirs = [ranks, *ranks.children(recursive=True)]
    with Members(fleet) as members, slipstream.Client(fleet, insecure=True) as client:
        before = members.until(1)
        assert texts(client, once_under_way(replica.kill)) == expected
        members.until(1, other_than=before)
        _, alive = psutil.wait_procs(theirs, PATIENCE_S)
        assert not alive
        assert texts(client, lambda _: None) == expected


def test_nothing_is_left_of_it(cluster: RayCluster, fleet: str) -> None:
    processes = {
        process
        for kind in ("ReplicaActor", "RankActor")
        for actor in cluster.of_actors(kind)
        for process in [actor, *actor.children(recursive=True)]
    }
    assert "spread has ended" in ray_command("down", "--name", "spread")
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    assert not alive
    assert groups_and_actors() == (0, 0)


def test_fewer_nodes_than_machines_wait_for_room(cluster: RayCluster) -> None:
    sizes = ["--tensor-parallel-size", "3", "--nnodes", "3", "--num-cpus", "0.1"]
    with pytest.raises(AssertionError, match="Ray has no room for it yet"):
        ray_command("up", "--name", "wide", "--insecure", "--within", "10", *sizes)
    assert "wide has ended" in ray_command("down", "--name", "wide", "--now")
    assert groups_and_actors() == (0, 0)
