"""Runs of pytest that write the ledger, and are marked by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ledger.durations import QUICK_CPU_S, Entry, Ledger
from tests.ledger.recorder import Run

ROOT = Path(__file__).parents[2]
FILE = "tests/ledger/test_recorder.py"
STARTING = """\
import subprocess
import sys

import pytest

def start():
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)

@pytest.fixture(scope="module")
def started():
    start()

def test_plain(): ...

@pytest.mark.parametrize("case", range(3))
def test_itself(case):
    if case == 2:
        start()

def test_by_a_fixture(started): ...

def test_by_the_same_fixture(started): ...
"""
MARKED = """\
import pytest

def test_quick():
    sum(range(3 * 10**7))

@pytest.mark.long
def test_long():
    sum(range(3 * 10**7))
"""
FAILING = "def test_right(): ...\n\ndef test_wrong():\n    assert False\n"


def run(folder: Path, *options: str) -> str:
    """What pytest says of the files in a folder, whose ledger it reads and may write."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", "/dev/null", "--rootdir", str(folder), "--ledger", str(folder / "ledger")]
    command += ["-q", "--import-mode=importlib", *options, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_starting.py").write_text(STARTING)
    (tmp_path / "test_failing.py").write_text(FAILING)
    return tmp_path


@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "2", "--dist", "loadfile"]])
def test_a_run_is_written_and_marks_the_next(folder: Path, options: list[str]) -> None:
    run(folder, *options, "--write-durations")
    entries = Ledger.read(folder / "ledger").entries
    starting = {name.partition("::")[2] for name, entry in entries.items() if entry.starts}
    assert starting == {"test_itself", "test_by_a_fixture", "test_by_the_same_fixture"}
    assert entries["test_starting.py"].cases == 6
    assert entries["test_starting.py"].cpu > 0
    assert entries["test_starting.py"].digest
    assert not entries["test_failing.py"].digest
    assert "1 failed, 2 passed" in run(folder, *options, "-m", "not process")


def test_what_is_marked_in_its_file_is_no_part_of_the_quick_suite(folder: Path) -> None:
    for each in folder.iterdir():
        each.unlink()
    (folder / "test_marked.py").write_text(MARKED)
    run(folder, "--write-durations")
    entry = Ledger.read(folder / "ledger").entries["test_marked.py"]
    assert 0 < entry.quick < entry.wall


def test_quick_is_what_has_no_mark_and_a_file_without_any_is_not_imported(folder: Path) -> None:
    (folder / "test_process.py").write_text("assert False, 'imported'")
    entries = {
        "test_starting.py": Entry(wall=9.0, cases=6),
        "test_starting.py::test_itself": Entry(wall=9.0, cases=3, starts=True),
        "test_failing.py::test_wrong": Entry(wall=90.0, cases=1),
        "test_process.py": Entry(wall=9.0, cases=6, starts=True),
    }
    (folder / "ledger").write_text(Ledger(entries).dump())
    assert "4 passed, 4 deselected" in run(folder, "--quick")
    assert "4 passed" in run(folder, "--quick", "-n", "2", "--dist", "loadfile")


def test_a_part_of_a_file_is_not_written(folder: Path) -> None:
    for options in (["-k", "plain"], ["--cases", "2"], ["-x", "--deselect", "test_failing.py"]):
        run(folder, *options, "--write-durations")
        assert "test_failing.py" not in Ledger.read(folder / "ledger").entries
    assert set(Ledger.read(folder / "ledger").files()) == {"test_starting.py"}


def test_in_full_are_the_files_that_are_named_and_the_rest_where_it_is_quick(folder: Path) -> None:
    entries = {
        "test_starting.py": Entry(wall=9.0, cases=6),
        "test_starting.py::test_itself": Entry(wall=9.0, cases=3, starts=True),
        "test_failing.py::test_wrong": Entry(wall=90.0, cases=1),
    }
    (folder / "ledger").write_text(Ledger(entries).dump())
    (folder / "plan").write_text("test_failing.py\n")
    options = ["--cases", "2", "--in-full", str(folder / "plan")]
    said = run(folder, *options)
    assert "1 failed, 4 passed, 3 deselected" in said
    unplanned = "left to scripts/test --all: 3 tests of 1 file not planned"
    assert f"{unplanned}\nnot planned:\n  : starting\n" in said
    # and what is not quick is left where it would begin too late
    options += ["--seconds", "0"]
    said = run(folder, *options)
    assert "4 passed, 1 skipped, 3 deselected" in said
    late = "for want of time:\n  : failing\n"
    assert f"{unplanned}, 1 test of 1 file for want of time\n" in said
    assert late in said
    # the same, and cases that quick tests have more, where several processes ran them
    (folder / "ledger").write_text(Ledger({}).dump())
    (folder / "test_failing.py").write_text(FAILING.replace("False", "True"))
    assert f"{unplanned}" not in (said := run(folder, "-n", "2", "--dist", "loadfile", *options))
    assert "left to scripts/test --all: 1 more case of quick tests\n" in said


COSTLY = """\
import time

import pytest

def test_cheap(): ...

@pytest.mark.quick
def test_pinned():
    burn()

def test_costly():
    burn()

def burn():
    begun = time.process_time()
    while time.process_time() < begun + MOST:
        sum(range(10**5))
"""


def test_what_would_take_too_much_of_the_quick_suite_is_left_to_others(folder: Path) -> None:
    for each in folder.iterdir():
        each.unlink()
    (folder / "test_costly.py").write_text(COSTLY.replace("MOST", str(QUICK_CPU_S + 0.1)))
    whole = Entry(wall=9.0, cpu=9.0, cases=3, quick=9.0)
    (folder / "ledger").write_text(Ledger({"test_costly.py": whole}).dump())
    options = ["--quick", "--cases", "2"]
    assert "3 passed" in run(folder, *options, "--write-durations")
    ledger = Ledger.read(folder / "ledger")
    assert ledger.is_later("test_costly.py::test_costly")
    assert ledger.entries["test_costly.py"].quick < 9.0
    # by the mark, whatever the ledger says
    ledger.entries["test_costly.py::test_pinned"] = Entry(3.0, 3.0, 1, later=True)
    (folder / "ledger").write_text(ledger.dump())
    assert "2 passed, 1 deselected" in run(folder, *options)
    # which is measured again with what may come to belong to it
    assert "3 tests collected" in run(folder, *options, "--write-durations", "--collect-only")


@pytest.mark.parametrize("of_quick", [True, False])
def test_a_propertys_examples_are_a_quarter_in_the_quick_suite(of_quick: bool) -> None:
    measured = Run(of_quick=of_quick)
    for name, is_property in (("property", True), ("other", False)):
        for when in ("setup", "call", "teardown"):
            report: Any = SimpleNamespace(
                nodeid=f"{FILE}::{name}",
                when=when,
                duration=2.0 if when == "call" else 0.0,
                cpu_s=1.0 if when == "call" else 0.0,
                failed=False,
                passed=True,
                starts=False,
                is_marked=False,
                is_property=is_property,
                is_pinned=is_property,
                num_cases=0 if of_quick else 2,
            )
            measured.add(report)
    whole = 8.0 if of_quick else 2.0
    tests = measured.scaled(1.0)
    assert tests[f"{FILE}::other"] == Entry(2.0, 1.0, 1, quick=2.0)
    assert tests[f"{FILE}::property"] == Entry(whole, whole / 2, 1, quick=whole / 4, pinned=True)
