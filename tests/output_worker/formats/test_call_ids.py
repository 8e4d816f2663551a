"""Ids of calls that the model does not write, in formats with a form of their own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
