"""What goes over the wire, byte by byte."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from slipstream.http import wire
from slipstream.http.responses import Model, Models

SEPARATORS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # what Python splits lines at
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(SEPARATORS))


@given(TEXTS)
def test_a_text_is_one_line_of_json_to_every_reader(text):
    encoded = wire.json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    event = wire.event(Models([Model(text, 1, 2)]))
    assert len(event.decode().splitlines()) == 2  # it and the empty line
    assert json.loads(event.removeprefix(b"data: "))["data"][0]["id"] == text


def test_chunks():
    assert wire.chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"


def test_a_whole_answer():
    response = wire.Response(200, b"{}", ((b"retry-after", b"1"),))
    assert wire.response_bytes(response, 0.5, keep_alive=True, version="1.1") == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
        b"retry-after: 1\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n{}"
    )
    closing = wire.response_bytes(response, 0, keep_alive=False, version="1.1", with_body=False)
    assert closing.endswith(
        b"content-length: 2\r\nretry-after: 1\r\ndate: Thu, 01 Jan 1970"
        b" 00:00:00 GMT\r\nconnection: close\r\n\r\n"
    )
    assert b"keep-alive" in wire.response_bytes(response, 0, keep_alive=True, version="1.0")


def test_a_stream_is_chunked_where_chunks_are_known():
    new = wire.stream_head(0, keep_alive=True, version="1.1")
    assert b"transfer-encoding: chunked\r\n\r\n" in new
    old = wire.stream_head(0, keep_alive=False, version="1.0")
    assert b"chunked" not in old
    assert b"connection: close\r\n" in old


@given(
    st.lists(st.text(st.sampled_from('a",\\\x7f\x00\u2028\x85é') | st.characters(codec="utf-8")))
)
def test_many_texts_are_encoded_as_each_of_them(texts: list[str]) -> None:
    assert wire.json_parts(texts) == [wire.json_text(text)[1:-1] for text in texts]
