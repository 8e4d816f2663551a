"""`slipstream bench lora`: each kind of batch is measured both ways, and held to the goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream_lab import adapters


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
