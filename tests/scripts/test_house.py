"""The script that counts what this repository is held to counts what is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.scripts import script_module

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


@pytest.mark.parametrize(
    ("name", "source", "is_used"),
    [
        ("a.py", "request.min_p = 1", True),
        ("a.py", 'names = ("top_p", "min_p")', True),
        ("a.py", "names = {'min_p'}", True),
        ("a.py", '"""Draws with min_p."""\n# min_p', False),
        ("a.py", 'text = "min_p cuts"\nmin_ps = 1', False),
        ("a.html", '<input name="min_p">', True),
        ("a.c", "min_ps[row]", False),
    ],
)
def test_a_field_is_used_by_code(tmp_path: Path, name: str, source: str, *, is_used: bool) -> None:
    file = tmp_path / name
    file.write_text(source, "utf-8")
    assert script_module("house")._uses("min_p", file) == is_used
