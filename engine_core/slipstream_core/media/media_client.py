"""The core's side of the media process (`media_process`).

It is replaced when it dies. An image over which two processes died is refused, as is one that takes
too much processor time; a single death might have had an outside cause. `prepare` blocks; one
thread at a time calls it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from io import BufferedRWPair

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream_core.media.media_process import LENGTH_BYTES, MAX_CPU_S
from slipstream_ipc.child import ChildProcess, start_own_process
from slipstream_ipc.messages import ImageToPrepare, MediaProcessConfig, PreparedImage

logger = logging.getLogger(__name__)

_MODULE = "slipstream_core.media.media_process"
_MAX_DEATHS = 2
_SILENT_S = 120.0  # of a process that neither answers nor exceeds its processor time
_MAX_ANSWER_BYTES = 2**31

Arrays = dict[str, npt.NDArray[np.generic]]
"""The tensors that a processor makes of an image, by name of the model's argument."""


class ImageError(ValueError):
    """An image that cannot be shown to the model; says why."""


class _Died(Exception):  # noqa: N818  (an outcome)
    """The process ended, or was killed, over an image."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"code {code}")


class MediaProcess:
    """Prepares images for one model. It starts with the first one, or before."""

    def __init__(self, folder: str) -> None:
        """folder: the model's, which has its image processor's settings."""
        self._folder = folder
        self._process: ChildProcess | None = None
        self._stream: BufferedRWPair | None = None
        self._starting: BufferedRWPair | None = None  # to a process that is not ready yet
        self._lock = threading.Lock()  # guards starting and ending the process
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process that runs; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, which gets ready meanwhile. Raises OSError."""
        if self._starting is None and self._stream is None:
            self._starting = self._start()

    def prepare(self, data: bytes, max_pixels: int = 0) -> Arrays:
        """The arrays of an image. max_pixels: see `ImageToPrepare`.

        Raises ImageError; OSError where no process starts.
        """
        asked = msgspec.msgpack.encode(ImageToPrepare(data, max_pixels))
        for _ in range(_MAX_DEATHS):
            stream = self._ready_stream()
            try:
                answer = self._answer(stream, asked)
            except _Died as death:
                logger.warning("the media process died over an image (%s)", death)
                if death.code == -signal.SIGPROF:
                    why = f"it takes more than {MAX_CPU_S:g} s of CPU time to decode"
                    raise ImageError(why) from death
            else:
                if answer.error:
                    raise ImageError(answer.error)
                return {
                    each.name: np.frombuffer(each.data, each.dtype).reshape(each.shape)
                    for each in answer.arrays
                }
        raise ImageError("the processes that decoded it died")

    def close(self) -> None:
        """Kill the process, whatever it is doing. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.reap()

    def _ready_stream(self) -> BufferedRWPair:
        if self._stream is None:
            stream, self._starting = self._starting or self._start(), None
            try:
                answer = self._answer(stream)
            except _Died as death:
                raise OSError(f"the media process cannot start ({death})") from death
            if answer.error:
                raise OSError(f"its image processor cannot be loaded ({answer.error})")
            self._stream = stream
        return self._stream

    def _start(self) -> BufferedRWPair:
        own_end, end = socket.socketpair()
        own_end.settimeout(_SILENT_S)
        config = MediaProcessConfig(self._folder, end.fileno())
        with end, own_end, self._lock:
            if self._is_closed:
                raise OSError("the core is shutting down")
            self._process = start_own_process(
                _MODULE,
                msgspec.json.encode(config),
                "media",
                descriptors=(end.fileno(),),
                may_fork=False,  # its memory is bounded, and the core's is large
            )
            return own_end.makefile("rwb")

    def _answer(self, stream: BufferedRWPair, asked: bytes | None = None) -> PreparedImage:
        try:
            if asked is not None:
                stream.write(len(asked).to_bytes(LENGTH_BYTES, "little") + asked)
                stream.flush()
            head = stream.read(LENGTH_BYTES)
            size = int.from_bytes(head, "little")
            if len(head) == LENGTH_BYTES and size <= _MAX_ANSWER_BYTES:
                data = stream.read(size)
                if len(data) == size:
                    return msgspec.msgpack.decode(data, type=PreparedImage)
        except (OSError, msgspec.DecodeError):
            pass
        assert self._process is not None
        code = self._process.reap()  # in case it has only fallen silent
        self._stream = None
        with contextlib.suppress(OSError):  # from flushing what was not sent
            stream.close()
        raise _Died(code)
