"""`slipstream bench lora`: each kind of batch is measured both ways, and held to the goals; and
`lora-load`: gaps beside loads are told from the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream_lab import adapter_loads, adapters


def test_goals() -> None:
    rows: list[adapters.Row] = [
        {"kind": "adapter", "streams": 1, "speed": 0.97},
        {"kind": "adapters", "streams": 64, "speed": 0.89},
        {"kind": "enabled", "streams": 8, "speed": 1.01},
    ]
    assert list(map(str, adapters.goals(rows))) == [
        "adapter, 1 streams, times the speed without adapters: 0.97, goal at least 0.97: met",
        "adapters, 64 streams, times the speed without adapters: 0.89, goal at least 0.9: not met",
        "enabled, 8 streams, times the speed without adapters: 1.01, goal at least 0.99: met",
    ]


def test_every_kind_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "hidden_size=64,intermediate_size=64,num_hidden_layers=1,vocab_size=900"
    model = f"random:llama-3.1-8b,{small},num_attention_heads=2,num_key_value_heads=1"
    monkeypatch.setitem(adapters._MODELS, "S", f"{model},max_position_embeddings=4096")
    file = tmp_path / "rows.json"
    assert main(["bench", "lora", "--quick", "--threads", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert {(each["kind"], each["streams"]) for each in rows} == set(adapters._LEAST)
    assert all(each["speed"] > 0 and each["without_ms"] > 0 for each in rows)
    assert {each["adapter_mb"] for each in rows} == {rows[0]["adapter_mb"]}
    assert capsys.readouterr().out.count(", goal ") == len(rows)


def test_gaps_that_a_load_overlaps_are_its_own() -> None:
    times = adapter_loads.Times(
        gaps=[(0.0, 1.0), (1.0, 2.0), (0.5, 4.0), (3.0, 5.5), (4.0, 5.0), (5.0, 7.0)],
        loads=[(2.0, 3.0), (5.25, 5.5)],
    )
    row = adapter_loads.row(times, 2, 3_000_000)
    assert row == {
        "streams": 2,
        "adapter_mb": 3.0,
        "load_ms": 625.0,
        "pause_median_ms": 1000.0,
        "pause_longest_ms": 1000.0,
        "load_median_ms": 2500.0,
        "load_longest_ms": 3500.0,
    }
    line = "longest delay by a load, in steps: 2.50, goal at most 1: not met"
    assert str(adapter_loads.goal([row])) == line


def test_loads_are_measured_beside_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = adapter_loads.Shape(64, 64, 1, 2, 1, 32)
    monkeypatch.setattr(adapter_loads, "_SHAPE", small)
    file = tmp_path / "rows.json"
    assert main(["bench", "lora-load", "--quick", "--streams", "2", "--json", str(file)]) == 0
    [row] = json.loads(file.read_text())
    weights = sum(128 * (inputs + outputs) for inputs, outputs in small.sites().values())
    assert row["adapter_mb"] == 4 * weights / 1e6
    assert row["load_ms"] > 0
    assert 0 < row["load_median_ms"] <= row["load_longest_ms"]
    assert "longest delay by a load, in steps: " in capsys.readouterr().out
