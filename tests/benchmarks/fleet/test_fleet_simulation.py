"""`slipstream bench fleet-simulation`: nothing is lost, and placing has the effect it is for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slipstream.cli.main import main
from slipstream_bench.fleet.fleet_simulation import SCENARIOS
from slipstream_bench.fleet.policies import POLICIES
from slipstream_bench.fleet.simulation import Scenario, Simulation

SMALL = Scenario("small", 6, num_fronts=2, seconds=40.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_repeats_itself(policy):
    rows = [Simulation(SMALL, policy, 1).run() for _ in range(2)]
    for row in rows:
        del row["choose_cpu_us"]
    assert rows[0] == rows[1]
    assert rows[0]["requests"] > 100


def test_lost_and_drained_replicas_lose_no_request():
    """Each request ends once, wherever it was moved."""
    scenario = replace(
        SMALL,
        num_replicas=8,
        num_cells=2,
        seconds=60.0,
        lose_every_s=2.0,
        drain_every_s=3.0,
        cell_lost_at=0.6,
    )
    simulation = Simulation(scenario, "slipstream", 1)
    ended, submitted = [], []
    simulation._ended = _noting(simulation._ended, ended)
    for cell in simulation._cells:
        for replica in cell.replicas:
            replica.submit = _noting(replica.submit, submitted)
    row = simulation.run()
    assert row["moved"] > 20
    running = sum(replica.num_running for cell in simulation._cells for replica in cell.replicas)
    assert len(set(map(id, ended))) == len(ended)
    assert len(set(map(id, submitted))) == len(ended) + running
    assert len(submitted) == len(ended) + running + row["moved"]


def test_placing_finds_prompts_in_caches_and_keeps_the_load_even():
    """The goals at a small size: hits near the oracle's, and far from those of round robin."""
    saturated = replace(SCENARIOS["saturated"], seconds=80.0)
    rows = {
        name: Simulation(saturated, name, 1).run()
        for name in ("round_robin", "slipstream", "oracle")
    }
    ours = rows["slipstream"]
    assert ours["hit_percent"] >= 0.93 * rows["oracle"]["hit_percent"]
    assert ours["hit_percent"] >= 1.5 * rows["round_robin"]["hit_percent"]
    assert ours["most_over_mean"] <= 1.15


def test_the_command_writes_its_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = ["--scenarios", "steady", "--policies", "round_robin,slipstream"]
    assert (
        main(["bench", "fleet-simulation", *words, "--simulated-s", "20", "--json", str(file)]) == 0
    )
    rows = json.loads(file.read_text())
    assert [row["policy"] for row in rows] == ["round_robin", "slipstream"]
    assert "hit_percent" in capsys.readouterr().out


def test_an_unknown_policy_is_named(capsys):
    assert main(["bench", "fleet-simulation", "--policies", "best"]) != 0
    assert "--policies: got 'best', allowed: one of random" in capsys.readouterr().err


def _noting(call, requests):
    def noting(request, *rest):
        requests.append(request)
        call(request, *rest)

    return noting
