"""`slipstream bench route`: its prompts, and its rows."""

from __future__ import annotations

import json

from slipstream.cli.main import main
from slipstream.client.placing.prompt_keys import chat_key
from slipstream_lab.fleet.route import _turns


def test_prompts_have_the_length_that_is_asked_for():
    for num_turns in (1, 2, 4):
        length = sum(len(turn.content) for turn in _turns(3, num_turns, 8192))
        assert 0.97 * 8192 < length <= 8192
    keys = [chat_key(_turns(3, num_turns, 8192), b"m") for num_turns in (1, 2)]
    assert [key.num_continued for key in keys] == [0, 1]


def test_the_command_writes_its_rows(tmp_path):
    file = tmp_path / "rows.json"
    words = ["--replicas", "2,8", "--requests", "20", "--runs", "1", "--json", str(file)]
    assert main(["bench", "route", *words]) == 0
    rows = json.loads(file.read_text())
    assert [row["replicas"] for row in rows] == [2, 8]
    assert all(row["placing_us"] > 0 for row in rows)
