"""The ledger: what is kept of a run, what tests are expected to take, how files are divided."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.durations import (
    QUICK_CPU_S,
    Entry,
    Ledger,
    elapsed_s,
    file_of,
    later_of,
    quick_s,
    update,
)
from tests.ledger.scheduling import units

FILE = "tests/ledger/test_durations.py"
NAMES = st.sampled_from(["tests/a.py", "tests/b.py", "tests/a.py::f", "tests/b.py::C::g"])
SECONDS = st.floats(0, 1000)
ENTRIES = st.builds(Entry, SECONDS, SECONDS, st.integers(0, 99), st.booleans())


@given(st.dictionaries(NAMES, ENTRIES))
def test_a_ledger_is_read_as_it_was_written(entries: dict[str, Entry]) -> None:
    text = Ledger(entries).dump()
    lines = text.splitlines()[1:-1]
    assert [line.partition('": ')[0][1:] for line in lines if line] == sorted(entries)
    assert set(json.loads(text)) == set(entries)


def test_lines_are_kept_where_times_are_much_the_same(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    update(path, {FILE: ({f"{FILE}::f": Entry(10.0, 5.0, 2, True)}, "green")})
    before = path.read_text()
    update(path, {FILE: ({f"{FILE}::f": Entry(14.0, 4.0, 2, True)}, "green")})
    assert path.read_text() == before
    update(path, {FILE: ({f"{FILE}::f": Entry(16.0, 4.0, 2, True)}, "green")})
    assert Ledger.read(path).entries[FILE].wall == 16.0


def test_what_failed_keeps_the_digest_of_its_last_green_run(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    tests = {f"{FILE}::f": Entry(1.0, 1.0, 1)}
    update(path, {FILE: (tests, "green")})
    update(path, {FILE: (tests, "")})
    assert Ledger.read(path).entries[FILE].digest == "green"
    update(path, {FILE: (tests, "later")})
    assert Ledger.read(path).entries[FILE].digest == "later"


def test_tests_and_files_that_are_gone_lose_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    gone = "tests/test_gone.py"
    old = {f"{FILE}::old": Entry(6.0, 1.0, 1)}
    update(path, {FILE: (old, ""), gone: ({f"{gone}::f": Entry(6.0, 1.0, 1)}, "")})
    assert set(Ledger.read(path).entries) == {FILE, f"{FILE}::old"}
    update(path, {FILE: ({f"{FILE}::new": Entry(6.0, 1.0, 1)}, "")})
    assert set(Ledger.read(path).entries) == {FILE, f"{FILE}::new"}


def test_the_quick_part_of_a_file_is_two_cases_of_what_is_quick() -> None:
    ledger = Ledger({})
    tests = {
        f"{FILE}::many": Entry(wall=10.0, cases=10, quick=quick_s([1.0] * 10)),
        f"{FILE}::marked": Entry(wall=1.0, cases=1, quick=quick_s([])),
        f"{FILE}::long": Entry(wall=6.0, cases=1, quick=6.0),
        f"{FILE}::starts": Entry(wall=1.0, cases=1, starts=True, quick=1.0),
    }
    ledger.replace(FILE, tests, "")
    entry = ledger.entries[FILE]
    assert (entry.wall, entry.quick, entry.starts, entry.cases) == (18.0, 2.0, False, 13)
    assert ledger.starting() == {FILE}
    assert ledger.is_marked(f"{FILE}::long") == (False, True)
    assert ledger.is_marked(f"{FILE}::starts[case]") == (True, False)
    assert ledger.is_marked(f"{FILE}::unknown") == (False, False)


COSTS = st.lists(st.tuples(st.floats(0, 2 * QUICK_CPU_S), st.booleans()), max_size=9)


@given(COSTS)
def test_a_file_has_its_cheapest_tests_in_the_quick_suite(costs: list[tuple[float, bool]]) -> None:
    tests = {
        str(at): Entry(wall=4 * cost, cpu=2 * cost, quick=2 * cost, cases=1, pinned=pinned)
        for at, (cost, pinned) in enumerate(costs)
    }
    later = later_of(tests)
    assert not any(tests[name].pinned for name in later)
    others = sorted(cost for cost, pinned in costs if not pinned)
    kept = sorted(tests[name].quick_cpu for name in tests.keys() - later if not tests[name].pinned)
    assert kept == others[: len(kept)]
    assert len(later) < max(1, len(tests))
    if len(kept) > 1 or (kept and len(others) < len(tests)):
        assert sum(kept) <= QUICK_CPU_S + 1e-9
    if later:  # there is no room for one more
        assert sum(others[: len(kept) + 1]) > QUICK_CPU_S - 1e-9


def test_what_a_run_of_the_quick_suite_finds_too_much_is_later_until_it_is_cheaper(
    tmp_path: Path,
) -> None:
    path = tmp_path / "durations.json"

    def tests(**costs: float) -> dict[str, Entry]:
        return {
            f"{FILE}::{name}": Entry(wall=cost, cpu=cost, cases=2, quick=cost)
            for name, cost in costs.items()
        }

    def measure(**costs: float) -> Ledger:
        update(path, {FILE: (tests(**costs), "")}, of_quick=True)
        return Ledger.read(path)

    assert not measure(cheap=0.5, dear=3.0).entries  # of a file that has never been run whole
    update(path, {FILE: (tests(cheap=0.5, dear=1.0), "green")})
    whole = Ledger.read(path).entries[FILE]
    assert whole.quick == 1.5
    ledger = measure(cheap=0.5, dear=3.0)
    assert ledger.is_later(f"{FILE}::dear[case]")
    assert not ledger.is_later(f"{FILE}::cheap")
    assert ledger.entries[FILE] == msgspec.structs.replace(whole, quick=0.5)
    ledger = measure(cheap=0.5, dear=1.0)
    assert ledger.entries == {FILE: whole}


def test_a_file_whose_tests_all_start_processes_says_so_once() -> None:
    ledger = Ledger({})
    ledger.replace(FILE, {f"{FILE}::{name}": Entry(1.0, 1.0, 1, starts=True) for name in "fg"}, "")
    assert set(ledger.entries) == {FILE}
    assert ledger.is_marked(f"{FILE}::f") == (True, False)
    assert ledger.starting() == {FILE}


def test_expected_seconds_add_up_to_the_files() -> None:
    entries = {FILE: Entry(wall=12.0, cases=6), f"{FILE}::f": Entry(wall=8.0, cases=2)}
    nodeids = [f"{FILE}::f[a]", f"{FILE}::f[b]", f"{FILE}::g", f"{FILE}::h"]
    expected = Ledger(entries).seconds([*nodeids, "tests/test_new.py::f"])
    assert [expected[each] for each in nodeids] == [4.0, 4.0, 2.0, 2.0]
    assert expected["tests/test_new.py::f"] > 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=60))
def test_units_are_parts_of_one_file_of_a_minute_at_most(cases: list[tuple[str, float]]) -> None:
    cases.sort(key=lambda case: case[0])
    expected = {f"{file}::f[{at}]": seconds for at, (file, seconds) in enumerate(cases)}
    divided = units(list(expected), expected)
    assert divided.keys() == expected.keys()
    stretches = [unit for unit, _ in itertools.groupby(divided.values())]
    assert len(stretches) == len(set(stretches))
    for unit in set(divided.values()):
        members = [nodeid for nodeid, each in divided.items() if each == unit]
        assert len({file_of(nodeid) for nodeid in members}) == 1
        assert sum(expected[each] for each in members) <= 60 or len(members) == 1
    for file in {file for file, _ in cases}:
        total = sum(seconds for each, seconds in cases if each == file)
        if total <= 60:
            assert len({unit for nodeid, unit in divided.items() if file_of(nodeid) == file}) == 1


def test_files_take_what_bounds_them_cores_or_places() -> None:
    assert elapsed_s([Entry(wall=30.0, cpu=2.0)]) == pytest.approx(10.0)
    assert elapsed_s([Entry(wall=30.0, cpu=30.0)]) == pytest.approx(15.0)
