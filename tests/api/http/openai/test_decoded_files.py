"""Files of large bodies, decoded before their handler reads them."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.openai import decoded_files as module
from slipstream.http.openai.decoded_files import (
    decoded_files,
    has_large_files,
    known_file,
    known_files,
)
from slipstream.request.media import data_of_base64
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.validation.media import media_item


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 40)
    monkeypatch.setattr(module, "MIN_CHARS", 40)


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


FILES = st.binary(min_size=60, max_size=90)


@given(FILES, FILES, st.binary(max_size=20), st.booleans())
def test_each_large_file_is_found_by_its_text(
    one: bytes, other: bytes, small: bytes, is_compact: bool
) -> None:
    """In whichever API's form, and however JSON is spaced; small ones are left to the handler."""
    encoded = [base64.b64encode(each).decode() for each in (one, other, small)]
    source = {"type": "base64", "media_type": "image/png", "data": encoded[1]}
    value = {"a": [{"url": url(one)}, source, {"url": url(small)}], "data": "x"}
    body = json.dumps(value, separators=(",", ":") if is_compact else None).encode()

    found = decoded_files(body)

    assert has_large_files(body)
    assert found == {encoded[0]: media_item("image", one), encoded[1]: media_item("image", other)}
    with known_files(found):
        assert known_file(encoded[0]) == media_item("image", one)
        assert known_file(encoded[2]) is None
    assert known_file(encoded[0]) is None


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_whatever_a_body_holds_nothing_else_is_found(before: bytes, inside: bytes) -> None:
    body = before + b";base64," + inside + b"!" * 41
    for text, item in decoded_files(body + b'"').items():
        assert data_of_base64(text, "") == item.data
    assert decoded_files(body.replace(b'"', b"")) == {}


def test_what_is_wrong_is_left_to_the_reader() -> None:
    text = "A" * 49  # five characters of four
    body = json.dumps({"url": f"data:;base64,{text}"}).encode()
    assert decoded_files(body) == {}
    with pytest.raises(BadRequest):
        data_of_base64(text, "x")
    assert not has_large_files(json.dumps({"text": "a" * 100}).encode())


def test_many_files_are_decoded_that_are_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 files of a hundred kilobytes would delay all streams as one of 12 MiB does."""
    monkeypatch.setattr(module, "LARGE_BYTES", 500)
    files = [bytes([at]) * 60 for at in range(8)]
    body = json.dumps([url(each) for each in files]).encode()
    assert has_large_files(body)
    assert [item.data for item in decoded_files(body).values()] == files
