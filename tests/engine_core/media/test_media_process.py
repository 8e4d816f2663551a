"""The process that decodes images: what it makes of files, and what becomes of bad ones."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.helpers.vision_models import make_vision_model, picture

from slipstream_core.media import media_process
from slipstream_core.media.media_client import ImageError, MediaProcess
from slipstream_core.media.media_process import decoded, load_processor
from slipstream_ipc.messages import ImageToPrepare

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[MediaProcess]:
    made = MediaProcess(str(folder))
    yield made
    made.close()


def shown(data: bytes, max_pixels: int = 0) -> Any:
    return decoded(ImageToPrepare(data, max_pixels))


def saved(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_its_arrays_are_those_of_transformers(process: MediaProcess, folder: Path) -> None:
    data = picture(1, 33, 47, "JPEG")
    arrays = process.prepare(data)
    own = load_processor(str(folder))(Image.open(io.BytesIO(data)).convert("RGB"))
    assert set(arrays) == set(own)
    np.testing.assert_array_equal(arrays["pixel_values"], np.stack(own["pixel_values"]))


def test_a_bad_file_is_refused_and_the_process_goes_on(process: MediaProcess) -> None:
    good = picture(2)
    process.prepare(good)
    before = process.pid
    rng = np.random.default_rng(1)
    for bad in (
        b"text",
        good[:40],
        good[:-30],
        b"GIF89a" + rng.bytes(60),
        good[:60] + rng.bytes(99),
    ):
        with pytest.raises(ImageError):
            process.prepare(bad)
    process.prepare(good)
    assert process.pid == before


def test_what_takes_too_long_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processor time is bounded, whatever it does meanwhile."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr("slipstream_core.media.media_client._MODULE", "tests.helpers.slow_media")
    process = MediaProcess(str(folder))
    try:
        with pytest.raises(ImageError, match="CPU time"):
            process.prepare(picture(4))
    finally:
        process.close()


def test_orientations_are_those_of_pillow() -> None:
    from PIL import ImageOps

    image = Image.open(io.BytesIO(picture(5, 24, 16)))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        data = saved(image, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        assert shown(data).tobytes() == expected.tobytes(), orientation


def test_what_is_transparent_is_white_and_every_mode_is_rgb() -> None:
    clear = Image.new("RGBA", (3, 2), (9, 9, 9, 0))
    for image in (clear, clear.convert("LA"), clear.quantize(4)):
        assert shown(saved(image)).getpixel((1, 1)) == (255, 255, 255)
    for mode in ("1", "L", "P", "RGB"):
        assert shown(saved(Image.new(mode, (3, 2)))).mode == "RGB"
    assert shown(saved(Image.new("CMYK", (3, 2)), "JPEG")).mode == "RGB"
    deep = Image.fromarray(np.full((2, 3), 0x80FF, np.uint16))
    assert shown(saved(deep)).getpixel((0, 0)) == (128, 128, 128)


def test_a_large_image_is_made_smaller_in_its_proportions() -> None:
    assert shown(picture(6, 80, 40), 800).size == (40, 20)
    assert shown(picture(6, 80, 40), 3200).size == (80, 40)


def test_a_processor_that_is_missing_says_so(tmp_path: Path) -> None:
    process = MediaProcess(str(tmp_path))
    with pytest.raises(OSError, match="image processor cannot be loaded"):
        process.prepare(picture(7))
    process.close()
    assert media_process.MAX_CPU_S > 1
