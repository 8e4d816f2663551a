"""`slipstream bench fleet-simulation`: policies of placing over simulated replicas.

The replicas are a model (`slipstream_bench.fleet.replica`), the chats are made up
(`slipstream_bench.fleet.chat_workload`), the code that places requests is the product's own
(`slipstream.fleet.placement`). Time is simulated in slices of 50 ms, so a TTFT is a multiple of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from slipstream.cli.options.parser import Parser
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, OptionType, add, fill_in, integer, many, number
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_bench.fleet.policies import POLICIES
from slipstream_bench.fleet.simulation import Scenario, Simulation

_NEAR_SATURATION = 2.3  # conversations a second and replica
_THOUSAND = Scenario("thousand", 1000, num_cells=16, num_fronts=8)
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("steady", 16),
        Scenario("saturated", 8, conversations_per_s=_NEAR_SATURATION),
        Scenario("one_front", 8, num_fronts=1, conversations_per_s=_NEAR_SATURATION),
        Scenario("slow_replica", 8, conversations_per_s=_NEAR_SATURATION, slow_speed=0.4),
        Scenario("stale_loads", 16, num_fronts=8, load_interval_s=2.0),
        Scenario("popular_prompt", 16, is_popular=True),
        Scenario("losses_and_drains", 16, lose_every_s=15.0, drain_every_s=20.0),
        Scenario("many", 64, num_fronts=8),
        _THOUSAND,
        replace(_THOUSAND, name="thousand_popular_prompt", is_popular=True),
        replace(
            _THOUSAND,
            name="thousand_losses",
            lose_every_s=1.0,
            drain_every_s=1.0,
            cell_lost_at=0.6,
        ),
    )
}
"""By name, what is simulated."""

_BY = ("scenario", "policy")
_COLUMNS = (
    *(*_BY, "requests", "hit_percent", "ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "tpot_ms"),
    *("most_over_mean", "waiting_at_end", "moved", "choose_cpu_us", "runs"),
)


def _name_of(what: str, allowed: Sequence[str]) -> OptionType:
    return OptionType(str, lambda value: value in allowed, f"one of {', '.join(allowed)}", what)


_OPTIONS = (
    Option(
        "scenarios",
        many(_name_of("NAME", tuple(SCENARIOS))),
        "what is simulated",
        ("steady", "saturated"),
        ("steady",),
    ),
    Option(
        "policies",
        many(_name_of("NAME", tuple(POLICIES))),
        "ways to place requests",
        tuple(POLICIES),
        ("round_robin", "slipstream"),
    ),
    Option(
        "simulated_s",
        number(lambda value: 10 <= value <= 3600, "seconds in [10, 3600]"),
        "length of a run; the first 40 %% are not counted",
        200.0,
        60.0,
    ),
    Option("seed", integer(0), "of the first run; each further run has the next one", 1),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("simulation"), _OPTIONS)
    add_common(parser, runs=1)
    parser.set_defaults(run=bench_fleet_simulation)


def bench_fleet_simulation(arguments: argparse.Namespace) -> int:
    """Simulate and report; exit code 0."""
    check_common(arguments)
    given = fill_in(arguments, _OPTIONS)
    num_runs: dict[tuple[str, str], int] = {}

    def measure(point: tuple[str, str]) -> list[Row]:
        seed = given["seed"] + num_runs.get(point, 0)
        num_runs[point] = num_runs.get(point, 0) + 1
        scenario = replace(SCENARIOS[point[0]], seconds=given["simulated_s"])
        return [Simulation(scenario, point[1], seed).run() | {"seed": seed}]

    points = [(name, policy) for name in given["scenarios"] for policy in given["policies"]]
    rows = median_rows(in_rounds(arguments.runs, points, measure), _BY)
    print(
        f"Simulated replicas and chats, {given['simulated_s']:g} s, the first 40 % of them not "
        f"counted; medians of {arguments.runs}."
    )
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, arguments.png)
    return 0


def _draw(rows: Sequence[Row], file: str) -> None:
    found = {(row["scenario"], row["policy"]): float(row["hit_percent"] or 0) for row in rows}
    scenarios, policies = (list(dict.fromkeys(str(row[name]) for row in rows)) for name in _BY)
    grouped_bars(
        file,
        scenarios,
        {policy: [found.get((scenario, policy)) for scenario in scenarios] for policy in policies},
        title="Prompt tokens found in a cache, by policy of placing (simulated replicas)",
        x_label="scenario",
        y_label="% of prompt tokens",
    )
