"""The events of a response: valid, in order, and the same however the answer was divided."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.helpers.answer_units import AnswerUnit, answer_units
from tests.helpers.response_events import response_events, with_joined_deltas

from slipstream.answers.tool_calls import with_call_ids
from slipstream.http.api_errors import ApiError
from slipstream.http.blocks.block_printer import BlockWriter, NumberedEvent, blocks_of
from slipstream.http.openai.usage import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from slipstream.http.response_encoding import json_raw
from slipstream.http.responses.response_object import ResponseObject
from slipstream.http.responses.response_printer import ResponsePrinter
from slipstream_ipc.messages import AnswerEvent, End, EventKind

CONTENT, REASONING, BEGINS, ARGUMENTS, ENDS = EventKind
KEY = "0123456789abcdef" * 2
RESPONSE = ResponseObject(id=f"resp_{KEY}", created_at=7, model="m")
USAGE = Usage(10, 5, 15, PromptTokensDetails(4), CompletionTokensDetails(3))
END = End("stop", 5)
_event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def writer(after: int = -1) -> BlockWriter:
    return BlockWriter(ResponsePrinter(RESPONSE), after)


def printed(
    divided: list[tuple[AnswerEvent, ...]], end: End = END, after: int = -1
) -> list[NumberedEvent]:
    """All events of an answer whose events come in these groups."""
    answer = writer(after)
    found = answer.begin(USAGE)
    for events in divided:
        found += answer.write(events)
    return found + answer.finish(end, USAGE)


def test_a_response_that_has_become_too_large_to_be_kept_says_so() -> None:
    """Its last event does; its first ones could not know."""
    events = (
        AnswerEvent(CONTENT, "é"),
        AnswerEvent(BEGINS, "f", 0, "call_1"),
        AnswerEvent(ARGUMENTS, "{}", 0),
        AnswerEvent(ENDS, "", 0),
    )
    for most, is_kept in ((5, True), (4, False)):
        answer = BlockWriter(ResponsePrinter(RESPONSE, most))
        found = answer.begin(USAGE) + answer.write(events) + answer.finish(END, USAGE)
        stored = [each["response"]["store"] for each in map(data_of, found) if "response" in each]
        assert stored == [True, True, is_kept]


def test_one_that_fails_says_so_as_well() -> None:
    for most, is_kept in ((2, True), (1, False)):
        answer = BlockWriter(ResponsePrinter(RESPONSE, most))
        answer.begin(USAGE)
        answer.write((AnswerEvent(CONTENT, "é"),))
        failed = data_of(NumberedEvent(answer.number + 1, answer.fail(ApiError(500, "broken"))))
        assert failed["response"]["store"] is is_kept


def data_of(event: NumberedEvent) -> dict[str, Any]:
    """The data of an event, checked against its name and number."""
    [(_, found)] = response_events(event.data)
    assert found["sequence_number"] == event.number
    return found


def joined(events: list[NumberedEvent]) -> list[dict[str, Any]]:
    """The data of events with the deltas of each text joined."""
    return with_joined_deltas([("", data_of(event)) for event in events])


def divided(units: list[AnswerUnit], data: st.DataObject) -> list[tuple[AnswerEvent, ...]]:
    """The answer's events in groups of units."""
    groups: list[tuple[AnswerEvent, ...]] = []
    while units:
        size = data.draw(st.integers(1, 3))
        groups.append(tuple(event for unit in units[:size] for event in unit.events))
        units = units[size:]
    return groups


@given(answer_units(), st.sampled_from(["stop", "length", "abort"]), st.data())
def test_every_division_prints_the_same(
    units: list[AnswerUnit], reason: Any, data: st.DataObject
) -> None:
    end = End(reason, 5)
    whole = printed([tuple(event for unit in units for event in unit.events)], end)
    events = printed(divided(units, data), end)
    assert joined(events) == joined(whole)
    numbers = [event.number for event in events]
    assert all(before < after for before, after in pairwise([-1, *numbers]))
    after = data.draw(st.integers(0, numbers[-1]))
    rest = printed(divided(units, data), end, after)
    assert all(event.number > after for event in rest)
    known = printed([(event,) for unit in units for event in unit.events], end)
    cut = [event for event in known if event.number <= after]
    if not cut or cut[-1].number == after:
        assert joined(cut + rest) == joined(whole)


