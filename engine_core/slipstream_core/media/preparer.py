"""Prepares the images of registrations in a thread beside the engine's loop: decoded in the media
process, encoded by the model's towers, and found in the prompt.

- Every job is answered exactly once. One image is encoded at a time, so the rows that decode
  meanwhile share their cores with one thread.
- Tenants take turns, an image each; a tenant's jobs are done in order.
- Memory is bounded by the features that requests hold (`feature_cache`), with those of jobs that
  have begun. A tenant's next job begins only while its own rows and those of all are fewer than
  twice `max_tokens` together. So however many jobs a tenant has, another can begin one, and there
  are at most three times `max_tokens` rows; as many as `max_tokens` are in the cache besides.
- The stream whose image is encoded is noted for the next core. An image of a suspect is encoded
  while no step is in flight, and none is encoded while a suspect runs (`may_launch`): a core that
  dies then dies of it alone.
- Equal images of requests that may share cached blocks are encoded once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream_core.media.feature_cache import FeatureCache
from slipstream_core.media.media_client import ImageError
from slipstream_core.media.places import MediaPlaces, check_num_rows, places_of
from slipstream_core.step.plan import ImageEncoder, ItemFeatures
from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import Admit, Fault, MediaCard, ModelCard
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.validation.media import pixel_limit

logger = logging.getLogger(__name__)

_WITHDRAWN = Fault("engine", "its images were withdrawn")  # is not sent to a client


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """The outcome of a job: the places of its images, or a fault."""

    admit: Admit
    places: MediaPlaces | None
    fault: Fault | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """A registration, and the features of its first images. num_expected: rows of all, as its
    prompt has placeholders, from when it has begun.
    """

    admit: Admit
    is_suspect: bool
    features: list[ItemFeatures] = field(default_factory=list)
    num_rows: int = 0
    num_expected: int | None = None
    is_withdrawn: bool = False

    @property
    def tenant(self) -> bytes:
        return self.admit.spec.tenant


class ImageNote(Protocol):
    """Tells the next core whose image killed this one; see `CrashNote`."""

    def encode(self, stream_id: bytes) -> None:
        """An image of this stream is encoded next."""

    def encoded(self) -> None:
        """Strike it out: its outcome is known."""


class MediaPreparer:
    """Prepares the images of registrations, one image at a time."""

    def __init__(
        self,
        encoder: ImageEncoder,
        card: ModelCard,
        media: MediaCard,
        note: ImageNote | None = None,
    ) -> None:
        """media: the card's."""
        self._encoder = encoder
        self._note = note
        self._card, self._media = card, media
        self.cache = FeatureCache(media.max_tokens)
        # by tenant, the one with the next turn first, in order; without empty ones
        self._jobs: dict[bytes, dict[_Job, None]] = {}
        self._by_id: dict[bytes, _Job] = {}  # that are not withdrawn
        self._current: _Job | None = None  # the thread has it
        self._num_expected = 0  # rows of the jobs that have begun
        self._done: deque[PreparedMedia] = deque()
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._may_begin = threading.Condition()  # guards the jobs
        self._num_in_flight = 0  # steps, with the one that may be launched now
        self._is_suspect_running = False  # in a step, or in the next one
        self._is_suspect_next = False  # and its image waits until no step is in flight
        self._is_closed = False
        self._is_left = False  # closed while the thread encoded: it closes the descriptor
        self.num_jobs = 0  # submitted and not taken

    def submit(self, admit: Admit, *, is_suspect: bool = False) -> None:
        """Prepare the images of a registration that has some. Does not block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="images", daemon=True)
            self._thread.start()
        self.num_jobs += 1
        with self._may_begin:
            job = self._by_id[admit.stream_id] = _Job(admit, is_suspect)
            self._jobs.setdefault(job.tenant, {})[job] = None
            self._may_begin.notify()

    def withdraw(self, stream_id: bytes) -> None:
        """Leave out what is left of a registration's job: all but an image that is begun."""
        with self._may_begin:
            job = self._by_id.pop(stream_id, None)
            if job is None:
                return
            job.is_withdrawn = True
            if job is not self._current:
                self._remove(job)
                self.num_jobs -= 1
                self._is_suspect_next = False  # until the thread has looked
                if not self.num_jobs:  # the loop has nothing to take
                    self._clear_event()
            self._may_begin.notify()

    def may_launch(self, num_in_flight: int, *, has_suspects: bool) -> bool:
        """Asked in each turn of the loop, with the steps in flight and whether a suspect runs or
        waits: True if a step may be launched until it is asked again.
        """
        with self._may_begin:
            current = self._current
            if has_suspects:
                is_allowed = current is None
            else:
                is_allowed = not self._is_suspect_next and (
                    current is None or not current.is_suspect
                )
            self._is_suspect_running = has_suspects
            self._num_in_flight = num_in_flight + is_allowed
            self._may_begin.notify()
        return is_allowed

    def take_prepared(self) -> list[PreparedMedia]:
        """The jobs done since the last call; `release` the places of each."""
        done: list[PreparedMedia] = []
        if not self.num_jobs:
            return done
        self._clear_event()  # first: what is done after this sets it again
        while self._done:
            done.append(self._done.popleft())
        self.num_jobs -= len(done)
        return done

    def _clear_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done_fd)

    def release(self, places: MediaPlaces) -> None:
        """A request that had these images has ended, or was dropped."""
        self.cache.release(places)
        with self._may_begin:
            self._may_begin.notify()

    def fileno(self) -> int:
        """A descriptor that is readable while a finished job waits to be taken."""
        return self._done_fd

    def close(self) -> None:
        """End the thread; one that encodes an image is left to itself, and ends behind it."""
        with self._may_begin:
            self._is_closed = True
            self._is_left = self._current is not None
            self._may_begin.notify()
        if self._is_left:
            return
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        os.close(self._done_fd)

    def _next(self) -> _Job | None:
        """The job whose next image is encoded now; None once this is closed."""
        with self._may_begin:
            while not self._is_closed:
                job = None if self._is_suspect_running else self._first()
                waits = job is not None and job.is_suspect and self._num_in_flight > 0
                if waits and not self._is_suspect_next:
                    os.eventfd_write(self._done_fd, 1)  # the loop asks `may_launch` again
                self._is_suspect_next = waits
                if job is not None and not waits:
                    self._begin(job)
                    return job
                self._may_begin.wait()
        return None

    def _first(self) -> _Job | None:
        """The first in order of turns that may begin, or has begun."""
        for tenant, jobs in self._jobs.items():
            job = next(iter(jobs))
            if job.num_expected is not None or self._has_room(tenant):
                return job
        return None

    def _has_room(self, tenant: bytes) -> bool:
        """True if a tenant that has no job begun may begin one."""
        num = self.cache.num_held_by(tenant) + self.cache.num_held + self._num_expected
        return num < 2 * self._media.max_tokens

    def _begin(self, job: _Job) -> None:
        self._current = job
        if job.num_expected is None:
            prompt = u32(job.admit.prompt_ids)
            num_holders = np.count_nonzero(prompt == self._media.placeholder_id)
            job.num_expected = min(int(num_holders), self._media.max_tokens)
            self._num_expected += job.num_expected

    def _remove(self, job: _Job) -> None:
        jobs = self._jobs[job.tenant]
        del jobs[job]
        if not jobs:
            del self._jobs[job.tenant]
        self._num_expected -= job.num_expected or 0

    def _run(self) -> None:
        self._encoder.prepare_thread()
        while (job := self._next()) is not None:
            done = self._advance(job)
            with self._may_begin:
                self._current = None
                self._jobs[job.tenant] = self._jobs.pop(job.tenant)  # behind the others
                if done is None and not job.is_withdrawn:
                    os.eventfd_write(self._done_fd, 1)  # a step may have waited for it
                    continue  # with its next image, in its tenant's next turn
                self._remove(job)
                if not job.is_withdrawn:
                    del self._by_id[job.admit.stream_id]
            self._done.append(done or PreparedMedia(job.admit, None, _WITHDRAWN))
            os.eventfd_write(self._done_fd, 1)
        if self._is_left:
            os.close(self._done_fd)

    def _advance(self, job: _Job) -> PreparedMedia | None:
        """Encode the next image of a job. Returns the outcome, once there is one."""
        admit = job.admit
        try:
            self._encode_next(job)
            if len(job.features) < len(admit.media):
                return None
            return PreparedMedia(admit, self._places(job))
        except BadRequest as error:
            return PreparedMedia(admit, None, error.fault)
        except Exception as error:
            if not self._is_closed:
                logger.exception("an image failed", extra=of_requests(admit.spec.label))
            why = f"{type(error).__name__} while an image was prepared"
            return PreparedMedia(admit, None, Fault("engine", why))

    def _encode_next(self, job: _Job) -> None:
        """Raises BadRequest for an image that cannot be decoded, or one too many; and whatever the
        model raises.
        """
        index, most = len(job.features), self._media.max_tokens
        item = job.admit.media[index]
        key = job.admit.derived.prefix_root + item.digest
        found = self.cache.get(key)
        if found is None:
            self._note_current(job)
            try:
                found = self._encoded(index, item.data, pixel_limit(item, self._card))
            finally:
                self._note_current(None)
            self.cache.put(key, found)
        job.features.append(found)
        job.num_rows += len(found)
        if job.num_rows > most:
            given = Summary(f"images of {job.num_rows} tokens or more")
            raise BadRequest("media", given, f"at most {most} tokens in a request")
        if job.num_rows > (job.num_expected or 0):  # the others need not be encoded
            check_num_rows(job.num_expected or 0, self._media.placeholder_id, job.features)

    def _places(self, job: _Job) -> MediaPlaces:
        """Raises BadRequest for images that do not fit the prompt."""
        admit = job.admit
        prompt = u32(admit.prompt_ids)
        digests = [item.digest for item in admit.media]
        places: MediaPlaces = self._encoder.with_rope(
            prompt, places_of(prompt, self._media.placeholder_id, digests, job.features)
        )
        self.cache.hold(places, job.tenant)
        return places

    def _note_current(self, job: _Job | None) -> None:
        """Note whose image is encoded next; None strikes it out."""
        with self._may_begin:
            if self._note is None or self._is_closed:
                return
            if job is None:
                self._note.encoded()
            else:
                self._note.encode(job.admit.stream_id)

    def _encoded(self, index: int, data: bytes, max_pixels: int) -> ItemFeatures:
        try:
            return self._encoder.encode(data, max_pixels)
        except ImageError as error:
            raise BadRequest(f"media[{index}]", Summary(str(error)), "an image") from error
