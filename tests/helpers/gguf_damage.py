"""Damages GGUF files: bits, lengths, counts, pieces cut out, repeated and exchanged."""

from __future__ import annotations

import random
import struct

_NUMBERS = (
    0,
    1,
    2,
    3,
    8,
    9,
    31,
    33,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A file with one to three damages, most of them in its header."""
    end = content.find(b"output_norm.weight") + 64  # about where the table of tensors ends
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        limit = min(len(found), end if draw.random() < 0.9 else len(found))
        at = draw.randrange(max(1, limit))
        kind = draw.randrange(7)
        if kind == 0:
            found[at : at + 1] = bytes([found[at] ^ 1 << draw.randrange(8)]) if found else b""
        elif kind == 1:
            found[at : at + 8] = struct.pack("<Q", draw.choice(_NUMBERS))
        elif kind == 2:
            found[at : at + 4] = struct.pack("<I", draw.choice(_NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            del found[at : at + draw.randrange(1, 64)]
        elif kind == 5:
            found[at:at] = found[at : at + draw.randrange(1, 256)]
        else:
            found[at : at + 8] = draw.randbytes(8)
        if not found:
            break
    return bytes(found)
