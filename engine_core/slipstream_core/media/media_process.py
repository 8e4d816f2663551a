"""The media process: decodes images, and shows them to the model's own image processor.

The other end is `media_client`. What strangers send is decoded here, so that a file cannot harm the
core: address space and processor time of an image are bounded, and its size is read from its header
before anything is decoded. It knows no URL and no path but that of the model's folder, and has
neither torch nor a network.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import msgspec
import numpy as np

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    ImageToPrepare,
    MediaProcessConfig,
    PixelArray,
    PreparedImage,
)
from slipstream_ipc.process import start_child
from slipstream_ipc.sandbox import answer_requests, bound_memory
from slipstream_ipc.validation.image_header import fitted_size, image_header

MAX_CPU_S = 20.0  # per image
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# EXIF's orientations as numbers of Pillow's `Transpose`
_TRANSPOSED = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
_ERROR_CHARS = 300


def main() -> int:
    """Answer the core, until it closes its end of the socket."""
    config, _ = start_child("media", MediaProcessConfig)
    bound_memory()
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes most of the start
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn about the missing torch
    processor, why_not = None, ""
    try:
        processor = load_processor(config.folder)
    except Exception as error:
        why_not = f"its image processor cannot be loaded ({_said(error)})"

    def answer(asked: bytes) -> bytes:
        image = msgspec.msgpack.decode(asked, type=ImageToPrepare)
        return msgspec.msgpack.encode(prepared(processor, image))

    answer_requests(config.fd, answer, MAX_CPU_S, why_not)
    return 0


def load_processor(folder: str) -> Any:
    """The image processor of a model's folder. Raises whatever transformers raises."""
    import transformers

    auto: Any = transformers.AutoImageProcessor
    return auto.from_pretrained(folder, backend="pil", local_files_only=True)


def prepared(processor: Any, asked: ImageToPrepare) -> PreparedImage:
    """The arrays that a processor makes of an image, or why it makes none."""
    try:
        made = processor(decoded(asked), return_tensors="np")
        return PreparedImage(tuple(_array(name, each) for name, each in made.items()))
    except BadRequest as error:
        return PreparedImage(error=error.fault.message)
    except Exception as error:  # any of a decoder's
        return PreparedImage(error=f"this image cannot be read: {_said(error)}")


def decoded(asked: ImageToPrepare) -> Any:
    """The first frame of an image in RGB, upright, on white where it is transparent, and in its own
    proportions with as many pixels as are allowed. Raises BadRequest, and whatever Pillow raises.
    """
    from PIL import Image

    header = image_header(asked.data, "media")
    image: Any = Image.open(io.BytesIO(asked.data), formats=_FORMATS)
    if image.size != header.stored_size:
        raise ValueError("its size is not the one that its header says")
    size = fitted_size(header.width, header.height, asked.max_pixels)
    image.load()
    turned = _TRANSPOSED.get(header.orientation)
    if turned is not None:
        image = image.transpose(Image.Transpose(turned))
    rgb = _on_white(image)
    return rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)


def _on_white(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":  # 16 bits: its high bytes
        values = np.asarray(image, np.float64)
        image = Image.fromarray((values / 257).clip(0, 255).astype(np.uint8))
    if not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
        return image.convert("RGB")
    seen = image.convert("RGBA")
    ground = Image.new("RGBA", seen.size, (255, 255, 255, 255))
    return Image.alpha_composite(ground, seen).convert("RGB")


def _array(name: str, values: Any) -> PixelArray:
    array = np.ascontiguousarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"the processor's {name} is no array of numbers")
    return PixelArray(name, array.dtype.str, array.shape, array.tobytes())


def _said(error: Exception) -> str:
    said = " ".join(str(error).split())[:_ERROR_CHARS]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


if __name__ == "__main__":
    os._exit(main())
