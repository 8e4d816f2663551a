"""The header that names what was done to a chat's turns, at every endpoint that renders one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import Raw

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import End, Submit, Tokenize, Tokenized

HEADER = "x-slipstream-changed-turns"
TURNS = [{"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": TURNS},
    "/v1/messages": {"model": "fake", "messages": TURNS, "max_tokens": 5},
}
QUERIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"messages": TURNS},
    "/v1/responses/input_tokens": {"input": TURNS},
    "/v1/messages/count_tokens": {"model": "fake", "messages": TURNS},
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("changes", [(), ("system-first", "users-joined")])
def test_answers_name_what_was_done(
    raw: Raw, played: FakeWorker, path: str, is_stream: bool, changes: Any
) -> None:
    raw.post(path, {**STREAMS[path], "stream": is_stream})
    submit = played.expect(Submit)
    assert [turn.role for turn in submit.messages] == ["user", "system"]
    played.accept(submit, changed_turns=changes)
    played.send(deltas(Entry(submit.handle, "x", end=End("stop", 1))))
    answer = raw.read()
    assert answer.status == 200
    assert answer.headers.get(HEADER) == (", ".join(changes) or None)


@pytest.mark.parametrize("path", QUERIES)
@pytest.mark.parametrize("changes", [(), ("system-in-user",)])
def test_counts_name_what_was_done(raw: Raw, played: FakeWorker, path: str, changes: Any) -> None:
    raw.post(path, QUERIES[path])
    asked = played.expect(Tokenize)
    played.send(Tokenized(asked.number, pack_u32([1]), changed_turns=changes))
    answer = raw.read()
    assert answer.status == 200
    assert answer.headers.get(HEADER) == (", ".join(changes) or None)


def test_an_answer_in_the_background_names_it(raw: Raw, played: FakeWorker) -> None:
    raw.post("/v1/responses", {**STREAMS["/v1/responses"], "background": True})
    submit = played.expect(Submit)
    played.accept(submit, changed_turns=("system-first",))
    assert raw.read().headers[HEADER] == "system-first"
