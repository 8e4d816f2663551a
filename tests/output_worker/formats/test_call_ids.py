"""Ids of calls that the model does not write, in formats with a form of their own."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream_ipc.formats.call_ids import written_id
from slipstream_ipc.formats.table import CALLS, compose
from slipstream_ipc.messages import AnswerOptions, EventKind
from slipstream_worker.formats.call_ids import made_call_id, short_call_id
from slipstream_worker.formats.compiled_format import compile_format

STREAM_ID = bytes(range(16))


def ids(name: str, text: str, stream_id: bytes = STREAM_ID) -> list[str]:
    compiled = compile_format(compose(None, CALLS[name]), {})
    reader = compiled.reader(None, AnswerOptions(), stream_id=stream_id)
    pieces = [*reader.feed(text), *reader.finish()]
    return [piece.event.call_id for piece in pieces if piece.event.kind == EventKind.CALL_BEGINS]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        "[TOOL_CALLS]f{}[TOOL_CALLS]g{}",
        "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}",
    ],
)
def test_mistrals_calls_get_nine_letters_and_digits(text: str) -> None:
    assert ids("mistral", text) == [made_call_id(STREAM_ID, 0), made_call_id(STREAM_ID, 1)]
    assert ids("mistral", text) == ids("mistral", text)
    assert not set(ids("mistral", text)) & set(ids("mistral", text, bytes(16)))
    assert ids("mistral", text, b"") == ["", ""]


def test_an_id_that_the_model_writes_stays() -> None:
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}") == ["abc123def"]


def test_other_formats_leave_the_id_to_the_client() -> None:
    assert ids("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>') == [""]


@given(st.text(st.characters(codec=None)), st.binary(min_size=16, max_size=16), st.integers(0, 9))
def test_every_id_is_nine_letters_and_digits(text: str, stream_id: bytes, index: int) -> None:
    for call_id in (short_call_id(text), made_call_id(stream_id, index)):
        assert re.fullmatch("[0-9A-Za-z]{9}", call_id)
        assert short_call_id(call_id) == call_id


def test_ids_differ() -> None:
    made = {made_call_id(bytes([which] * 16), i) for which in range(30) for i in range(30)}
    assert len(made) == 900
    assert made_call_id(bytes(16), 0) == "8MpOrjRWF"


def kimi(*call_ids: str) -> str:
    calls = [
        f"<|tool_call_begin|>{each}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for each in call_ids
    ]
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def test_an_id_that_a_model_repeats_is_made_different() -> None:
    found = ids("kimi_k2", kimi("functions.f:0", "functions.f:0", "functions.f:1", "functions.f:0"))
    assert found == [
        "functions.f:0",
        "functions.f:0__call1",
        "functions.f:1",
        "functions.f:0__call3",
    ]
    assert [written_id(each) for each in found] == [f"functions.f:{i}" for i in (0, 0, 1, 0)]
    short = ids("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}" * 2)
    assert short == ["abc123def", made_call_id(STREAM_ID, 1)]


@example(["a", "a__call2", "a"])
@given(st.lists(st.sampled_from(["a", "b", "a__call1", "a__call2", "x" * 256]), max_size=8))
def test_ids_of_an_answer_differ_whatever_the_model_writes(written: list[str]) -> None:
    found = ids("kimi_k2", kimi(*[f"functions.f:{each}"[:256] for each in written]))
    assert len(set(found)) == len(found) == len(written)
    assert all(len(each) <= 256 for each in found)


def test_a_reader_that_goes_on_knows_the_ids_before() -> None:
    compiled = compile_format(compose(None, CALLS["kimi_k2"]), {})
    before, after = kimi("functions.f:0"), kimi("functions.f:0")
    reader = compiled.reader(None, AnswerOptions(), stream_id=STREAM_ID)
    reader.feed(before)
    other = compiled.reader(None, AnswerOptions(), reader.state, STREAM_ID)
    begins = [each.event for each in other.feed(after) if each.event.call_id]
    assert [each.call_id for each in begins] == ["functions.f:0__call1"]
