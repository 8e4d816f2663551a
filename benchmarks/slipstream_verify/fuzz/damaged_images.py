"""Files that say they are pictures: tiny ones, cut off, changed, of huge sizes, of two kinds at
once. They do no harm to anything that reads their header alone, or that bounds what it decodes.
"""

from __future__ import annotations

import base64
import struct
import zlib
from random import Random


def damaged_image(random: Random) -> bytes:
    """A file, which may even be a picture."""
    width, height = random.choice(((1, 1), (9, 7), (30_000, 30_000), (0, 5), (2**31 - 1, 1)))
    make = random.choice((_png, _gif, _webp, _jpeg))
    data = bytearray(make(width, height))
    if random.random() < 0.3:
        del data[random.randrange(len(data)) :]
    for _ in range(random.choice((0, 0, 1, 5))):
        if data:
            data[random.randrange(len(data))] = random.randrange(256)
    if random.random() < 0.2:
        data += b"<html><script></script>" + make(3, 3)
    return bytes(data) if random.random() < 0.95 else random.randbytes(random.randrange(100))


def data_url(data: bytes, random: Random) -> str:
    """Its data URL, now and then a wrong one."""
    encoded = base64.b64encode(data).decode()
    if random.random() < 0.1:
        encoded = encoded[: random.randrange(len(encoded) + 1)] + random.choice(("", "=", "@", "é"))
    kind = random.choice(("image/png", "image/jpeg", "text/plain", ""))
    return f"{random.choice(('data:', 'data:', 'DATA:', 'file:'))}{kind};base64,{encoded}"


def _chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int) -> bytes:
    """A PNG with one row of pixels, fewer than its header says: decoders find it cut off."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1 + min(width, 2**16)))
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _gif(width: int, height: int) -> bytes:
    size = struct.pack("<HH", width % 2**16, height % 2**16)
    frame = b"\x2c" + bytes(4) + size + b"\0\2\2\x44\1\0"
    return b"GIF89a" + size + b"\x80\0\0" + bytes(6) + b"\x21\xfe\3abc\0" + frame + b";"


def _webp(width: int, height: int) -> bytes:
    bits = (width - 1) % 2**14 | (height - 1) % 2**14 << 14
    lossless = b"\x2f" + bits.to_bytes(4, "little") + bytes(4)
    chunk = b"VP8L" + struct.pack("<I", len(lossless)) + lossless + b"\0"
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def _jpeg(width: int, height: int) -> bytes:
    frame = struct.pack(">HBHHB", 11, 8, height % 2**16, width % 2**16, 1) + b"\1\x11\0"
    return b"\xff\xd8\xff\xe0\0\4ab\xff\xc0" + frame + b"\xff\xda\0\x08\1\1\0\0\x3f\0\xff\xd9"
