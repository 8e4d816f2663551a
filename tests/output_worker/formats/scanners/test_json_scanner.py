"""The scanner of JSON values against json.loads."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_worker.formats.scanners.json_scanner import (
    MAX_NESTING,
    MAX_SCALAR_CHARS,
    JsonScanner,
)
from slipstream_worker.formats.scanners.scanner import ScanStatus

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)  # fmt: skip
fragments = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', "\\", "\\u", "00e9", "a", "b", "/", "n", "true", "null",
     "-", "0", "1", "12", ".", "e", "E", "+", " ", "\n", "\x01", "é"]
)  # fmt: skip


def scan(parts: list[str], objects_only: bool = False) -> tuple[str, ScanStatus, int]:
    """(output, status, characters taken)."""
    scanner = JsonScanner(objects_only)
    output, taken = "", 0
    for part in parts:
        end, status = scanner.feed(part, 0)
        output += scanner.take()
        taken += end
        if status is not ScanStatus.MORE:
            return output, status, taken
        assert end == len(part)
    return output + scanner.break_off(), ScanStatus.MORE, taken


def is_beginning(text: str) -> bool:
    """Whether some text behind this one makes it valid JSON. Simple and slow: tries endings."""
    if not text.strip():
        return True
    stack: list[str] = []
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            stack.append("]" if char == "[" else "}")
        elif char in "]}" and (not stack or stack.pop() != char):
            return False
    closing = "".join(reversed(stack))
    middles = ["", '"', '":0', ":0", "0", '"":0', "rue", "ue", "e", "alse", "lse", "se", "ull"]
    middles += ["ll", "l", 'n"', '0000"', '000"', '00"', '0"', '":0', 'n":0', '0000":0', '000":0']
    middles += ['00":0', '0":0']
    for middle in middles:
        try:
            json.loads(text + middle + closing, strict=True)
        except ValueError:
            continue
        return True
    return False


@given(values, st.lists(st.integers(1, 5), min_size=1), st.booleans(), st.sampled_from([None, 1]))
def test_what_is_valid_is_given_as_it_is(
    value: object, sizes: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps([value], ensure_ascii=ascii_only, indent=indent)
    parts, pos = [], 0
    while pos < len(text):
        size = sizes[len(parts) % len(sizes)]
        parts.append(text[pos : pos + size])
        pos += size
    assert scan(parts) == (text, ScanStatus.DONE, len(text))


@given(st.lists(fragments, max_size=14), st.booleans())
def test_output_is_always_a_beginning_of_json(parts: list[str], objects_only: bool) -> None:
    output, status, taken = scan(parts, objects_only)
    assert (output, status, taken) == scan(list("".join(parts)), objects_only)
    assert is_beginning(output)
    if status is ScanStatus.DONE:
        value = json.loads(output)
        assert isinstance(value, dict) or not objects_only


@given(st.lists(fragments, max_size=10))
def test_nothing_valid_is_refused(parts: list[str]) -> None:
    text = "".join(parts)
    try:
        json.loads(text)
    except ValueError:
        return
    output, status, _ = scan([text + " "])
    assert (output.strip(), status) == (text.strip(), ScanStatus.DONE)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('["a\nb\x01"]', '["a\\nb\\u0001"]'),
        (r'["\d+ \x \u12g"]', r'["\\d+ \\x \\u12g"]'),
        (r'["C:\"]"]', r'["C:\"]"]'),
    ],
)
def test_what_models_write_wrongly_is_mended(text: str, output: str) -> None:
    assert scan([text]) == (output, ScanStatus.DONE, len(text))
    assert scan(list(text)) == (output, ScanStatus.DONE, len(text))
    json.loads(output)


def test_nesting_is_bounded() -> None:
    assert scan(["[" * MAX_NESTING + "]" * MAX_NESTING])[1] is ScanStatus.DONE
    assert scan(["[" * (MAX_NESTING + 1)])[1:] == (ScanStatus.FAILED, MAX_NESTING)


def test_numbers_are_bounded() -> None:
    assert scan(["1" * MAX_SCALAR_CHARS + " "])[1] is ScanStatus.DONE
    long = "1" * (MAX_SCALAR_CHARS + 1)
    assert scan([long])[1:] == scan(list(long))[1:] == (ScanStatus.FAILED, MAX_SCALAR_CHARS)
