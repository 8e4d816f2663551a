"""The plan of one model over several machines: which ranks are where, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.cli.keys import add_rank, make_folder
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import BadRequestError
from slipstream.stack.plan.fleet_plan import plan_fleet
from slipstream.stack.plan.node_plan import plan_node
from slipstream.stack.plan.nodes import local_ranks
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream_core.config import CoreConfig, NodesConfig, RemoteRankConfig

SIZES = {"tensor_parallel_size": 4, "nnodes": 2}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("keys")
    make_folder(folder)
    add_rank(folder, "machine-1")
    return str(folder)


def with_clients_keys(given: dict[str, Any], folder: Path) -> None:
    """Fill in a folder that has the keys of a server and a client alone."""
    if given.get("keys") == "a client's":
        given["keys"] = str(folder / "keys")
        make_folder(folder / "keys")


def core_of(folder: Path, **options: Any) -> CoreConfig:
    core = plan_stack(settings_from(options), folder).children[0]
    return msgspec.json.decode(core.config, type=CoreConfig)


def test_machine_0_is_told_where_it_listens(tmp_path: Path, keys: str) -> None:
    given = {**SIZES, "master_addr": "10.0.0.5", "keys": keys, "hang_timeout_s": 7.0}
    core = core_of(tmp_path, **given, join_timeout_s=30.0)
    assert core.nodes == NodesConfig(
        num=2, address="tcp://10.0.0.5:29501", keys=keys, join_timeout_s=30.0, silent_s=7.0
    )
    assert (core.num_nodes, core.num_local_ranks) == (2, 2)
    worker = plan_stack(settings_from(given), tmp_path).children[1]
    assert msgspec.json.decode(worker.config)["keys"] is None, "clients are not let in by these"


def test_one_machine_is_the_default(tmp_path: Path) -> None:
    core = core_of(tmp_path, tensor_parallel_size=4)
    assert (core.nodes, core.num_nodes, core.num_local_ranks) == (None, 1, 4)


def test_another_machine_runs_its_share_of_the_ranks_and_nothing_else(
    tmp_path: Path, keys: str
) -> None:
    given = {
        **SIZES,
        "node_rank": 1,
        "master_addr": "machine-0.cluster",
        "master_port": 7001,
        "keys": keys,
        "device": "cpu",
        "threads": 3,
        "http_port": 8000,
        "max_restarts": 4,
    }
    settings = settings_from(given)
    plan = plan_node(settings, tmp_path)
    assert [child.name for child in plan.children] == ["rank-2", "rank-3"]
    assert list(local_ranks(settings)) == [2, 3]
    assert (plan.address, plan.listen, plan.max_restarts) == (
        "tcp://machine-0.cluster:7001",
        None,
        4,
    )
    for index, child in enumerate(plan.children, 2):
        assert child.argv[-1] == "slipstream_core.ranks.remote_follower"
        assert child.has_spare
        assert child.forks == child.argv[-1]
        config = msgspec.json.decode(child.config, type=RemoteRankConfig)
        assert (config.index, config.core.threads, config.core.model) == (index, 3, str(MODEL_PATH))
        assert config.core.nodes is not None
        assert config.core.nodes.address == plan.address
    on_cards = plan_node(settings_from({**given, "device": "cuda"}), tmp_path)
    assert [child.forks for child in on_cards.children] == [None, None]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"nnodes": 3}, "nnodes: got 3, allowed: a divisor of tensor_parallel_size=4"),
        ({"nnodes": 1}, "master_addr: got '127.0.0.1', allowed: only beside nnodes"),
        ({"nnodes": 1, "master_addr": None, "node_rank": 1}, "node_rank: got 1, allowed: only"),
        ({"node_rank": 2}, "node_rank: got 2, allowed: an integer < 2"),
        ({"node_rank": 1}, "node_rank: got 1, allowed: 0, which serves"),
        ({"master_addr": None}, "master_addr is missing"),
        ({"master_addr": "0.0.0.0"}, "allowed: one address of machine 0"),
        ({"master_addr": "machine-0"}, "master_addr: got 'machine-0', allowed: an IP address"),
        ({"insecure": False}, "master_addr: got '127.0.0.1', allowed: an IP address of machine 0"),
        ({"master_addr": "10.0.0.5"}, "insecure: got '?tcp://10.0.0.5:29501'?, allowed: a loop"),
        ({"insecure": False, "keys": "/nowhere"}, "keys: got '/nowhere'"),
        ({"insecure": False, "keys": "a client's"}, "allowed: a folder with a rank's key"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    given = {**SIZES, "master_addr": "127.0.0.1", "insecure": True, **options}
    given = {name: value for name, value in given.items() if value is not None}
    with_clients_keys(given, tmp_path)
    with pytest.raises(BadRequestError, match=why):
        plan_stack(settings_from(given), tmp_path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"master_addr": "machine-0"}, "insecure: got"),
        ({"insecure": False}, "master_addr: got '127.0.0.1', allowed: the address or the host"),
        ({"insecure": False, "keys": "/nowhere"}, "keys: got '/nowhere"),
        ({"insecure": False, "keys": "a client's"}, "allowed: a rank's secret file, NAME.rank.key"),
        ({"model": "simulated:"}, "tensor_parallel_size: got 4, allowed: 1 with the model"),
    ],
)
def test_what_another_machine_cannot_use_is_named(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    given = {**SIZES, "node_rank": 1, "master_addr": "127.0.0.1", "insecure": True, **options}
    with_clients_keys(given, tmp_path)
    with pytest.raises(BadRequestError, match=why):
        plan_node(settings_from(given), tmp_path)


def test_replicas_are_on_one_machine(tmp_path: Path) -> None:
    given = {**SIZES, "device": "cpu", "master_addr": "127.0.0.1", "insecure": True}
    with pytest.raises(BadRequestError, match="nnodes: got 2, allowed: 1 for replicas"):
        plan_fleet(settings_from(given), tmp_path, 2)
