"""What a landing runs in full: the changed first, the nearest of them before; then a sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.durations import Entry, Ledger, elapsed_s
from tests.ledger.inputs import Inputs
from tests.ledger.plan import Unit, describe, divide, units_of
from tests.ledger.tools import TOOLS

BUDGET_S = 100.0


@st.composite
def all_units(draw: st.DrawFn) -> list[Unit]:
    found = []
    for at in range(draw(st.integers(0, 12))):
        wall = draw(st.floats(0.1, 200))
        cost = Entry(wall=wall, cpu=draw(st.floats(0, wall)), starts=draw(st.booleans()))
        script = draw(st.sampled_from(["", "", "scripts/ray-tests"]))
        is_changed = draw(st.booleans())
        distance = draw(st.integers(0, 9)) if is_changed else 99
        found.append(Unit((f"tests/test_{at}.py",), cost, script, is_changed, distance))
    return found


@given(all_units(), st.floats(0, 150), st.text(max_size=4))
def test_the_time_is_kept_and_nothing_is_lost(found: list[Unit], quick_s: float, seed: str) -> None:
    plan = divide(found, quick_s, BUDGET_S, seed)
    assert plan == divide(found[::-1], quick_s, BUDGET_S, seed)  # the same however they are listed
    chosen = [*plan.changed, *plan.drawn]
    assert sorted(each.files for each in (*chosen, *plan.left)) == sorted(
        each.files for each in found
    )
    assert not chosen or quick_s + elapsed_s(unit.cost for unit in chosen) <= BUDGET_S
    assert all(unit.is_changed for unit in plan.changed)
    assert not any(unit.is_changed or unit.script for unit in plan.drawn)
    for unit in plan.left:  # what is left has no room, or is not worth its environment
        room = quick_s + elapsed_s([*(each.cost for each in chosen), unit.cost]) <= BUDGET_S
        assert not room or (unit.script and not unit.is_changed)
    assert set(plan.lines()) >= {file for unit in chosen for file in unit.files}
    assert ("scripts/ray-tests" in plan.lines()) == any(unit.script for unit in chosen)
    assert all(
        unit.files[0].removeprefix("tests/test_")[:-3] in describe(plan, "0") for unit in found
    )


def unit(name: str, *, changed: bool, distance: int = 99, starts: bool = False) -> Unit:
    return Unit((name,), Entry(wall=30.0, cpu=20.0, starts=starts), "", changed, distance)


def test_the_nearest_come_first_and_then_what_starts_processes() -> None:
    found = [
        unit("unchanged", changed=False),
        unit("starts", changed=False, starts=True),
        unit("far", changed=True, distance=7),
        unit("near", changed=True, distance=1),
    ]
    names = [
        sorted(each.files[0] for each in (*plan.changed, *plan.drawn))
        for plan in (divide(found, 0.0, budget, "") for budget in (10.0, 20.0, 30.0, 40.0))
    ]
    assert names[0] == ["near"]
    assert names[1] == ["far", "near"]
    assert names[2] == ["far", "near", "starts"]
    assert names[3] == ["far", "near", "starts", "unchanged"]


def test_another_commit_draws_another_sample() -> None:
    found = [unit(f"tests/test_{at}.py", changed=False) for at in range(30)]
    plans = [divide(found, 0.0, 100.0, seed) for seed in "abcdefgh"]
    drawn = {tuple(sorted(each.files for each in plan.drawn)) for plan in plans}
    assert len(drawn) > 4


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs()


def test_files_whose_digest_is_another_have_changed(inputs: Inputs) -> None:
    one, other, new = (
        f"tests/engine_core/scheduler/test_{name}.py"
        for name in ("scheduler", "scheduler_prefix", "logprob_budget")
    )
    entries = {
        one: Entry(wall=30.0, cpu=10.0, quick=15.0, digest=inputs.digest(one)),
        other: Entry(wall=30.0, cpu=10.0, digest="another"),
    }
    touched = ["engine_core/slipstream_core/scheduler/scheduler.py"]
    found = {
        unit.files[0]: unit
        for unit in units_of([one, other, new], Ledger(entries), inputs, touched)
    }
    assert [found[file].is_changed for file in (one, other, new)] == [False, True, True]
    assert found[one].cost.wall == 15.0  # beside the quick suite
    assert found[one].cost.cpu == 5.0
    assert found[other].distance == 1


def test_a_tool_with_an_environment_is_one_unit(inputs: Inputs) -> None:
    files = [file for file in inputs.test_files() if file.startswith("tests/system/ray_fleet")]
    files += [file for file in inputs.test_files() if file.startswith("tests/benchmarks/fleet")]
    found = units_of(files, Ledger({}), inputs, [])
    [ray] = [unit for unit in found if unit.script]
    assert ray.script == TOOLS["ray"].script
    assert len(ray.files) > 1
    assert len(found) == 1 + len(files) - len(ray.files)
