"""An image's way from its file to features: the media process, then the model's towers."""

from __future__ import annotations

import torch

from slipstream_core.media.media_client import MediaProcess
from slipstream_core.media.places import MediaPlaces
from slipstream_core.media.vision_model import Features, VisionModel
from slipstream_ipc.arrays import UInt32s


class ModelEncoder:
    """Implements ImageEncoder."""

    def __init__(self, vision: VisionModel, process: MediaProcess) -> None:
        self._vision = vision
        self._process = process

    def prepare_thread(self) -> None:
        """Let the calling thread compute by itself, beside those of the steps."""
        torch.set_num_threads(1)

    def encode(self, data: bytes, max_pixels: int) -> Features:
        """Raises ImageError, OSError where no process starts, and whatever the model raises."""
        return self._vision.encode(self._process.prepare(data, max_pixels))

    def with_rope(self, prompt: UInt32s, places: MediaPlaces) -> MediaPlaces:
        """See `VisionModel.with_rope`."""
        return self._vision.with_rope(prompt, places)

    def close(self) -> None:
        """End the media process."""
        self._process.close()
