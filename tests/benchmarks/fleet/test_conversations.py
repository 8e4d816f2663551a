"""`slipstream bench conversations`: chats through a router to real replicas."""

from __future__ import annotations

import json

import msgspec

from slipstream.cli.main import main
from slipstream_lab.fleet.conversations import ChatTurn


def test_a_turn_is_what_its_events_say():
    turn = ChatTurn()
    events = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "one "}}]},
        {"choices": [{"delta": {"content": "two"}, "finish_reason": "length"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}},
        },
    ]
    body = b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])
    for at in range(0, len(body), 7):
        turn.feed(body[at : at + 7])
    turn.feed(b"data: [DONE]\n\n")
    assert (turn.answer, turn.prompt_tokens, turn.cached_tokens) == ("one two", 40, 32)
    assert turn.first_s is not None


def test_a_peers_router_needs_its_python(capsys):
    assert main(["bench", "conversations", "--routers", "sglang-cache_aware"]) == 2
    assert "--sglang-python" in capsys.readouterr().err


def test_turns_find_what_came_before_at_their_replica(tmp_path):
    file = tmp_path / "rows.json"
    picture = tmp_path / "rows.png"
    words = ["--quick", "--seconds", "12", "--rate", "1", "--json", str(file)]
    assert main(["bench", "conversations", *words, "--png", str(picture)]) == 0
    assert picture.stat().st_size > 0
    [row] = json.loads(file.read_text())
    assert row["failed"] == 0
    assert row["requests"] > 0
    assert 0 < row["hit_percent"] <= 100