@given(answer_units(), st.data())
def test_the_openai_client_puts_the_response_together(
    units: list[AnswerUnit], data: st.DataObject
) -> None:
    state: Any = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in printed([with_call_ids(group, bytes(16)) for group in divided(units, data)]):
        state.handle_event(_event_type.validate_python(data_of(event)))
    response = state._completed_response
    events = with_call_ids(tuple(event for unit in units for event in unit.events), bytes(16))
    expected = ResponsePrinter(RESPONSE).whole(blocks_of(events, END), END, USAGE)
    assert response.status == expected.status == "completed"
    items = [item.to_dict() for item in response.output]
    for part in [part for item in items for part in item.get("content", ())]:
        part.pop("parsed", None)
    for item in items:
        item.pop("parsed_arguments", None)
    assert items == msgspec.json.decode(msgspec.json.encode(expected.output))
    assert response.output_text == "".join(each.text for each in events if each.kind == CONTENT)


ANSWER = (
    AnswerEvent(REASONING, "hm"),
    AnswerEvent(CONTENT, "So"),
    AnswerEvent(BEGINS, "f", 0, "call_1"),
    AnswerEvent(ARGUMENTS, '{"a": 1}', 0),
    AnswerEvent(ENDS, "", 0),
)


def test_the_order_of_events() -> None:
    found = [data_of(event) for event in printed([ANSWER])]
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message, call = found[-1]["response"]["output"]
    assert (reasoning["id"], message["id"], call["id"]) == (
        f"rs_{KEY}0000",
        f"msg_{KEY}0001",
        f"fc_{KEY}0002",
    )
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "So"
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "f", '{"a": 1}')
    assert found[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
    }
    for event in found:
        _event_type.validate_python(event, strict=False)


@pytest.mark.parametrize(
    ("reason", "events", "status", "last_item"),
    [
        ("stop", ANSWER, "completed", "completed"),
        ("stop", ANSWER[:4], "completed", "incomplete"),
        ("stop", ANSWER[:2], "completed", "completed"),
        ("length", ANSWER[:2], "incomplete", "incomplete"),
        ("length", ANSWER[:4], "incomplete", "incomplete"),
        ("repetition", ANSWER[:2], "incomplete", "incomplete"),
        ("abort", ANSWER[:2], "cancelled", "incomplete"),
    ],
)
def test_how_a_response_ends(
    reason: Any, events: tuple[AnswerEvent, ...], status: str, last_item: str
) -> None:
    last = data_of(printed([events], End(reason, 5))[-1])
    response = last["response"]
    kind = "completed" if status == "completed" else "incomplete"
    assert last["type"] == f"response.{kind}"
    assert response["status"] == status
    assert response["output"][-1]["status"] == last_item
    word = "content_filter" if reason == "repetition" else "max_output_tokens"
    details = {"reason": word} if status == "incomplete" else None
    assert response["incomplete_details"] == details
    Response.model_validate(response)


def test_a_failure_of_the_stream_alone_is_no_failed_response() -> None:
    """It is superseded, or its front is leaving."""
    for status in (409, 503):
        answer = writer()
        answer.begin(USAGE)
        event = NumberedEvent(2, answer.fail(ApiError(status, "elsewhere")))
        assert data_of(event)["type"] == "error"


def test_a_failure_is_the_last_event() -> None:
    answer = writer()
    answer.begin(USAGE)
    answer.write(ANSWER)
    event = NumberedEvent(answer.number + 1, answer.fail(ApiError(500, "broken")))
    data = data_of(event)
    assert data["type"] == "response.failed"
    assert data["response"]["error"] == {"code": "server_error", "message": "broken"}
    event = NumberedEvent(answer.number + 1, answer.fail(ApiError(409, "read", code="superseded")))
    assert data_of(event) == {
        "type": "error",
        "sequence_number": event.number,
        "code": "superseded",
        "message": "read",
        "param": None,
    }


