"""What coding agents have sent is read whole: nothing is refused, and what is left out is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers.agent_recordings import RECORDINGS, Request, recorded_requests
from tests.helpers.fake_worker import MODEL
from tests.system.foreign_clients.coding_agents import AGAIN, AGENTS, ANSWER, FILES

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.anthropic.chat_request import chat_request
from slipstream.http.anthropic.messages import read_messages
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.responses.response_plan import new_response
from slipstream.http.responses.responses_request import read_response_request

RECORDED = sorted(path.stem for path in RECORDINGS.glob("*.jsonl"))


def planned(request: Request, ignored: IgnoredFields) -> AnswerPlan:
    content = json.dumps(request.body).encode()
    match request.path:
        case "/v1/responses":
            return new_response(read_response_request(content, ignored), MODEL)[0]
        case "/v1/messages":
            return plan_chat(chat_request(read_messages(content, ignored)), MODEL)
        case path:
            assert path == "/v1/chat/completions"
            return plan_chat(read_chat(content, ignored), MODEL)


def test_all_agents_are_recorded() -> None:
    assert set(RECORDED) == set(AGENTS)


@pytest.mark.parametrize("agent", RECORDED)
def test_an_agents_requests_are_read_whole(agent: str) -> None:
    ignored = IgnoredFields()
    pairs: list[tuple[list[str], list[str]]] = []
    last: Any = None
    for request in recorded_requests(agent):
        last = planned(request, ignored).states[0].request
        called = [str(call.id) for turn in last.messages for call in turn.tool_calls or ()]
        answered = [str(turn.tool_call_id) for turn in last.messages if turn.role == "tool"]
        pairs.append((called, answered))
    assert {each for each in str(ignored).split(", ") if each} == AGENTS[agent].ignored
    assert all(called == answered for called, answered in pairs)
    assert max(len(called) for called, _ in pairs) == len(FILES)
    texts = "".join([turn.content for turn in last.messages])
    going_on = (AGAIN, ANSWER) if AGENTS[agent].go_on else ()
    assert all(each in texts for each in (*going_on, *FILES.values()))
    names = [tool["function"]["name"] for tool in json.loads(last.template.tools)]
    assert AGENTS[agent].tool in names


@pytest.mark.parametrize("agent", RECORDED)
def test_no_text_of_an_agent_is_kept(agent: str) -> None:
    for line in (RECORDINGS / f"{agent}.jsonl").read_text().splitlines():
        assert all(len(text) < 200 for text in texts_of(json.loads(line)))


def texts_of(value: Any) -> list[str]:
    match value:
        case dict():
            return [text for each in value.values() for text in texts_of(each)]
        case list():
            return [text for each in value for text in texts_of(each)]
        case str():
            return [value]
        case _:
            return []
