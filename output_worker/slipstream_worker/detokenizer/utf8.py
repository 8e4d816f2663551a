"""Incremental UTF-8 decoding, with the two ways in which decoders replace invalid bytes.

- Bytes wait only while they are a prefix of some character: three at most.
- U+FFFD is emitted as soon as it is certain. Python's incremental decoder waits for the third byte
  of a surrogate, which UTF-8 does not have; this one does not.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Literal

__all__ = ["MAX_DANGLING", "REPLACEMENT", "begins_character", "decode_joined", "decode_run_byte"]

REPLACEMENT = "\ufffd"
MAX_DANGLING = 3  # bytes of an incomplete UTF-8 character, so also the tokens with such bytes


def _short_beginnings() -> frozenset[bytes]:
    """The proper prefixes of all encoded characters that have one byte or two."""
    two_bytes = range(0x80, 0x800, 0x40)  # one character for each prefix
    three_bytes = range(0x800, 0x10000, 0x40)
    four_bytes = range(0x10000, 0x110000, 0x1000)
    codes = (*two_bytes, *three_bytes, *four_bytes)
    rows = [chr(code).encode() for code in codes if not 0xD800 <= code < 0xE000]
    return frozenset(row[:length] for row in rows for length in (1, 2) if length < len(row))


_SHORT_BEGINNINGS = _short_beginnings()


def begins_character(data: bytes) -> bool:
    """True if `data` is a proper prefix of some encoded character."""
    if len(data) == MAX_DANGLING:
        return data[0] >= 0xF0 and data[2] & 0xC0 == 0x80 and data[:2] in _SHORT_BEGINNINGS
    return data in _SHORT_BEGINNINGS


def decode_joined(
    data: bytes, errors: Literal["replace", "ignore"] = "replace"
) -> tuple[str, bytes]:
    """ByteLevel's way: one U+FFFD for an incomplete character that is not continued, and one for
    each byte that begins none; with errors="ignore", nothing for either.

    Returns the text of `data`, and the bytes at its end that wait.
    """
    if begins_character(data):
        return "", data
    text, num_used = utf_8_decode(data, errors, False)
    rest = data[num_used:]
    if rest and not begins_character(rest):
        return text + rest.decode("utf-8", errors), b""
    return text, rest


def decode_run_byte(waiting: bytes, byte: bytes) -> tuple[str, bytes]:
    """Byte fallback's way: one U+FFFD for each byte that belongs to no character.

    Returns the text that `byte` completes after the bytes in `waiting`, and the bytes that wait
    now.
    """
    data = waiting + byte
    if begins_character(data):
        return "", data
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        if not waiting:
            return REPLACEMENT, b""
    text, rest = decode_run_byte(b"", byte)
    return REPLACEMENT * len(waiting) + text, rest
