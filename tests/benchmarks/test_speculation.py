"""`slipstream bench speculation`: each kind is measured both ways, and held to the goals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.engine import build
from slipstream_lab import speculation


def test_goals() -> None:
    rows: list[speculation.Row] = [
        {"kind": "edit", "streams": 1, "speedup": 2.6},
        {"kind": "edit", "streams": 8, "speedup": 1.49},
        {"kind": "fresh", "streams": 64, "speedup": 0.98},
        {"kind": "forced", "speedup": 1.31, "drafted_steps": 68, "steps": 100, "streams": 1},
        {"kind": "model", "streams": 1, "speedup": 1.39},
        {"kind": "model", "streams": 8, "speedup": 1.0},
        {"kind": "host", "streams": 1024, "us_a_token": 0.51, "us_a_step": 300.0},
    ]
    assert list(map(str, speculation.goals(rows))) == [
        "edit, 1 streams, times the speed without drafts: 2.60, goal at least 2.5: met",
        "edit, 8 streams, times the speed without drafts: 1.49, goal at least 1.5: not met",
        "fresh, 64 streams, times the speed without drafts: 0.98, goal at least 0.98: met",
        "forced, 1 stream, times the speed: 1.31, goal at least 1.3: met",
        "forced, 1 stream, times the steps: 0.68, goal at most 0.67: not met",
        "a draft model, 1 stream, times the speed without drafts: 1.39, goal at least 1.4: not met",
        "host, 1024 streams, us a token: 0.51, goal at most 0.5: not met",
        "host, 1024 streams, us a step: 300.00, goal at most 300: met",
    ]


def test_both_ways_say_the_same_in_other_numbers_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "hidden_size=64,intermediate_size=64,num_hidden_layers=1,vocab_size=9000"
    model = f"random:llama-3.1-8b,{small},num_attention_heads=2,num_key_value_heads=1"
    monkeypatch.setattr(speculation, "SMALL_MODEL", f"{model},max_position_embeddings=4096")
    monkeypatch.setattr(speculation, "_HOST_ROWS", 64)
    monkeypatch.setattr(build, "StepCosts", lambda _measured: StepCosts())  # not this machine's
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32}
    monkeypatch.setattr(speculation, "save_pair", partial(speculation.save_pair, **sizes))
    limits = {"num_speculative_tokens": 8, "max_len": 4096}
    costs = {"costs": StepCosts(), "draft_costs": StepCosts(((1, 1e-4), (64, 1e-4)))}
    monkeypatch.setattr(speculation, "model_drafter_of", lambda *_: ModelDrafter(**limits, **costs))
    file = tmp_path / "rows.json"
    options = ["--quick", "--tokens", "48", "--prompt", "64", "--threads", "1"]
    assert main(["bench", "speculation", *options, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    found = {(each["kind"], each["streams"]): each for each in rows}
    assert set(found) == {
        *speculation._MEASURED,
        ("forced", 1),
        ("model", 1),
        ("model", 8),
        ("host", 64),
    }
    assert all(each["same"] for each in rows if each["kind"] != "host")
    edit = found["edit", 1]
    assert edit["drafted_steps"] < edit["steps"]
    assert 0 < edit["accepted"] <= edit["drafts"]
    forced = found["forced", 1]
    assert forced["drafted_steps"] < 0.67 * forced["steps"]
    by_model = found["model", 1]
    assert by_model["drafted_steps"] < by_model["steps"]
    assert 0 < by_model["accepted"] < by_model["drafts"]
    again = found["again", 1]
    assert again["drafted_steps"] < 0.5 * again["steps"]
    predicted, unpredicted = found["predicted", 1], found["unpredicted", 1]
    assert predicted["drafted_steps"] < 0.6 * unpredicted["drafted_steps"]
    assert predicted["steps"] == unpredicted["steps"]
    assert unpredicted["accepted"] < predicted["accepted"] <= predicted["drafts"]
    fresh = found["fresh", 64]
    assert fresh["overlapped"] == pytest.approx(fresh["overlapped_without"], abs=0.1)
    assert capsys.readouterr().out.count(", goal ") == 14


def test_an_edit_is_its_prompt_with_a_name_changed() -> None:
    texts = speculation.edited_texts(3, 64, 48)
    assert [len(text) for text in texts] == [112] * 3
    assert len({tuple(text) for text in texts}) == 3
