"""Registrations that wait for their images, for their grammar to compile, or for room for their
log-probabilities, in this order.

- A pending registration has no row, and counts as waiting.
- Log-probabilities are kept until a stream is forgotten, in core and worker alike, so a stream is
  admitted once there is room for its first ones. Room is given in the order of asking, behind
  streams that are admitted and grow. A stream without log-probabilities never waits for room.
- A stream that another core accepted does not wait behind others for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from slipstream_core.grammar.compiler import GrammarCompiler
from slipstream_core.grammar.matcher import CallMatcher, GrammarMatcher
from slipstream_core.media.places import MediaPlaces
from slipstream_core.media.preparer import MediaPreparer
from slipstream_core.scheduler.logprob_budget import LogprobBudget, first_bytes
from slipstream_core.workers.adapters import Adapters
from slipstream_core.workers.admission import is_suspect, num_tokens_of
from slipstream_ipc.messages import MAX_LEFT_OUT, Admit, Fault


@dataclass(frozen=True, slots=True)
class ReadyAdmission:
    """A registration that is pending no longer, and the outcome of its grammar and its images."""

    worker: bytes
    admit: Admit
    grammar: GrammarMatcher | CallMatcher | None = None
    fault: Fault | None = None  # in this case no room was reserved
    media: MediaPlaces | None = None  # released by the one that takes it


class PendingAdmissions:
    """Pending registrations by stream id."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        logprob_budget: LogprobBudget,
        adapters: Adapters,
        images: MediaPreparer | None = None,
    ) -> None:
        """adapters: those of pending registrations are not dropped. images: None where there can be
        none.
        """
        self._images = images
        self._places: dict[bytes, MediaPlaces] = {}  # by id, of those whose images are prepared
        self._compiler = compiler
        self._adapters = adapters
        self._logprob_budget = logprob_budget
        self._by_id: dict[bytes, tuple[bytes, Admit]] = {}  # worker and registration
        self._nums: Counter[bytes] = Counter()  # registrations by tenant
        self._num_tokens: Counter[bytes] = Counter()
        # those that only lack room, in order: streams that another core accepted, and new ones
        self._asking_again: dict[bytes, ReadyAdmission] = {}
        self._asking: dict[bytes, ReadyAdmission] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def has_any(self) -> bool:
        """True if `ready` has anything to look at: an admission that is pending, or was while its
        grammar was compiled.
        """
        num_images = 0 if self._images is None else self._images.num_jobs
        return bool(self._by_id or self._compiler.num_jobs or num_images)

    @property
    def num_tokens(self) -> int:
        """Tokens that the pending requests have to compute."""
        return self._num_tokens.total()

    def of_tenant(self, tenant: bytes) -> tuple[int, int]:
        """The number of a tenant's pending requests, and of their tokens."""
        return self._nums[tenant], self._num_tokens[tenant]

    def get(self, stream_id: bytes) -> tuple[bytes, Admit] | None:
        """The worker and the registration pending under this id, or None."""
        return self._by_id.get(stream_id)

    @staticmethod
    def is_ready(admit: Admit) -> bool:
        """True if there is nothing to make for a registration: it may have room at once."""
        return not admit.media and admit.spec.params.structured_outputs is None

    def put(self, worker: bytes, admit: Admit) -> None:
        """Hold a registration until `ready` returns it; replaces an earlier one of the same id.

        Call it for a registration with a grammar or images, or one that found no room (`reserve`).
        """
        self._remove(admit.stream_id)
        self._by_id[admit.stream_id] = worker, admit
        self._adapters.hold(admit.spec)
        self._nums[admit.spec.tenant] += 1
        self._num_tokens[admit.spec.tenant] += num_tokens_of(admit)
        if admit.media and self._images is not None:
            self._asks_no_more(admit.stream_id)
            self._images.submit(admit, is_suspect=is_suspect(admit))
        elif admit.spec.params.structured_outputs is not None:
            self._asks_no_more(admit.stream_id)
            self._compiler.submit(admit)
        else:
            self._ask(ReadyAdmission(worker, admit))

    def drop(self, stream_id: bytes) -> None:
        """Drop a pending registration. Idempotent."""
        self._remove(stream_id)
        self._asks_no_more(stream_id)

    def drop_of(self, worker: bytes, stream_ids: Iterable[bytes] | None = None) -> None:
        """Drop those of a worker's registrations that are in `stream_ids`; None drops all."""
        if self._by_id:
            for stream_id in [*self._by_id] if stream_ids is None else stream_ids:
                if stream_id in self._by_id and self._by_id[stream_id][0] == worker:
                    self.drop(stream_id)

    def ready(self) -> Iterator[ReadyAdmission]:
        """Take the registrations that are refused, or admitted with room reserved."""
        if self._images is not None:
            yield from self._with_images(self._images)
        for compiled in self._compiler.take_compiled():
            worker, admit = self._by_id.get(compiled.admit.stream_id, (b"", None))
            if admit is not compiled.admit:
                continue  # dropped or replaced meanwhile
            if compiled.left_out:
                names = dict.fromkeys((*admit.derived.left_out, *compiled.left_out))
                left_out = tuple(names)[:MAX_LEFT_OUT]
                admit = replace(admit, derived=replace(admit.derived, left_out=left_out))
            places = None if compiled.fault else self._places.pop(admit.stream_id, None)
            found = ReadyAdmission(worker, admit, compiled.state, compiled.fault, places)
            if (taken := self._taken(found)) is not None:
                yield taken
        # first the streams that another core accepted, up to their own bound
        for queue in (self._asking_again, self._asking):
            while queue:
                asking = next(iter(queue.values()))
                if not self._reserve(asking.admit):
                    break
                del queue[asking.admit.stream_id]
                self.drop(asking.admit.stream_id)
                yield asking

    def _with_images(self, images: MediaPreparer) -> Iterator[ReadyAdmission]:
        """Take the registrations whose images are prepared, as `ready` does."""
        for prepared in images.take_prepared():
            admit, places = prepared.admit, prepared.places
            worker, pending = self._by_id.get(admit.stream_id, (b"", None))
            if pending is not admit:
                if places is not None:
                    images.release(places)
                continue  # dropped or replaced meanwhile
            has_grammar = admit.spec.params.structured_outputs is not None
            if has_grammar and places is not None:
                self._places[admit.stream_id] = places
                self._compiler.submit(admit)
                continue
            found = ReadyAdmission(worker, admit, fault=prepared.fault, media=places)
            if (taken := self._taken(found)) is not None:
                yield taken

    def _taken(self, found: ReadyAdmission) -> ReadyAdmission | None:
        """An admission that is pending no longer; None if it queues for room now."""
        if found.fault is None and not self.reserve(found.admit):
            self._ask(found)
            return None
        self.drop(found.admit.stream_id)
        return found

    def reserve(self, admit: Admit) -> bool:
        """Reserve room for a stream that is admitted now; return True if there was any.

        Fails where others already queue for room. A registration that succeeds is pending no
        longer.
        """
        is_first = admit.begun.was_accepted or not first_bytes(admit)
        is_first = is_first or not (self._asking or self._asking_again)
        if not (is_first and self._reserve(admit)):
            return False
        self.drop(admit.stream_id)
        return True

    def _ask(self, admission: ReadyAdmission) -> None:
        """Queue it for room; one that queues already keeps its place."""
        admit = admission.admit
        queue = self._asking_again if admit.begun.was_accepted else self._asking
        if admit.stream_id not in queue:
            self._asks_no_more(admit.stream_id)
        queue[admit.stream_id] = admission

    def _asks_no_more(self, stream_id: bytes) -> None:
        for queue in (self._asking, self._asking_again):
            asking = queue.pop(stream_id, None)
            if asking is not None:
                self._release(asking.media)

    def _release(self, places: MediaPlaces | None) -> None:
        if places is not None and self._images is not None:
            self._images.release(places)

    def _remove(self, stream_id: bytes) -> None:
        _, admit = self._by_id.pop(stream_id, (b"", None))
        self._release(self._places.pop(stream_id, None))
        if admit is not None:
            if admit.media and self._images is not None:
                self._images.withdraw(stream_id)
            self._adapters.release(admit.spec)
            self._nums[admit.spec.tenant] -= 1
            self._num_tokens[admit.spec.tenant] -= num_tokens_of(admit)
            if not self._nums[admit.spec.tenant]:
                del self._nums[admit.spec.tenant], self._num_tokens[admit.spec.tenant]

    def _reserve(self, admit: Admit) -> bool:
        return self._logprob_budget.reserve(
            first_bytes(admit), was_accepted=admit.begun.was_accepted
        )
