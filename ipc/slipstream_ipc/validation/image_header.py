"""Reads format, size and orientation from a picture's file: PNG, JPEG, WebP or GIF, as its first
bytes say, whatever its name or declared type. No pixel is decoded.

- A file costs `_MAX_BLOCKS` steps at most, whatever it holds: a request has many files, and loops
  that serve others read their headers.
- Of an animation the size is that of its first frame on its canvas.
- The orientation is a tag of EXIF alone (TIFF 6.0, tag 274); one that is malformed is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from struct import Struct as Layout
from struct import error as LayoutError  # noqa: N812
from typing import Literal, NamedTuple

from slipstream_ipc.errors import BadRequest, Summary

ImageFormat = Literal["PNG", "JPEG", "WebP", "GIF"]

MAX_IMAGE_PIXELS = 2**25
FORMATS = "a PNG, JPEG, WebP or GIF picture"
_MAX_BLOCKS = 2**11  # of a file: chunks or sub-blocks
_MAX_SEGMENTS = 2**9  # of a JPEG before its pixels: a color profile has 255, of 64 KiB each
_MAX_TAGS = 1024  # of EXIF's first directory
_ORIENTATION = 274
_TURNED = range(5, 9)  # orientations that exchange width and height
_SHORT = 3  # TIFF's number of a type of 16 bits
_PNG = b"\x89PNG\r\n\x1a\n"
_SIGNATURES: tuple[tuple[bytes, ImageFormat], ...] = (
    (_PNG, "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
)
_OTHERS = (  # what people send besides, for the error
    (b"%PDF", "a PDF file"),
    (b"BM", "a BMP picture"),
    (b"II*\0", "a TIFF picture"),
    (b"MM\0*", "a TIFF picture"),
    (b"<svg", "an SVG picture"),
    (b"<?xml", "an XML file"),
    (b"<", "a page of HTML or XML"),
    (b"{", "JSON"),
)
_CHUNK = Layout(">I4s")
_RIFF_CHUNK = Layout("<4sI")
_U32_PAIR = Layout(">II")
_U16_PAIR = Layout("<HH")
_FRAME = Layout("<HHHH")
_SEGMENT = Layout(">H")
_START_OF_FRAME = Layout(">BHH")
_NO_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
_EXIF = b"Exif\0\0"


class ImageHeader(NamedTuple):
    """The header of a picture. width, height: in pixels, as the picture is shown, which is
    after the orientation is applied. orientation: EXIF's, 1 to 8; 1: as it is stored.
    """

    format: ImageFormat
    width: int
    height: int
    orientation: int = 1

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height of the pixels in the file."""
        is_turned = self.orientation in _TURNED
        return (self.height, self.width) if is_turned else (self.width, self.height)


def image_header(data: bytes, field: str = "media") -> ImageHeader:
    """The header of a picture's file. field: its name in errors.

    Raises BadRequest for another file, for one whose header is damaged or incomplete, and for more
    than `MAX_IMAGE_PIXELS`.
    """
    found = image_format(data)
    if found is None:
        raise BadRequest(field, Summary(_kind_of(data)), FORMATS)
    try:
        header = _READERS[found](data)
    except (LayoutError, IndexError):
        raise BadRequest(field, Summary(f"a {found} file that is cut off"), "a whole one") from None
    except _DamagedError as error:
        raise BadRequest(field, Summary(f"a {found} file {error}"), FORMATS) from None
    if header.width < 1 or header.height < 1:
        given = Summary(f"a {found} file of {header.width} x {header.height} pixels")
        raise BadRequest(field, given, "a picture of one pixel or more")
    if header.width * header.height > MAX_IMAGE_PIXELS:
        given = Summary(f"{header.width} x {header.height} pixels")
        raise BadRequest(field, given, f"at most {MAX_IMAGE_PIXELS} pixels")
    return header


