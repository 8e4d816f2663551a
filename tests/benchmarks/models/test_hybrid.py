"""`slipstream bench hybrid`: both models and transformers are measured, and held to the goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream_lab.models import hybrid


def row(model: str, part: str, ms: float) -> Any:
    return {"model": model, "part": part, "ms": ms, "runs": 5}


def test_a_goal_is_met_or_not() -> None:
    rows = [
        *(row("hybrid", part, 10.0) for part in ("decode 1", "decode 64", "prefill")),
        row("dense", "decode 1", 9.4),
        row("dense", "decode 64", 9.4),
        row("dense", "prefill", 7.0),
        row("transformers", "decode 1", 24.0),
        row("dense", "host, decode 64", 0.10),
        row("hybrid", "host, decode 64", 0.11),
    ]
    assert list(map(str, hybrid.goals(rows))) == [
        "decode 1, times the dense model's speed: 0.94, goal at least 0.95: not met",
        "decode 64, times the dense model's speed: 0.94, goal at least 0.9: met",
        "prefill, times the dense model's speed: 0.70, goal at least 0.7: met",
        "decode 1, times transformers' speed: 2.40, goal at least 2.5: not met",
        "host's work of a step, times the dense model's: 1.10, goal at most 1.05: not met",
    ]


def test_all_parts_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"vocab_size": 300, "hidden_size": 48, "num_attention_heads": 2, "head_dim": 16}
    for name, value in (small | {"num_key_value_heads": 1}).items():
        monkeypatch.setitem(hybrid._COMMON, name, value)
    file = tmp_path / "rows.json"
    options = [
        "--quick",
        "--layers",
        "4",
        "--prefill",
        "20",
        "--conversation",
        "400",
        "--json",
        str(file),
    ]
    assert main(["bench", "hybrid", *options]) == 0
    rows = json.loads(file.read_text())
    assert {(each["model"], each["part"]) for each in rows} == {
        ("transformers", "decode 1"),
        ("hybrid", "second turn"),
        ("hybrid", "second turn, cold"),
        *(
            (model, part)
            for model in ("hybrid", "dense")
            for part in ("decode 1", "decode 64", "prefill", "host, decode 64")
        ),
        *(
            (model, f"decode {batch}: {part}")
            for model, mixing in (("hybrid", ("convolutions", "recurrences")), ("dense", ()))
            for batch in (1, 64)
            for part in (
                *mixing,
                "products",
                "attention",
                "norms, gates and others by row",
                "around the list",
            )
        ),
    }
    assert all(each["ms"] > 0 for each in rows)
    shown = capsys.readouterr().out
    assert shown.count(", goal ") == 7
    # at most 63 tokens of the answer are behind its last mark, which is in front of 392
    assert "share of the first one that is found: 0.96, goal at least 0.9: met" in shown
