"""`slipstream bench formats`: divisions, BFCL's cases, the rows."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli.main import main
from slipstream.errors import BadRequestError
from slipstream_lab.formats import formats
from slipstream_lab.formats.cases import BFCL_CATEGORIES, MADE_CASES, read_bfcl
from slipstream_lab.formats.divisions import AnswerPiece, divided, pieces
from slipstream_lab.formats.our_reader import ReadAnswer, ReadCall
from slipstream_lab.formats.rendering import RENDERINGS, SampleCall, can_render, render
from slipstream_lab.peers import peer_process

CALL = SampleCall("f", {"a": 1})


# ---- divisions -------------------------------------------------------------------------------


@given(
    text=st.text(st.sampled_from("ab<>|/"), max_size=40),
    tokens=st.lists(st.text(st.sampled_from("ab<>|/"), min_size=1, max_size=4), max_size=3),
    seed=st.integers(),
    max_len=st.integers(1, 5),
)
def test_pieces_make_up_the_text(text: str, tokens: list[str], seed: int, max_len: int) -> None:
    whole = pieces(text, tokens)
    cut = divided(whole, random.Random(seed), max_len)
    for parts in (whole, cut):
        assert "".join(part.text for part in parts) == text
        assert all(part.text in tokens for part in parts if part.is_token)
    assert all(1 <= len(part.text) <= max_len for part in cut if not part.is_token)
    for part in whole:
        if not part.is_token:
            assert not any(token in part.text for token in tokens)


def test_the_longest_token_wins() -> None:
    assert pieces("x<<a>", ["<", "<a>"]) == [
        AnswerPiece("x", False),
        AnswerPiece("<", True),
        AnswerPiece("<a>", True),
    ]


# ---- renderings ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", RENDERINGS)
def test_a_rendering_holds_every_delimiter_and_all_values(variant: str) -> None:
    calls = [SampleCall("f", {"city": "Oslo", "days": 31}), SampleCall("g", {})]
    text = render(variant, calls, content="Say.", reasoning="Hm.")
    for part in ("Oslo", "31", "f", "g", "Say.", "Hm.", "city"):
        assert part in text
    assert [piece.text for piece in pieces(text, RENDERINGS[variant].added_tokens)].count(
        "Oslo"
    ) <= 1


def test_what_would_close_a_text_is_not_rendered() -> None:
    types = {"f": {"a": "string", "b": "object", "c": "integer"}}

    def can(variant: str, **arguments: object) -> bool:
        return can_render(variant, [SampleCall("f", arguments)], types)

    assert can("qwen3_coder", a="x", c=1)
    assert not can("qwen3_coder", a="x </parameter> y")
    assert not can("qwen3_coder", b={"x": ["</parameter>"]})
    assert not can("qwen3_coder", a=1)
    assert not can("qwen3_coder", c="1")
    assert not can("qwen3_coder", a=" x")
    assert can("hermes", a="x </tool_call> y", c="1")
    assert not can("pythonic", **{"class": 1})
    assert not can("pythonic", **{"a-b": 1})


# ---- BFCL ------------------------------------------------------------------------------------

QUESTION = {
    "id": "multiple_0",
    "question": [],
    "function": [
        {
            "name": "geo.find",
            "description": "Finds.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "at": {"type": "dict", "properties": {"x": {"type": "float"}}},
                    "many": {"type": "array", "items": {"type": "dict"}},
                    "what": {"type": "string"},
                    "other": {"type": "any"},
                },
            },
        }
    ],
}
TRUTH = {
    "id": "multiple_0",
    "ground_truth": [
        {"geo.find": {"at": [{"x": [1.5, 2]}], "many": [[{"k": ["", "v"]}]], "what": ["a", "b"]}},
        {"geo.find": {"what": [""], "other": ["", 7]}},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "possible_answer").mkdir()
    for category in BFCL_CATEGORIES:
        for path, line in ((tmp_path, QUESTION), (tmp_path / "possible_answer", TRUTH)):
            (path / f"BFCL_v4_{category}.json").write_text(json.dumps(line) + "\n")
    return tmp_path


def test_bfcls_cases_are_calls_with_one_value_each(folder: Path) -> None:
    cases = read_bfcl(folder)
    assert len(cases) == len(BFCL_CATEGORIES)
    assert cases[0].calls == (
        SampleCall("geo_find", {"at": {"x": 1.5}, "many": [{"k": "v"}], "what": "a"}),
        SampleCall("geo_find", {"other": 7}),
    )
    assert cases[0].types == {"geo_find": {"at": "object", "many": "array", "what": "string"}}
    parameters = cases[0].tools[0]["function"]["parameters"]
    assert parameters["properties"]["at"]["properties"]["x"] == {"type": "number"}
    assert parameters["properties"]["other"] == {}


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="bfcl_eval/data of the package bfcl-eval, with BFCL"):
        read_bfcl(tmp_path)


# ---- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "is_right"),
    [
        ([ReadCall("f", '{"a": 1}')], True),
        ([ReadCall("f", '{ "a":1.0 }')], True),
        ([ReadCall("f", '{"a": 1}', is_whole=False)], False),
        ([ReadCall("f", '{"a": "1"}')], False),
        ([ReadCall("f", "")], False),
        ([ReadCall("g", '{"a": 1}')], False),
        ([ReadCall("f", '{"a": 1}')] * 2, False),
        ([], False),
    ],
)
def test_an_answer_is_right_if_its_calls_are(read: list[ReadCall], is_right: bool) -> None:
    assert formats.is_right(ReadAnswer("", "any", tuple(read)), [CALL]) is is_right


def test_a_row_counts_right_answers_and_cases_that_are_read_alike() -> None:
    case = MADE_CASES[0]._replace(calls=(CALL,))
    answer = formats.DividedAnswer("hermes", "hermes", (), case, "", [])
    good = ReadAnswer("", "", (ReadCall("f", '{"a": 1}'),))
    bad = ReadAnswer("", "", ())
    row = formats.result_row([answer] * 3, [[good, good], [good, bad], [bad, bad]])
    assert row == {"answers": 6, "right": 3, "cases": 3, "same": 2}


PEER = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
given = json.load(open(options["--answers"]))
results = [[["", "", []] for _ in answer["divisions"]] for answer in given["answers"]]
costs = [7.5 for _ in given["long_answers"]]
json.dump({"version": "9", "us_per_delta": costs, "results": results}, open(options["--json"], "w"))
"""


def test_the_command_tells_our_cost_and_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm_formats.py").write_text(PEER)
    monkeypatch.setattr(peer_process, "FOLDER", tmp_path)
    words = ["--quick", "--runs", "1", "--lens", "100", "--formats", "hermes"]
    words += ["--json", str(tmp_path / "rows.json"), "--vllm-python", sys.executable]
    assert main(["bench", "formats", *words]) == 0
    ours, theirs = json.loads((tmp_path / "rows.json").read_text())
    cases = len(MADE_CASES)
    assert ours.pop("us_per_delta_100") > 0
    assert ours == {
        "format": "hermes",
        "reader": "slipstream",
        "answers": 2 * cases,
        "right": 2 * cases,
        "cases": cases,
        "same": cases,
    }
    assert theirs == {
        "format": "hermes",
        "reader": "vllm 9",
        "us_per_delta_100": 7.5,
        "answers": 2 * cases,
        "right": 0,
        "cases": cases,
        "same": cases,
    }
    assert "hermes" in capsys.readouterr().out
