"""An item has one id: in each response of a chain that lists it, and where it is referred to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers.fake_worker import MODEL

from slipstream.http.api_errors import ApiError
from slipstream.http.responses.response_plan import Named, new_response
from slipstream.http.responses.response_record import KeptResponse
from slipstream.http.responses.responses_request import read_response_request
from slipstream_ipc.messages import AnswerEvent, End, EventKind, KeptAnswer

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"}
ITEMS = [
    USER,
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "y"},
    CUSTOM_CALL,
    {"type": "custom_tool_call_output", "call_id": "d", "output": "z"},
    {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec"}},
    {"type": "local_shell_call_output", "id": "e", "output": "z"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
]
TOOLS = [{"type": "custom", "name": "p"}]
ANSWER = (
    AnswerEvent(EventKind.CONTENT, "So"),
    AnswerEvent(EventKind.CALL_BEGINS, "p", 0, "call_1"),
    AnswerEvent(EventKind.CALL_ARGUMENTS, '{"input": "q"}', 0),
    AnswerEvent(EventKind.CALL_ENDS, "", 0),
)


class Server:
    """Keeps the responses that it makes, each with the same answer."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptResponse] = {}

    def answer(self, given: list[dict[str, Any]], previous: str | None = None) -> str:
        """The id of a new response."""
        fields = {"input": given, "previous_response_id": previous, "tools": TOOLS}
        body = read_response_request(json.dumps(fields).encode())
        named = Named(body)
        for key in named.stream_ids:
            if key in self.kept:
                named.add(key, self.kept[key])
        plan, response = new_response(body, MODEL, named=named)
        keep = plan.states[0].request.keep
        key = response.id.partition("_")[2]
        self.kept[key] = KeptResponse(KeptAnswer(keep, 1, End("stop", 4), events=ANSWER))
        return response.id

    def listed(self, response_id: str) -> list[str]:
        given = self.kept[response_id.partition("_")[2]].input()
        return [given.item(at)[0] for at in range(len(given))]

    def output(self, response_id: str) -> list[str]:
        return [item.id for item in self.kept[response_id.partition("_")[2]].response.output]


def test_ids_are_equal_along_a_chain() -> None:
    server = Server()
    first = server.answer(ITEMS)
    second = server.answer([USER], first)
    third = server.answer([USER], second)
    listed = [server.listed(each) for each in (first, second, third)]
    assert listed[1][: len(ITEMS) + 2] == listed[0] + server.output(first)
    assert listed[2][: len(listed[1]) + 2] == listed[1] + server.output(second)
    assert len(set(listed[2])) == len(listed[2]) == len(ITEMS) + 2 + 1 + 2 + 1


def test_every_listed_id_may_be_referred_to() -> None:
    server = Server()
    first = server.answer(ITEMS)
    second = server.answer([USER], first)
    ids = [*server.listed(second), *server.output(second)]
    references = [{"type": "item_reference", "id": each} for each in ids]
    third = server.answer(references)
    assert server.listed(third) == ids
    again = server.kept[third.partition("_")[2]].input_items()
    assert [item.kind for item in again[: len(ITEMS)]] == [
        item.get("type", "message") for item in ITEMS
    ]


def test_an_id_of_this_server_stays_and_another_does_not() -> None:
    """A client that sends items back lists them under the ids that it knows."""
    server = Server()
    ours = server.output(server.answer([USER]))[0]
    said = {"type": "message", "role": "assistant", "content": "So"}
    response = server.answer([{**said, "id": ours}, {**said, "id": "msg_of_another"}])
    first, other = server.listed(response)
    assert first == ours
    assert other == f"msg_{response.partition('_')[2]}i0001"
    assert server.listed(server.answer([{"type": "item_reference", "id": other}])) == [other]


@pytest.mark.parametrize("item_id", ["msg_1", "resp_" + "0" * 32, "msg_" + "0" * 32 + "i00"])
def test_other_ids_are_unknown(item_id: str) -> None:
    server = Server()
    server.answer([USER])
    with pytest.raises(ApiError, match="unknown item"):
        server.answer([{"type": "item_reference", "id": item_id}])


def test_an_item_is_referred_to_once() -> None:
    server = Server()
    [item_id] = server.listed(server.answer([USER]))
    with pytest.raises(ApiError, match="one before names it"):
        server.answer([{"type": "item_reference", "id": item_id}] * 2)
