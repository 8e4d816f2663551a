"""Mutations of encoded messages: cut, changed, restructured. Pure."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

# wrong values for any field
_ODD: tuple[Any, ...] = (
    *(0, 1, -1, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63),
    *(2**64 - 1, -(2**31) - 1, -(2**63)),
    *(0.0, -1.5, 1e308, float("nan"), float("inf")),
    *(None, True, False, "", "\0", "x" * 2000, "é" * 16, "\U0001f600"),
    *(b"", b"\0", bytes(3), bytes(4), b"\xff" * 4, b"\xff" * 64, bytes(16), b"\xff" * 4096),
    *([], [[]], [[[[[[[[]]]]]]]], [None] * 300, [0] * 5000, {}, {"": 0}, {"a": [{}]}),
    msgspec.msgpack.Ext(5, b"abc"),
)
_BYTES = b"\x00\x01\x7f\x80\x90\x93\x9f\xa0\xbf\xc0\xc1\xc4\xc6\xc9\xca\xcf\xd3\xd9\xdb\xdd\xdf\xff"
_DEEP = (b"\x91" * 100_000, b"\x94\x01\x01\x01" + b"\x81\xa0" * 50_000)
_HUGE = (  # headers that announce more than follows
    b"\xdd\xff\xff\xff\xff",
    b"\x94\x01\x01\x01\xc6\xff\xff\xff\xff",
    b"\x94\x01\x01\x01\x95\x0a\x01\xc6\x7f\xff\xff\xff",
    b"\x94\x01\x01\x01\x92\x21\xdd\x7f\xff\xff\xff",
    b"\x94\x01\x01\x01\xdf\xff\xff\xff\xff",
)


def truncated(random: Random, data: bytes) -> bytes:
    """A prefix of the message."""
    return data[: random.randrange(len(data))] if data else data


def flipped(random: Random, data: bytes) -> bytes:
    """The message with some bytes changed, removed, inserted or duplicated."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        at = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0:
                changed[at : at + 1] = random.randbytes(1)
            case 1:
                changed[at : at + 1] = bytes((random.choice(_BYTES),))
            case 2:
                del changed[at : at + random.randrange(1, 9)]
            case 3:
                changed[at:at] = random.randbytes(random.randrange(1, 9))
            case _:
                changed[at:at] = changed[at : at + random.randrange(1, 65)]
    return bytes(changed)


def restructured(random: Random, data: bytes) -> bytes:
    """Well-formed msgpack with a wrong value in some field."""
    try:
        value = _decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return flipped(random, data)  # it is not msgpack to begin with
    parent, at = _place(random, value)
    if parent is None:
        return _encode(random.choice(_ODD))
    match random.randrange(8):
        case 0:
            del parent[at]
        case 1 if isinstance(parent, list):
            parent.insert(at, random.choice(_ODD))
        case 2 if isinstance(parent, list):
            parent[at:at] = parent[at : at + 3]
        case 3 if isinstance(parent, list):
            parent.extend([random.choice(_ODD)] * random.choice((1, 3, 100)))
        case _:
            parent[at] = random.choice(_ODD)
    return _encode(value)


def noise(random: Random) -> bytes:
    """Random bytes."""
    kind = random.random()
    if kind < 0.01:
        return random.choice(_DEEP)
    if kind < 0.1:
        return random.choice(_HUGE)
    prefix = random.choice((b"", b"", b"\x94", b"\x94\x01\x01\x01", b"\x94\x01\x01\x01\x95"))
    return prefix + random.randbytes(random.choice((0, 1, 2, 8, 40, 300)))


def _place(random: Random, value: Any) -> tuple[Any, Any]:
    """Some nested list or map and a key of it; deeper ones less often."""
    parent, at = None, None
    while isinstance(value, list | dict) and value:
        if parent is not None and random.random() < 0.35:
            break
        parent = value
        at = random.randrange(len(value)) if isinstance(value, list) else random.choice([*value])
        value = value[at]
    return parent, at
