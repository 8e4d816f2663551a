"""Ids of calls: those in the form that Mistral's chat templates insist on, and repeated ones."""

from __future__ import annotations

import re
import string
from hashlib import blake2b

_CHARS = string.digits + string.ascii_letters
_NUM_CHARS = 9
_is_short = re.compile(rf"[0-9A-Za-z]{{{_NUM_CHARS}}}").fullmatch


def made_call_id(stream_id: bytes, index: int) -> str:
    """Nine letters and digits for a stream's `index`-th call, the same after every death of a
    process.
    """
    return _short_hash(stream_id + index.to_bytes(4, "little"))


def short_call_id(call_id: str) -> str:
    """The id itself where it is nine letters and digits, else nine that are a function of it."""
    if _is_short(call_id):
        return call_id
    return _short_hash(call_id.encode(errors="surrogatepass"))


def id_digest(call_id: str) -> int:
    """64 bits by which an answer's reader knows the ids of earlier calls."""
    return int.from_bytes(blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).digest())


def _short_hash(data: bytes) -> str:
    number = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    chars = []
    for _ in range(_NUM_CHARS):
        number, char = divmod(number, len(_CHARS))
        chars.append(_CHARS[char])
    return "".join(chars)
