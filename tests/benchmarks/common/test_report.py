"""What benchmarks share: tables, medians, JSON, pictures, common options."""

from __future__ import annotations

import argparse
import importlib.util
import json

import pytest

from slipstream.cli.options.parser import Parser
from slipstream.errors import BadRequestError
from slipstream_bench.common.pictures import check_plots, grouped_bars
from slipstream_bench.common.report import (
    add_common,
    check_common,
    median_rows,
    print_rows,
    table,
    write_json,
)
from slipstream_bench.common.variants import (
    INTERVAL,
    NUM_LOGPROBS,
    STOP_STRINGS,
    VARIANTS,
    params_of,
)

PNG = b"\x89PNG\r\n\x1a\n"
ROWS = [
    {"engine": "a", "batch": 1, "us_per_token": 1.23456, "is_whole": True},
    {"engine": "longer", "batch": 1024, "us_per_token": 123456.7, "is_whole": None, "more": 0.5},
]


def test_words_stand_to_the_left_and_numbers_to_the_right():
    assert table(ROWS) == [
        "engine  batch  us_per_token  is_whole   more",
        "------  -----  ------------  --------  -----",
        "a           1         1.235       yes      -",
        "longer   1024        123457         -  0.500",
    ]


def test_a_table_shows_the_columns_it_is_told_as_far_as_there_are_any():
    assert table(ROWS, ["more", "engine", "nowhere"]) == [
        " more  engine",
        "-----  ------",
        "    -  a",
        "0.500  longer",
    ]


def test_a_table_of_nothing_is_its_header():
    assert table([], ["a"]) == ["", ""]
    assert table([]) == ["", ""]


def test_medians_are_taken_of_rows_that_agree():
    rows = [
        {"batch": 1, "us": 3.0, "steps": 10},
        {"batch": 2, "us": 7.0, "steps": 10},
        {"batch": 1, "us": 1.0, "steps": 10},
        {"batch": 1, "us": 2.0, "steps": 10},
    ]
    assert median_rows(rows, ["batch"]) == [
        {"batch": 1, "us": 2.0, "steps": 10, "runs": 3},
        {"batch": 2, "us": 7.0, "steps": 10, "runs": 1},
    ]


def test_json_is_a_list_of_flat_objects(tmp_path):
    write_json(ROWS, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == ROWS


# ---- pictures ------------------------------------------------------------------------------


def test_bars_are_drawn_also_where_values_are_missing(tmp_path):
    series = {"ours": [1.0, None], "theirs": [10.0, 20.0]}
    file = tmp_path / "bars.png"
    grouped_bars(file, ["1", "2"], series, title="t", x_label="x", y_label="us", is_log=True)
    assert file.read_bytes().startswith(PNG)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadRequestError, match=r"pip install slipstream\[plots\]"):
        check_plots()


# ---- options -------------------------------------------------------------------------------


@pytest.fixture
def parsed():
    parser = Parser()
    add_common(parser, runs=5, quick_runs=2)

    def parse(*words: str) -> argparse.Namespace:
        return parser.parse_args(words)

    return parse


def test_runs_follow_from_quick_unless_they_are_given(parsed):
    for words, runs in (([], 5), (["--quick"], 2), (["--quick", "--runs", "3"], 3)):
        arguments = parsed(*words)
        check_common(arguments)
        assert arguments.runs == runs


def test_what_cannot_be_is_refused_before_anything_is_measured(parsed, tmp_path):
    with pytest.raises(BadRequestError, match="runs"):
        check_common(parsed("--runs", "0"))
    for option in ("--json", "--png"):
        for file in (tmp_path, tmp_path / "nowhere" / "file"):
            with pytest.raises(BadRequestError, match="a folder that exists"):
                check_common(parsed(option, str(file)))


def test_telling_prints_some_columns_and_writes_all(parsed, tmp_path, capsys):
    file = tmp_path / "rows.json"
    print_rows(ROWS, parsed("--json", str(file)), columns=["engine"])
    assert capsys.readouterr().out.split() == ["engine", "------", "a", "longer"]
    assert json.loads(file.read_text()) == ROWS


# ---- variants ------------------------------------------------------------------------------


def test_variants_mean_what_they_are_called():
    asked = {}
    for variant in VARIANTS:
        params = params_of(variant, 7)
        assert params.max_tokens == 7
        assert params.ignore_eos
        asked[variant] = (params.stop, params.logprobs, params.stream_interval)
    assert asked == {
        "plain": ((), None, 1),
        "stop2": (STOP_STRINGS, None, 1),
        "logprobs5": ((), NUM_LOGPROBS, 1),
        "stop2_logprobs5": (STOP_STRINGS, NUM_LOGPROBS, 1),
        "interval10": ((), None, INTERVAL),
    }