def test_vllm_29725_24076_36435_arguments_are_events_of_their_own() -> None:
    """A call came as text of a message, or not at all behind reasoning."""
    call = [AnswerEvent(BEGINS, "f", 0, "call_1"), AnswerEvent(ARGUMENTS, '{"a": 1}', 0)]
    answer = [(AnswerEvent(REASONING, "Hm."),), *((each,) for each in call)]
    events = printed([*answer, (AnswerEvent(ENDS, "", 0),)])
    types = [data_of(each)["type"] for each in events]
    assert "response.reasoning_text.delta" in types
    assert "response.function_call_arguments.delta" in types
    assert "response.function_call_arguments.done" in types
    assert not [each for each in types if "output_text" in each]


# ---- calls of custom tools and of functions in namespaces ----------------------------------------

TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "multi",
        "description": "For many.",
        "tools": [{"type": "function", "name": "g"}, {"type": "custom", "name": "patch"}],
    },
    {"type": "function", "name": "f"},
)
WITH_TOOLS = structs.replace(RESPONSE, tools=json_raw(TOOLS))
INPUT = 'a "b"\n🏔'


def events_of_call(name: str, arguments: str, cuts: Iterable[int] = ()) -> list[AnswerEvent]:
    places = [0, *sorted(cuts), len(arguments)]
    pieces = [arguments[begin:end] for begin, end in pairwise(places)]
    texts = [AnswerEvent(ARGUMENTS, piece, 0) for piece in pieces]
    return [AnswerEvent(BEGINS, name, 0, "call_1"), *texts, AnswerEvent(ENDS, "", 0)]


def printed_call(events: list[AnswerEvent], end: End = END, after: int = -1) -> list[NumberedEvent]:
    answer = BlockWriter(ResponsePrinter(WITH_TOOLS), after)
    found = answer.begin(USAGE)
    for event in events:
        found += answer.write([event])
    return found + answer.finish(end, USAGE)


@given(st.sampled_from(["patch", "multi__patch"]), st.booleans(), st.data())
def test_the_call_of_a_custom_tool(name: str, is_ascii: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": INPUT}, ensure_ascii=is_ascii)
    cuts = data.draw(st.sets(st.integers(0, len(arguments)), max_size=6))
    events = events_of_call(name, arguments, cuts)
    found = printed_call(events)
    assert joined(found) == joined(printed_call(events_of_call(name, arguments)))
    for event in found:
        _event_type.validate_python(data_of(event))
    kinds = [event["type"].removeprefix("response.") for event in joined(found)]
    assert kinds[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    last = data_of(found[-1])["response"]
    namespace = {"namespace": "multi"} if name.startswith("multi") else {}
    item = {
        "id": f"ctc_{KEY}0000",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "patch",
        "input": INPUT,
        **namespace,
    }
    assert last["output"] == [item]
    whole = ResponsePrinter(WITH_TOOLS)
    blocks = blocks_of(events, END, whole.custom_tools)
    assert msgspec.to_builtins(whole.whole(blocks, END, USAGE).output) == [item]
    after = data.draw(st.integers(0, found[-1].number))
    rest = printed_call(events, after=after)
    known = [event for event in found if event.number <= after]
    if known[-1].number == after:
        assert joined(known + rest) == joined(found)


def test_the_call_of_a_function_in_a_namespace() -> None:
    found = [data_of(event) for event in printed_call(events_of_call("multi__g", "{}"))]
    [done] = [event for event in found if event["type"].endswith("arguments.done")]
    assert (done["name"], done["arguments"]) == ("g", "{}")
    [item] = found[-1]["response"]["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "g", "multi")
    [plain] = data_of(printed_call(events_of_call("f", "{}"))[-1])["response"]["output"]
    assert "namespace" not in plain


def test_an_input_that_was_cut_off_is_incomplete() -> None:
    events = events_of_call("patch", '{"input": "a\\n')[:-1]
    [item] = data_of(printed_call(events, End("length", 5))[-1])["response"]["output"]
    assert (item["status"], item["input"]) == ("incomplete", "a\n")


def test_what_a_model_wrote_counts_for_what_is_kept() -> None:
    """As in the worker, which does not know what the tool is."""
    arguments = json.dumps({"input": "é" * 10})
    size = len("patch" + arguments)
    for most, is_kept in ((size, True), (size - 1, False)):
        printer = ResponsePrinter(WITH_TOOLS, most)
        blocks = blocks_of(events_of_call("patch", arguments), END, printer.custom_tools)
        assert printer.whole(blocks, END, USAGE).store is is_kept
