"""Headers of pictures, against Pillow's reading of the same files; damaged and hostile ones."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.validation.image_header import (
    MAX_IMAGE_PIXELS,
    ImageHeader,
    fitted_size,
    image_format,
    image_header,
)
from slipstream_verify.fuzz.damaged_images import damaged_image

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")

SIDES = st.integers(1, 70)
FILES = (("PNG", "PNG"), ("JPEG", "JPEG"), ("WEBP", "WebP"), ("GIF", "GIF"))


def picture(kind: str, width: int, height: int, *, mode: str = "RGB", **options: object) -> bytes:
    file = BytesIO()
    Image.new(mode, (width, height), 3).save(file, kind, **options)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x010F] = "a maker, before it"
    tags[0x0112] = orientation
    return tags.tobytes()


@given(st.sampled_from(FILES), SIDES, SIDES, st.integers(1, 8), st.booleans())
def test_sizes_and_orientations_are_those_of_pillow(
    kind: tuple[str, str], width: int, height: int, orientation: int, is_plain: bool
) -> None:
    pillows, ours = kind
    has_exif = pillows != "GIF"
    options: dict[str, object] = {"exif": exif(orientation)} if has_exif else {}
    if pillows == "JPEG":
        options["progressive"] = is_plain
    elif pillows == "WEBP":
        options["lossless"] = is_plain
    data = picture(pillows, width, height, **options)

    shown = ImageOps.exif_transpose(Image.open(BytesIO(data)))

    header = image_header(data)
    assert header == (ours, *shown.size, orientation if has_exif else 1)
    assert header.stored_size == (width, height)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GIF", {"save_all": True, "append_images": [Image.new("RGB", (9, 7))], "loop": 0}),
        ("PNG", {"save_all": True, "append_images": [Image.new("RGB", (9, 7))]}),
        ("WEBP", {"save_all": True, "append_images": [Image.new("RGB", (9, 7))]}),
        ("GIF", {"comment": b"a comment " * 100}),
        ("JPEG", {"icc_profile": bytes(300_000), "comment": b"a comment"}),
        ("JPEG", {"mode": "CMYK"}),
        ("PNG", {"mode": "P"}),
        ("PNG", {"mode": "I;16"}),
        ("WEBP", {"mode": "RGBA", "lossless": True}),
    ],
)
def test_animations_and_other_kinds_have_pillows_size(
    kind: str, options: dict[str, object]
) -> None:
    data = picture(kind, 9, 7, **options)

    header = image_header(data)

    assert (header.width, header.height) == Image.open(BytesIO(data)).size == (9, 7)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    ihdr = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + ihdr + b"".join(chunks)


JPEG = picture("JPEG", 9, 7)
GIF = picture("GIF", 9, 7)
WEBP = picture("WEBP", 9, 7)
FRAME = JPEG[JPEG.index(b"\xff\xc0") :][:19]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty file"),
        (b"%PDF-1.7 \x89PNG", "a PDF file"),
        (b"  <svg xmlns='x'/>", "an SVG picture"),
        (b"\0\0\0\x20ftypavif", "a file of the kind 'avif'"),
        (b"\0\0\0\x18ftypheic", "a file of the kind 'heic'"),
        (b"II*\0rest", "a TIFF picture"),
        (b"BM" + bytes(50), "a BMP picture"),
        (b"hello, world", "a file that begins with 68 65 6c 6c 6f 2c 20 77"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "a file that begins with"),
        (b"\x89PNG\r\n\x1a\n", "a PNG file that is cut off"),
        (png(1, 1)[:20], "a PNG file that is cut off"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IDAT", bytes(13)), "without IHDR in front"),
        (png(0, 7), "0 x 7 pixels"),
        (png(20_000, 10_000), "20000 x 10000 pixels, allowed: at most 33554432 pixels"),
        (png(2**31, 2**31), "allowed: at most"),
        (JPEG[:30], "a JPEG file that is cut off"),
        (JPEG[:20] + b"\0" + JPEG[20:], "with bytes between its segments"),
        (b"\xff\xd8\xff\xd9", "without a frame"),
        (b"\xff\xd8\xff\xe0\0\0", "with a segment of no length"),
        (b"\xff\xd8" + FRAME + JPEG[2:], "of two frames"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 512 + JPEG[2:], "more than 512 segments"),
        (b"\xff\xd8" + b"\xff" * 512 + JPEG[2:], "more than 512 segments"),
        (GIF[:12], "a GIF file that is cut off"),
        (GIF[:13] + b";", "a GIF file"),
        (GIF[:13].replace(b"\x80", b"\0") + b"\x21\xfe" + b"\1a" * 2**11, "more than 2048 blocks"),
        (WEBP[:14], "a WebP file that is cut off"),
        (WEBP[:12] + b"ABCD" + WEBP[16:], "without a picture in front"),
    ],
)
def test_what_is_no_picture_is_refused_with_what_it_is(data: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=r"^media\[2\]: got .*, allowed: ") as raised:
        image_header(data, "media[2]")

    assert said in str(raised.value)
    assert raised.value.field == "media[2]"


@given(st.sampled_from([JPEG, GIF, WEBP, png(9, 7)]), st.data())
def test_a_header_is_read_or_refused_whatever_is_cut_off_or_changed(
    whole: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at in data.draw(st.lists(st.integers(0, 200), max_size=4)):
        if at < len(damaged):
            damaged[at] = data.draw(st.integers(0, 255))
    try:
        header = image_header(bytes(damaged))
    except BadRequest:
        return

    assert header.format == image_format(bytes(damaged))
    assert 0 < header.width * header.height <= MAX_IMAGE_PIXELS


@given(st.binary(max_size=300))
def test_a_tag_that_is_damaged_turns_nothing(tiff: bytes) -> None:
    for order in (b"II*\0", b"MM\0*", b""):
        header = image_header(png(3, 2, chunk(b"eXIf", order + tiff), chunk(b"IEND")))

        assert header in (
            ImageHeader("PNG", *size, header.orientation) for size in ((3, 2), (2, 3))
        )
        assert (header.width == 2) == (header.orientation > 4)


def test_a_polyglot_is_what_its_first_bytes_say() -> None:
    """Whatever follows: a page of HTML behind a PNG, a ZIP archive behind a JPEG."""
    assert image_header(png(3, 2, chunk(b"IEND")) + b"<html><script>x</script>").format == "PNG"
    assert image_header(JPEG + b"PK\3\4" + bytes(100)).format == "JPEG"
    assert image_format(b"GIF89a=1;/*") == "GIF"


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 2**25))
def test_a_fitted_picture_has_no_more_pixels_and_its_own_proportions(
    width: int, height: int, most: int
) -> None:
    fitted_width, fitted_height = fitted_size(width, height, most)

    assert fitted_size(width, height, 0) == (width, height)
    assert 1 <= fitted_width * fitted_height <= most
    if width * height <= most:
        assert (fitted_width, fitted_height) == (width, height)
    elif fitted_width > 1 < fitted_height:  # within a pixel of the proportions
        assert fitted_width <= (most * width / height) ** 0.5 < fitted_width + 1
        assert fitted_height <= (most * height / width) ** 0.5 < fitted_height + 1


def test_damaged_files_of_all_kinds_are_read_or_refused() -> None:
    """Those that the fuzzer sends; some are pictures, most are not."""
    found = 0
    for seed in range(2000):
        data = damaged_image(Random(seed))
        try:
            header = image_header(data)
        except BadRequest:
            continue
        found += 1
        assert 0 < header.width * header.height <= MAX_IMAGE_PIXELS
    assert 200 < found < 1800