def image_format(data: bytes) -> ImageFormat | None:
    """The format of a picture's file by its first 16 bytes; None for other files."""
    for signature, found in _SIGNATURES:
        if data.startswith(signature):
            return found
    return "WebP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def fitted_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size to which a picture is brought so that it has `max_pixels` at most, in its own
    proportions; its own size where it has no more. 0: no limit.
    """
    if not max_pixels or width * height <= max_pixels:
        return width, height
    fitted_width = min(max_pixels, max(1, isqrt(max_pixels * width // height)))
    fitted_height = min(max_pixels, max(1, isqrt(max_pixels * height // width)))
    return fitted_width, min(fitted_height, max_pixels // fitted_width)


class _DamagedError(Exception):
    """A header that contradicts its format; the text goes on from "a PNG file"."""


def _png(data: bytes) -> ImageHeader:
    length, kind = _CHUNK.unpack_from(data, len(_PNG))
    if kind != b"IHDR" or length != 13:
        raise _DamagedError("without IHDR in front")
    width, height = _U32_PAIR.unpack_from(data, len(_PNG) + _CHUNK.size)
    at, exif = len(_PNG), b""
    for _ in range(_MAX_BLOCKS):
        if at + _CHUNK.size > len(data):
            break  # cut off behind the header: whoever decodes it finds out
        length, kind = _CHUNK.unpack_from(data, at)
        if kind == b"eXIf":
            exif = data[at + _CHUNK.size : at + _CHUNK.size + length]
        if kind in (b"IEND", b"eXIf"):
            break
        at += _CHUNK.size + length + 4
    return _oriented("PNG", width, height, exif)


def _jpeg(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    exif = b""
    for marker, begin, end in _segments(data):
        if marker in _FRAMES:
            _, height, width = _START_OF_FRAME.unpack_from(data, begin)
            if size is not None:
                raise _DamagedError("of two frames")
            size = width, height
        elif marker == _APP1 and not exif and data.startswith(_EXIF, begin):
            exif = data[begin:end]
        elif marker == _START_OF_SCAN:
            break
    if size is None:
        raise _DamagedError("without a frame")
    return _oriented("JPEG", *size, exif)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, begin and end of the contents of a JPEG's segments, up to the first scan."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise _DamagedError("with bytes between its segments")
        marker = data[at + 1]
        if marker == 0xFF:  # any number may stand before a marker
            at += 1
            continue
        at += 2
        if marker in _NO_LENGTH:
            continue
        if marker == _END:
            return
        [length] = _SEGMENT.unpack_from(data, at)
        if length < 2:
            raise _DamagedError("with a segment of no length")
        yield marker, at + 2, at + length
        at += length
    raise _DamagedError(f"with more than {_MAX_SEGMENTS} segments before its pixels")


def _webp(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    at, exif = 12, b""
    for _ in range(_MAX_BLOCKS):
        if size is not None and at + _RIFF_CHUNK.size > len(data):
            break
        kind, length = _RIFF_CHUNK.unpack_from(data, at)
        begin = at + _RIFF_CHUNK.size
        if size is None:
            size = _webp_size(data, kind, begin)
        elif kind == b"EXIF":
            exif = data[begin : begin + length]
            break
        at = begin + length + length % 2
    assert size is not None  # the first chunk has it
    return _oriented("WebP", *size, exif)


def _webp_size(data: bytes, kind: bytes, at: int) -> tuple[int, int]:
    """Width and height in the first chunk of a WebP file, whose contents begin at `at`."""
    match kind:
        case b"VP8X":
            width, height = _little(data, at + 4, 3), _little(data, at + 7, 3)
            return 1 + width, 1 + height
        case b"VP8L" if data[at] == 0x2F:
            bits = _little(data, at + 1, 4)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 " if data[at + 3 : at + 6] == b"\x9d\x01\x2a":
            width, height = _U16_PAIR.unpack_from(data, at + 6)
            return width & 0x3FFF, height & 0x3FFF
        case _:
            raise _DamagedError("without a picture in front")


def _gif(data: bytes) -> ImageHeader:
    width, height = _U16_PAIR.unpack_from(data, 6)
    flags = data[10]
    at = 13 + (3 << (1 + (flags & 7)) if flags & 0x80 else 0)
    is_in_extension = False
    for _ in range(_MAX_BLOCKS):
        if is_in_extension:  # which is made of sub-blocks, an empty one at its end
            is_in_extension = data[at] > 0
            at += 1 + data[at]
            continue
        match data[at]:
            case 0x2C:
                left, top, frame_width, frame_height = _FRAME.unpack_from(data, at + 1)
                size = max(width, left + frame_width), max(height, top + frame_height)
                return ImageHeader("GIF", *size)
            case 0x21:
                is_in_extension = True
                at += 2
            case 0x3B:
                raise _DamagedError("without a frame")
            case _:
                at += 1  # decoders step over bytes of no meaning
    raise _DamagedError(f"with more than {_MAX_BLOCKS} blocks before its first frame")


def _little(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + size], "little")


def _oriented(found: ImageFormat, width: int, height: int, exif: bytes) -> ImageHeader:
    orientation = _orientation_of(exif.removeprefix(_EXIF))
    if orientation in _TURNED:
        width, height = height, width
    return ImageHeader(found, width, height, orientation)


def _orientation_of(tiff: bytes) -> int:
    """The orientation in EXIF data, which is laid out as a TIFF file; 1 where there is none."""
    order: Literal["little", "big"] = "little" if tiff.startswith(b"II*\0") else "big"
    if order == "big" and not tiff.startswith(b"MM\0*"):
        return 1
    directory = int.from_bytes(tiff[4:8], order)
    num_tags = int.from_bytes(tiff[directory : directory + 2], order)
    for index in range(min(num_tags, _MAX_TAGS)):
        at = directory + 2 + 12 * index
        if int.from_bytes(tiff[at : at + 2], order) == _ORIENTATION:
            kind = int.from_bytes(tiff[at + 2 : at + 4], order)
            value = int.from_bytes(tiff[at + 8 : at + 10], order)
            return value if kind == _SHORT and 1 <= value <= 8 else 1
    return 1


def _kind_of(data: bytes) -> str:
    """A file that is no picture of these formats, in words."""
    if not data:
        return "an empty file"
    if data[4:8] == b"ftyp":
        brand = data[8:12].decode("ascii", "replace").strip()
        return f"a file of the kind {brand!r}"
    start = data[:64].lstrip()
    named = next((name for signature, name in _OTHERS if start.startswith(signature)), None)
    return named or f"a file that begins with {data[:8].hex(' ')}"


_READERS = {"PNG": _png, "JPEG": _jpeg, "WebP": _webp, "GIF": _gif}
