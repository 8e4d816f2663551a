"""`slipstream bench compare engines`: engines in turns, summed up beside ours."""

from __future__ import annotations

import json

import pytest

from slipstream.cli.main import main
from slipstream.demo_model import MODEL_PATH
from slipstream_lab.compare import engines as comparison


def row(engine: str, way: str, streams: int, rate: float) -> dict:
    return {"engine": engine, "way": way, "streams": streams, "tokens_per_s": rate}


def test_ratios_are_of_our_median_over_http_at_the_same_number_of_streams():
    rows = [
        *(row("slipstream", "http", 64, rate) for rate in (100.0, 300.0, 200.0)),
        row("slipstream", "http", 1, 50.0),
        *(row("vllm", "http", 64, rate) for rate in (100.0, 60.0, 80.0)),
        row("vllm", "http", 1, 100.0),
    ]
    found = {(one["engine"], one["streams"]): one for one in comparison.summaries(rows)}
    assert found["vllm", 64]["ours_over_theirs"] == 2.5
    assert (found["vllm", 64]["low"], found["vllm", 64]["high"]) == (60, 100)
    assert found["vllm", 64]["runs"] == 3
    assert found["vllm", 1]["ours_over_theirs"] == 0.5
    assert found["slipstream", 64]["ours_over_theirs"] == 1


def test_turns_go_to_and_fro(monkeypatch, tmp_path):
    asked: list[str] = []

    def engine(name: str, way: str):
        def rows(plan):
            asked.append(name)
            yield row(name, way, 1, 10.0)

        return rows

    engines = {"slipstream": engine("slipstream", "http"), "transformers": engine("t", "offline")}
    monkeypatch.setattr(comparison, "_ENGINES", engines)
    words = [str(MODEL_PATH), "--transformers", "--streams", "1", "--runs", "2"]
    assert main(["bench", "compare", "engines", *words]) == 0
    assert asked == ["slipstream", "t", "t", "slipstream"] * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "a folder with a config.json"),
        ([str(MODEL_PATH), "--llamacpp-python", "python3"], "a file, with --llamacpp-python"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, told, capsys):
    assert main(["bench", "compare", "engines", *words]) != 0
    assert told in capsys.readouterr().err


def test_ours_and_transformers_are_measured(tmp_path):
    file = tmp_path / "rows.json"
    words = [str(MODEL_PATH), "--transformers", "--quick", "--streams", "4", "--json", str(file)]
    assert main(["bench", "compare", "engines", *words]) == 0
    rows = json.loads(file.read_text())
    assert [(one["engine"], one["way"]) for one in rows] == [
        ("slipstream", "http"),
        ("slipstream", "python"),
        ("transformers", "offline"),
    ]
    assert all(one["tokens_per_s"] > 0 and one["runs"] == 2 for one in rows)
