"""`slipstream bench start`: whole starts are measured, process by process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.main import main


def test_a_start_and_an_idle_stack_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--ways", "generate", "--settle-s", "0", "--idle-s", "0.5", "--json", str(file)]
    assert main(["bench", "start", "--quick", *arguments]) == 0
    rows = json.loads(file.read_text())
    starts = {row["process"]: row for row in rows if row["way"] == "generate"}
    assert {"(all)", "command", "slip:supervisor", "slip:worker"} <= starts.keys()
    assert starts["(all)"]["cpu_s"] >= starts["command"]["cpu_s"] > 0
    assert starts["(all)"]["cpu_at_end_s"] > starts["(all)"]["cpu_s"]
    quiet = {row["process"]: row for row in rows if row["way"] == "idle"}
    assert {"(all)", "slip:core", "slip:worker", "slip:http", "slip:tokenizer"} <= quiet.keys()
    assert quiet["(all)"]["pss_mib"] > 0


def test_an_unknown_start_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "start", "--ways", "generate,stop"]) == 2
    assert "ways" in capsys.readouterr().err
