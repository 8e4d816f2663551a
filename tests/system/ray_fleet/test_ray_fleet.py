"""`slipstream ray` on a cluster of one node, whose actors are killed.

Run by `scripts/ray-tests`, in an environment that has Ray. The tests share a fleet, and follow one
another: it has two replicas, loses some, grows, shrinks and ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.helpers.everywhere import by_curl, by_program
from tests.helpers.http_front import Raw
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ray_cluster import RayCluster, is_loopback, ray_cluster
from tests.helpers.ray_commands import Members, groups_and_actors, in_cluster, ray_command
from tests.helpers.routing import routing
from tests.helpers.stacks import spareless_stack

import slipstream
from slipstream.cli.main import main
from slipstream.client.placing.discovery import has_ray
from slipstream.demo_model import MODEL_PATH

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed here: scripts/ray-tests"),
]

FLEET = "ray://demo"
MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
NUM_STREAMS, NUM_TOKENS, NUM_BEFORE = 12, 200, 40
MAX_NUM_SEQS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Ray, which this process and those that it starts find."""
    with ray_cluster() as running, in_cluster(running):
        yield running


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of servers and clients."""
    folder = tmp_path_factory.mktemp("keys") / "keys"
    assert main(["keys", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def fleet(cluster: RayCluster, keys: Path) -> str:
    """A fleet of two replicas."""
    options = ["--replicas", "2", "--num-cpus", "0.5", "--max-num-seqs", str(MAX_NUM_SEQS)]
    said = ray_command("up", MODEL, "--name", "demo", "--keys", str(keys), *options)
    assert f"slipstream route {FLEET}" in said
    return FLEET


def answers(client: slipstream.Client, cluster: RayCluster, kill: bool) -> list[tuple[str, list]]:
    """Texts and ids of streams, during which an actor is killed."""
    streams = [
        client.stream(f"Chapter {index}", max_tokens=NUM_TOKENS, ignore_eos=True, seed=index)
        for index in range(NUM_STREAMS)
    ]
    ids: list[list[int]] = [[] for _ in streams]
    for stream, received in zip(streams, ids, strict=True):
        while len(received) < NUM_BEFORE:
            received += next(stream).token_ids
    if kill:
        cluster.of_actors("ReplicaActor")[0].kill()
    for stream, received in zip(streams, ids, strict=True):
        for delta in stream:
            received += delta.token_ids
    assert all(len(received) == NUM_TOKENS for received in ids)
    return [(stream.text, received) for stream, received in zip(streams, ids, strict=True)]


def test_nothing_listens_beyond_loopback(cluster: RayCluster, fleet: str) -> None:
    listeners = cluster.listeners()
    assert listeners
    assert all(map(is_loopback, listeners)), listeners


def test_streams_of_a_killed_replica_go_on_and_it_comes_back(
    cluster: RayCluster, fleet: str, keys: Path
) -> None:
    with Members(FLEET) as members, slipstream.Client(fleet, keys=keys) as client:
        addresses = members.until(2)
        undisturbed = answers(client, cluster, kill=False)
        for _ in range(2):  # one of them had streams
            assert answers(client, cluster, kill=True) == undisturbed
            changed = members.until(2, other_than=addresses)
            assert len(changed & addresses) == 1  # the other one is as it was
            addresses = changed
        assert answers(client, cluster, kill=False) == undisturbed
    assert all(map(is_loopback, cluster.listeners()))


def test_the_fleets_actor_may_be_killed(cluster: RayCluster, fleet: str) -> None:
    with Members(FLEET) as members:
        before = members.until(2)
        replicas = cluster.of_actors("ReplicaActor")
        [actor] = cluster.of_actors("Fleet")
        actor.kill()
        said = ray_command("scale", "3", "--name", "demo")
        assert "replica-2 serves" in said
        after = members.until(3)
    assert before < after
    assert set(replicas) < set(cluster.of_actors("ReplicaActor"))


def test_one_program_and_one_request_are_those_of_a_server(
    fleet: str, keys: Path, tmp_path: Path
) -> None:
    with spareless_stack(MODEL, http_port=0) as stack:
        said = by_program(stack.address)
    assert by_program(fleet, keys) == said
    with routing(tmp_path, fleet, "--keys", str(keys)) as (process, port):
        patience = Patience()
        while get_health(port) != ["serving"] * 3:
            patience.wait()
        assert by_curl(port) == said
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_it_shrinks_and_follows_its_requests(cluster: RayCluster, fleet: str, keys: Path) -> None:
    said = ray_command("scale", "1", "--name", "demo")
    assert "draining" in said
    assert len(cluster.of_actors("ReplicaActor")) == 1
    assert groups_and_actors() == (1, 2)
    ray_command("scale", "1:2", "--name", "demo")
    with Members(FLEET) as members, slipstream.Client(fleet, keys=keys) as client:
        members.until(1)
        streams = [
            client.stream("Chapter 1", max_tokens=4000, ignore_eos=True)
            for _ in range(MAX_NUM_SEQS)
        ]
        assert len(members.until(2)) == 2
        for stream in streams:
            stream.abort()
    shown = ray_command("status", "--name", "demo")
    assert "wanted: 2, of 1 to 2" in shown
    assert shown.count(" serving ") == 2


def test_nothing_is_left_of_it(cluster: RayCluster, fleet: str) -> None:
    stacks = {
        process
        for actor in cluster.of_actors("ReplicaActor")
        for process in [actor, *actor.children(recursive=True)]
    }
    assert len(stacks) > 6
    assert "demo has ended" in ray_command("down", "--name", "demo")
    _, alive = psutil.wait_procs(stacks, PATIENCE_S)
    assert not alive
    assert groups_and_actors() == (0, 0)
    assert not cluster.of_actors("ReplicaActor") + cluster.of_actors("Fleet")


def test_a_fleet_that_is_not_there_is_no_server(cluster: RayCluster, keys: Path) -> None:
    with pytest.raises(slipstream.ConnectionLostError, match="ray://none"):
        slipstream.Client("ray://none", keys=keys, timeout_s=0.1)


def test_a_model_that_cannot_be_loaded_leaves_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.cli.main", "ray", "up", tmp_path, "--insecure"],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "slipstream ray up: " in done.stderr
    assert groups_and_actors() == (0, 0)


def get_health(port: int) -> list[str]:
    """The states of the replicas that a front knows."""
    with Raw(port) as raw:
        return list(raw.get("/health").json["replicas"].values())
