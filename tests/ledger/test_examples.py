"""Hypothesis' examples: new ones in each run, the same ones by their seed, failed ones first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROPERTY = """\
from hypothesis import given, strategies as st

@given(st.integers(0, 10**12))
def test_it(number):
    with open(__file__ + ".tried", "a") as tried:
        tried.write(f"{number}\\n")
    assert number < LEAST
"""

pytestmark = pytest.mark.process


def tried(folder: Path, least: int, *options: str) -> tuple[list[str], str]:
    """What a run tries of a property that holds below `least`, and the seed that it prints."""
    file = folder / "test_property.py"
    file.write_text(PROPERTY.replace("LEAST", str(least)))
    log = folder / "test_property.py.tried"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", "/dev/null", "--rootdir", str(folder), "--ledger", str(folder / "ledger")]
    command += ["--import-mode=importlib", *options, str(folder)]
    # as CI systems have it, which Hypothesis answers with other defaults
    environment = {"CI": "true", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "kept")}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    [seed, *again] = re.findall(r"--hypothesis-seed=(\S+)", done.stdout)
    assert again == ([seed] if done.returncode else [])
    return log.read_text().splitlines(), seed


def test_each_run_has_examples_of_its_own_which_its_seed_repeats(tmp_path: Path) -> None:
    one, seed = tried(tmp_path, 10**12 + 1, "-n", "1")  # whose process is handed the seed
    other, another = tried(tmp_path, 10**12 + 1, "-n", "1")
    assert another != seed
    assert other != one
    # with the same modules, whose constants Hypothesis tries as well
    again, _ = tried(tmp_path, 10**12 + 1, "-n", "1", "--hypothesis-seed", another)
    assert again == other


def test_what_failed_is_tried_first_in_the_next_run(tmp_path: Path) -> None:
    failing, _ = tried(tmp_path, 10**6, "-p", "no:xdist")
    assert failing[-1] == str(10**6)  # the least
    again, _ = tried(tmp_path, 10**6, "-p", "no:xdist")
    assert again[0] == str(10**6)
