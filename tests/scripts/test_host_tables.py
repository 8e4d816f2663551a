"""`scripts/host-tables` calls benchmarks that exist, with options that they have."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "scripts" / "host-tables").read_text(encoding="utf-8").replace("\\\n", " ")
TABLES = re.findall(r"^table (\w+) (.+)$", SCRIPT, re.MULTILINE)


def test_there_are_tables() -> None:
    assert len(TABLES) == len({name for name, _ in TABLES}) > 5


@pytest.mark.parametrize(("name", "call"), TABLES)
def test_a_table_has_a_benchmark(name: str, call: str) -> None:
    words = [each for each in shlex.split(call) if not each.startswith("$")]
    options = [each for each in words if each.startswith("--")]
    benchmark = words[: words.index(options[0])] if options else words
    command = [sys.executable, "-m", "slipstream", "bench", *benchmark, "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in [*options, "--json", "--runs", "--quick"]:
        assert f"{option} " in help_text, name
