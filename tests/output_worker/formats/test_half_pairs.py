"""Escapes of half a surrogate pair, which many readers of JSON refuse: arguments have none."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.output_worker.formats.test_any_division import FORMATS, TOOLS, WRITTEN

from slipstream_ipc.messages.answer import AnswerOptions, EventKind
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.scanners.json_scanner import JsonScanner, without_halves
from slipstream_worker.formats.scanners.keyword_arguments import python_container_as_json
from slipstream_worker.formats.scanners.scanner import ScanStatus
from slipstream_worker.formats.scanners.values import value_as_json

HALF = re.compile("[\ud800-\udfff]")
PIECES = st.sampled_from(
    [r"\ud83d", r"\uDE00", r"\u0041", r"\\", r"\n", r"\uD83", "x", "u", "d83d", "\\", "e", " "]
)


def scanned(*parts: str) -> tuple[str, ScanStatus]:
    scanner, text, status = JsonScanner(), "", ScanStatus.MORE
    for part in parts:
        _, status = scanner.feed(part, 0)
        text += scanner.take()
    return text, status


@given(st.lists(PIECES, max_size=8).map("".join))
def test_a_string_has_pairs_and_no_half(inner: str) -> None:
    text = f'{{"a": "{inner}"}}'
    found, status = scanned(text)
    assert (found, status) == scanned(*text)
    if status is not ScanStatus.DONE:
        return
    value = json.loads(found)
    assert HALF.search(value["a"]) is None
    assert msgspec.json.decode(found) == value
    assert without_halves(found) == found
    try:
        expected = json.loads(text)
    except json.JSONDecodeError:
        return
    assert value == {"a": HALF.sub("\ufffd", expected["a"])}


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (r"x\ud800y", "x\ufffdy"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d\u0041", "\ufffdA"),
        (r"\\ud83d", r"\ud83d"),
    ],
)
def test_values_of_every_spelling(inner: str, expected: str) -> None:
    found, _ = scanned(f'"{inner}" ')
    assert json.loads(found) == expected
    assert json.loads(value_as_json(f'["{inner}"]', ()) or "") == [expected]
    assert json.loads(python_container_as_json(f"['{inner}']") or "") == [expected]


@given(st.sampled_from(sorted(WRITTEN)), st.data())
def test_arguments_of_every_format_can_be_encoded(name: str, data: st.DataObject) -> None:
    text = WRITTEN[name]
    at = data.draw(st.integers(0, len(text)))
    half = data.draw(st.sampled_from([r"\ud800", r"\udfff", r"\ud83d\ude00"]))
    reader = compile_format(FORMATS[name], {}).reader(TOOLS, AnswerOptions())
    pieces = [*reader.feed(text[:at] + half + text[at:]), *reader.finish()]
    events = [piece.event for piece in pieces]
    for ended in [each.call for each in events if each.kind == EventKind.CALL_ENDS]:
        arguments = "".join(
            each.text
            for each in events
            if each.kind == EventKind.CALL_ARGUMENTS and each.call == ended
        )
        assert isinstance(msgspec.json.decode(arguments), dict)
