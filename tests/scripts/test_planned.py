"""The tests of a plan, as `.ci/run` asks for them: the plan is a file anywhere."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_a_plan_may_lie_outside_of_the_repository(tmp_path: Path) -> None:
    """pytest takes the folder of a path that it does not know for its root."""
    plan = tmp_path / "plan"
    plan.write_text("tests/ledger/test_plan.py\n")
    words = ["scripts/test", "--planned", plan, "--help"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "--in-full=" in run.stdout  # our conftest's own
