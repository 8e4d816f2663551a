"""The core's side of the media process (`media_process`), which decodes what strangers send.

An image over which two processes died is refused, as is one that takes too much processor time.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream_core.media.media_process import MAX_CPU_S
from slipstream_ipc.messages import ImageToPrepare, MediaProcessConfig, PreparedImage
from slipstream_ipc.sandbox import DeadlyRequest, Sandbox

_MODULE = "slipstream_core.media.media_process"
_DECODER = msgspec.msgpack.Decoder(PreparedImage)

Arrays = dict[str, npt.NDArray[np.generic]]
"""The tensors that a processor makes of an image, by name of the model's argument."""


class ImageError(ValueError):
    """An image that cannot be shown to the model; says why."""


class MediaProcess:
    """Prepares images for one model. It starts with the first one, or before."""

    def __init__(self, folder: str) -> None:
        """folder: the model's, which has its image processor's settings."""
        self._sandbox = Sandbox(
            "media", _MODULE, lambda fd: msgspec.json.encode(MediaProcessConfig(folder, fd))
        )
        self.start = self._sandbox.start
        self.close = self._sandbox.close

    @property
    def pid(self) -> int | None:
        """The id of the process that runs; None before it is started."""
        return self._sandbox.pid

    def prepare(self, data: bytes, max_pixels: int = 0) -> Arrays:
        """The arrays of an image. max_pixels: see `ImageToPrepare`. Blocks; one thread at a time
        calls it.

        Raises ImageError; OSError where no process starts.
        """
        asked = msgspec.msgpack.encode(ImageToPrepare(data, max_pixels))
        try:
            answer = self._sandbox.ask(asked, _DECODER.decode)
        except DeadlyRequest as death:
            slow = f"it takes more than {MAX_CPU_S:g} s of CPU time to decode"
            why = slow if death.is_slow else "the processes that decoded it died"
            raise ImageError(why) from death
        if answer.error:
            raise ImageError(answer.error)
        return {
            each.name: np.frombuffer(each.data, each.dtype).reshape(each.shape)
            for each in answer.arrays
        }
