"""`scripts/test` without arguments runs some cases of each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """\
import pytest

@pytest.mark.parametrize("number", range(20))
def test_many(number): ...

@pytest.mark.parametrize("number", range(3))
def test_few(number): ...

@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_slow(number): ...

def test_one(): ...
"""


def test_cases_are_from_all_over_their_list(tmp_path: Path) -> None:
    path = tmp_path / "test_here.py"
    path.write_text(TESTS)

    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "--collect-only", "-q", str(path), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    few, slow = (
        [f"test_{name}[{at}]" for at in range(num)] for name, num in (("few", 3), ("slow", 9))
    )
    many = [f"test_many[{at}]" for at in (0, 5, 10, 15)]
    assert collected("--cases", "4") == [*many, *few, *slow, "test_one"]
    every = collected()
    assert len(every) == 20 + 3 + 9 + 1
    assert collected("--cases", "20") == every
