"""`scripts/test` without arguments runs some cases of each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
TESTS = """\
import pytest

@pytest.mark.parametrize("number", range(20))
def test_many(number): ...

@pytest.mark.parametrize("number", range(3))
def test_few(number): ...

@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long), 2, 3, 4])
def test_marked(number): ...

@pytest.mark.long
@pytest.mark.parametrize("number", range(9))
def test_long(number): ...

def test_one(): ...
"""
TRIED = """\
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

tried = {"given": 0, "machine": 0}

@given(st.integers())
@settings(max_examples=40)
def test_given(number):
    tried["given"] += 1

class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        tried["machine"] += 1

    @rule()
    def step(self): ...

Machine.TestCase.settings = settings(max_examples=8, stateful_step_count=2)
TestMachine = Machine.TestCase

def test_how_many():
    print(tried)
"""
COMMAND = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
COMMAND += ["-p", "no:xdist", "-q"]


def test_cases_are_from_all_over_their_list(tmp_path: Path) -> None:
    path = tmp_path / "test_here.py"
    path.write_text(TESTS)

    def collected(*options: str) -> list[str]:
        command = [*COMMAND, "--collect-only", str(path), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    few, marked, long = (
        [f"test_{name}[{at}]" for at in range(num)]
        for name, num in (("few", 3), ("marked", 5), ("long", 9))
    )
    many = [f"test_many[{at}]" for at in (0, 5, 10, 15)]
    assert collected("--cases", "4") == [*many, *few, *marked, *long, "test_one"]
    quick = ["test_many[0]", "test_many[10]", *few[:2], marked[0], marked[3], "test_one"]
    assert collected("--cases", "2", "--quick") == quick
    every = collected()
    assert len(every) == 20 + 3 + 5 + 9 + 1
    assert collected("--cases", "20") == every


def test_properties_are_tried_with_a_quarter_of_their_examples(tmp_path: Path) -> None:
    path = tmp_path / "test_here.py"
    path.write_text(TRIED)

    def tried(*options: str) -> str:
        command = [*COMMAND, "-s", str(path), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        (line,) = (line for line in done.stdout.splitlines() if "{" in line)
        return line[line.index("{") :]

    assert tried() == "{'given': 40, 'machine': 8}"
    assert tried("--cases", "2") == "{'given': 10, 'machine': 2}"
