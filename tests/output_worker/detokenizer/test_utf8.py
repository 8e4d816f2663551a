"""Bytes to text, a byte at a time, against decoders that see them all."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_worker.detokenizer.utf8 import (
    MAX_DANGLING,
    REPLACEMENT,
    begins_character,
    decode_joined,
    decode_run_byte,
)

# Beginnings, ends and neighbours of every range that UTF-8 tells apart.
EDGES = bytes.fromhex("0041 7f80 8f90 9fa0 bfc0 c1c2 dfe0 e1ec edee eff0 f1f3 f4f5 ff")
ANY_BYTES = st.lists(
    st.sampled_from(EDGES).map(lambda byte: bytes([byte]))
    | st.sampled_from("aé▁你\ufffd😀\U0010ffff").map(str.encode)
    | st.sampled_from([b"\xed\xa0\x80", b"\xed\xbf", b"\xf4\x90", b"\xe0\x80"]),
    max_size=8,
).map(b"".join)


def characters_alone(data: bytes) -> str:
    """Each byte that belongs to no character replaced: look for one at every place."""
    text, start = "", 0
    while start < len(data):
        for end in range(start + 1, start + 5):
            try:
                text += data[start:end].decode()
            except UnicodeDecodeError:
                continue
            start = end
            break
        else:
            text += REPLACEMENT
            start += 1
    return text


def can_become_a_character(data: bytes) -> bool:
    """Whether bytes follow with which `data` is one character."""
    for tail in (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xbf", b"\xbf\xbf", b"\xbf\xbf\xbf"):
        try:
            if len((data + tail).decode()) == 1:
                return True
        except UnicodeDecodeError:
            continue
    return False


@settings(max_examples=500, deadline=None)
@given(data=ANY_BYTES)
def test_joined_bytes_read_as_python_replaces_them(data: bytes) -> None:
    text, waiting = "", b""
    for byte in data:
        more, waiting = decode_joined(waiting + bytes([byte]))
        text += more
        assert len(waiting) <= MAX_DANGLING
        assert not waiting or can_become_a_character(waiting)
    assert text + REPLACEMENT * bool(waiting) == data.decode("utf-8", "replace")
    assert decode_joined(data) == (text, waiting)


@settings(max_examples=500, deadline=None)
@given(data=ANY_BYTES)
def test_runs_keep_every_character_and_replace_every_other_byte(data: bytes) -> None:
    text, waiting = "", b""
    for byte in data:
        more, waiting = decode_run_byte(waiting, bytes([byte]))
        text += more
        assert len(waiting) <= MAX_DANGLING
        assert not waiting or can_become_a_character(waiting)
    assert text + REPLACEMENT * len(waiting) == characters_alone(data)


def test_what_begins_a_character_is_a_proper_prefix_of_one() -> None:
    first_of_rows = range(0x80, 0x110000, 64)  # 64 consecutive ones differ only in the last byte
    rows = [chr(code).encode() for code in first_of_rows if not 0xD800 <= code < 0xE000]
    prefixes = {row[:length] for row in rows for length in range(1, len(row))}
    assert all(map(begins_character, prefixes))
    for length in range(MAX_DANGLING + 2):
        for found in map(bytes, product(EDGES, repeat=length)):
            assert begins_character(found) == (found in prefixes), found
