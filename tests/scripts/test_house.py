"""The script that counts what this repository is held to counts what is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_number_is_counted() -> None:
    command = [sys.executable, ROOT / "scripts" / "house.py", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    numbers = {row["counted"]: row["number"] for row in rows}
    lines = next(number for name, number in numbers.items() if name.startswith("product lines"))
    assert lines > 50_000
    assert lines < numbers["lines in the wheels"] < 2 * lines  # the load test is in them
    assert numbers["decisions"] == len(list((ROOT / "docs" / "decisions").glob("[0-9]*.md")))
    modules = [each.read_text("utf-8") for each in ROOT.glob("*/slipstream*/**/*.c")]
    assert numbers["C extension modules"] == sum("PyMODINIT_FUNC" in each for each in modules)
    assert numbers["rooms of the core"] > numbers["floors of the core"] > 1
