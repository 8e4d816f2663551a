"""Prepares the images of registrations in a thread beside the engine's loop: decoded in the media
process, encoded by the model's towers, and found in the prompt.

- Every job is answered exactly once. One image is encoded at a time, so the rows that decode
  meanwhile share their cores with one thread.
- Jobs begin in order, and wait while requests hold as many features as there may be
  (`feature_cache`).
- Equal images of requests that may share cached blocks are encoded once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass

from slipstream_core.media.feature_cache import FeatureCache
from slipstream_core.media.media_client import ImageError
from slipstream_core.media.places import MediaPlaces, places_of
from slipstream_core.step.plan import ImageEncoder, ItemFeatures
from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import Admit, Fault, MediaCard, ModelCard
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.validation.media import pixel_limit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """The outcome of a job: the places of its images, or a fault."""

    admit: Admit
    places: MediaPlaces | None
    fault: Fault | None = None


class MediaPreparer:
    """Prepares the images of registrations, one registration at a time."""

    def __init__(self, encoder: ImageEncoder, card: ModelCard, media: MediaCard) -> None:
        """media: the card's."""
        self._encoder = encoder
        self._card, self._media = card, media
        self.cache = FeatureCache(media.max_tokens)
        self._jobs: deque[Admit] = deque()
        self._done: deque[PreparedMedia] = deque()
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._may_begin = threading.Condition()  # guards the jobs
        self._is_closed = False
        self.num_jobs = 0  # submitted and not taken

    def submit(self, admit: Admit) -> None:
        """Prepare the images of a registration that has some. Does not block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="images", daemon=True)
            self._thread.start()
        self.num_jobs += 1
        with self._may_begin:
            self._jobs.append(admit)
            self._may_begin.notify()

    def withdraw(self, stream_id: bytes) -> None:
        """Leave out a registration's job, if it has not begun."""
        with self._may_begin:
            waiting = [job for job in self._jobs if job.stream_id != stream_id]
            self.num_jobs -= len(self._jobs) - len(waiting)
            self._jobs = deque(waiting)

    def take_prepared(self) -> list[PreparedMedia]:
        """The jobs done since the last call; `release` the places of each."""
        done: list[PreparedMedia] = []
        if not self.num_jobs:
            return done
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done_fd)  # first: what is done after this sets it again
        while self._done:
            done.append(self._done.popleft())
        self.num_jobs -= len(done)
        return done

    def release(self, places: MediaPlaces) -> None:
        """A request that had these images has ended, or was dropped."""
        self.cache.release(places.features)
        with self._may_begin:
            self._may_begin.notify()

    def fileno(self) -> int:
        """A descriptor that is readable while a finished job waits to be taken."""
        return self._done_fd

    def close(self) -> None:
        """End the thread, behind the image that it prepares; the runner has closed the encoder,
        unless another core goes on with it.
        """
        with self._may_begin:
            self._is_closed = True
            self._may_begin.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        os.close(self._done_fd)

    def _next(self) -> Admit | None:
        """The next job; None once it is closed."""
        with self._may_begin:
            while not self._is_closed:
                if self._jobs and self.cache.num_held < self._media.max_tokens:
                    return self._jobs.popleft()
                self._may_begin.wait()
        return None

    def _run(self) -> None:
        self._encoder.prepare_thread()
        while (admit := self._next()) is not None:
            try:
                done = PreparedMedia(admit, self._places(admit))
            except BadRequest as error:
                done = PreparedMedia(admit, None, error.fault)
            except Exception as error:
                if not self._is_closed:
                    logger.exception("an image failed", extra=of_requests(admit.spec.label))
                why = f"{type(error).__name__} while an image was prepared"
                done = PreparedMedia(admit, None, Fault("engine", why))
            self._done.append(done)
            os.eventfd_write(self._done_fd, 1)

    def _places(self, admit: Admit) -> MediaPlaces:
        """Raises BadRequest for images that cannot be decoded, are too large, or do not fit the
        prompt; and whatever the model raises.
        """
        root, most = admit.derived.prefix_root, self._media.max_tokens
        features, num_rows = [], 0
        for index, item in enumerate(admit.media):
            key = root + item.digest
            found = self.cache.get(key)
            if found is None:
                found = self._encoded(index, item.data, pixel_limit(item, self._card))
                self.cache.put(key, found)
            features.append(found)
            num_rows += len(found)
            if num_rows > most:
                given = Summary(f"images of {num_rows} tokens or more")
                raise BadRequest("media", given, f"at most {most} tokens in a request")
        prompt = u32(admit.prompt_ids)
        digests = [item.digest for item in admit.media]
        places: MediaPlaces = self._encoder.with_rope(
            prompt, places_of(prompt, self._media.placeholder_id, digests, features)
        )
        self.cache.hold(places.features)
        return places

    def _encoded(self, index: int, data: bytes, max_pixels: int) -> ItemFeatures:
        try:
            return self._encoder.encode(data, max_pixels)
        except ImageError as error:
            raise BadRequest(f"media[{index}]", Summary(str(error)), "an image") from error
