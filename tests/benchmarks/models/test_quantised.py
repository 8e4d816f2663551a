"""`slipstream bench quantised`: all formats are measured, and held to the goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream_lab.models import quantised


def row(weights: str, streams: int, ms: float, model: str = "qwen3") -> Any:
    return {"model": model, "weights": weights, "streams": streams, "ms": ms, "runs": 5}


def test_a_goal_is_met_or_not() -> None:
    rows = [
        row(name, streams, ms)
        for name, ms in (("float32", 20.0), ("bfloat16", 12.5), ("q8_0", 12.5), ("q4_0", 12.5))
        for streams in (1, 8, 64)
    ]
    rows += [
        row(name, streams, 8.0 if name == "q4_0" else 12.0, "qwen3_moe")
        for name in ("float32", "bfloat16", "q8_0", "q4_0")
        for streams in (1, 8, 64)
    ]
    own = "as transformers has them"
    rows += [row(own, streams, 30.0, "qwen3_moe") for streams in (1, 8, 64)]
    said = list(map(str, quantised.goals(rows)))
    assert len(said) == 7 + 12
    times = "times the speed of transformers' own"
    assert said[7] == (
        f"experts, float32, streams at once: 1, {times}: 2.50, goal at least 3: not met"
    )
    assert said[-1] == f"experts, q4_0, streams at once: 64, {times}: 3.75, goal at least 3: met"
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
        monkeypatch.setitem(quantised._EXPERTS, name, value)
    monkeypatch.setitem(quantised._EXPERTS, "moe_intermediate_size", 32)
    file = tmp_path / "rows.json"
    command = ["bench", "quantised", "--quick", "--layers", "1", "--expert-layers", "1"]
    assert main([*command, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    formats = ("float32", "bfloat16", "q8_0", "q4_0")
    kinds = [("qwen3", each) for each in formats]
    kinds += [("qwen3_moe", each) for each in (*formats, "as transformers has them")]
    assert {(each["model"], each["weights"], each["streams"]) for each in rows} == {
        (*kind, streams) for kind in kinds for streams in (1, 8, 64)
    }
    assert all(each["ms"] > 0 for each in rows)
    assert capsys.readouterr().out.count(", goal at least ") == 19
