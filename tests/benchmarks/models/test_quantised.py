"""`slipstream bench quantised`: all formats are measured, and held to the goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream_lab.models import quantised


def row(weights: str, streams: int, ms: float) -> Any:
    return {"weights": weights, "streams": streams, "ms": ms, "runs": 5}


def test_a_goal_is_met_or_not() -> None:
    rows = [
        row(name, streams, ms)
        for name, ms in (("float32", 20.0), ("bfloat16", 12.5), ("q8_0", 12.5), ("q4_0", 12.5))
        for streams in (1, 8, 64)
    ]
    said = list(map(str, quantised.goals(rows)))
    assert len(said) == 7
    assert said[:3] == [
        "bfloat16, streams at once: 1, times float32's speed: 1.60, goal at least 1.5: met",
        "q8_0, streams at once: 1, times float32's speed: 1.60, goal at least 1.8: not met",
        "q8_0, streams at once: 8, times float32's speed: 1.60, goal at least 1.4: met",
    ]


def test_all_formats_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    for name, value in (small | {"num_attention_heads": 2, "num_key_value_heads": 1}).items():
        monkeypatch.setitem(quantised._MODEL, name, value)
    file = tmp_path / "rows.json"
    assert main(["bench", "quantised", "--quick", "--layers", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert {(each["weights"], each["streams"]) for each in rows} == {
        (name, streams)
        for name in ("float32", "bfloat16", "q8_0", "q4_0")
        for streams in (1, 8, 64)
    }
    assert all(each["ms"] > 0 for each in rows)
    assert capsys.readouterr().out.count(", goal at least ") == 7
