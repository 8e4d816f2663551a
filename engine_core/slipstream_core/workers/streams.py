"""The life cycle of a core's streams: admission, sending, end, forgetting.

Kept for each row are its history, log-probabilities, grammar, cursor and budget.

- A stream ends once: from then on nothing more of it is computed or sent. Its row, histories and
  end are kept until it is forgotten.
- Everything that a row holds is opened on admission, and dropped when the stream is forgotten at
  the latest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.grammar.matcher import CallMatcher, GrammarMatcher
from slipstream_core.grammar.reasoning.reasoning_state import reasoning_state
from slipstream_core.media.places import MediaPlaces
from slipstream_core.media.preparer import MediaPreparer
from slipstream_core.scheduler.constraint_columns import permitted_mask
from slipstream_core.scheduler.engine_counters import EngineCounters
from slipstream_core.scheduler.logprob_budget import LogprobBudget, first_bytes, stream_bytes
from slipstream_core.scheduler.scheduling import Scheduling
from slipstream_core.step.limits import NO_ROW
from slipstream_core.workers.adapters import Adapters
from slipstream_core.workers.admission import new_request, wants_prompt
from slipstream_core.workers.sender import WorkerSender
from slipstream_core.workers.stream_store import CoreStreamStore
from slipstream_core.workers.stream_table import CoreStream
from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.columns import u32
from slipstream_ipc.history.prompt_logprob_log import PromptLogprobLog
from slipstream_ipc.history.wide_logprobs import Candidates
from slipstream_ipc.messages import (
    AdmissionRefused,
    Admit,
    Admitted,
    ComputedPromptLogprobs,
    End,
    Fault,
    FirstToken,
)
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.telemetry.logs import of_requests

logger = logging.getLogger(__name__)


class StreamManager:
    """All streams of one core."""

    def __init__(
        self,
        scheduler: Scheduling[Any],
        store: CoreStreamStore,
        *,
        grammars: GrammarBitmasks,
        logprob_budget: LogprobBudget,
        counters: EngineCounters,
        adapters: Adapters,
        images: MediaPreparer | None = None,
    ) -> None:
        """images: None where there can be none."""
        self._images = images
        self._media: dict[int, MediaPlaces] = {}  # by row, of streams that have not ended
        self.store = store
        self.senders: dict[bytes, WorkerSender] = {}  # by identity of the worker
        self._scheduler = scheduler
        self._streams = store.table
        self._tokens, self._logprobs = store.tokens, store.logprobs
        self._possible_ends = store.possible_ends
        self._prompts = PromptLogprobLog()
        self._grammars = grammars
        self._logprob_budget = logprob_budget
        self._counters = counters
        self._adapters = adapters
        self._untimed: dict[int, CoreStream] = {}  # by row: traced, without a first token

    def add_stream(
        self,
        worker: bytes,
        admit: Admit,
        grammar: GrammarMatcher | CallMatcher | None,
        now: float,
        media: MediaPlaces | None = None,
    ) -> None:
        """Admit a stream: give it a row and queue it. media: of its images, released at its end.

        Its room for log-probabilities has been reserved (`PendingAdmissions.reserve`).
        """
        prompt, outputs = u32(admit.prompt_ids), u32(admit.begun.output_ids)
        stream = self._streams.add(admit, worker)
        self._tokens.open(stream.row)
        self._tokens.extend(stream.row, prompt)
        if len(outputs):
            self._tokens.extend(stream.row, outputs)
        position = len(prompt) + len(outputs)
        self._possible_ends.add(stream.row, admit)
        self._logprob_budget.open(stream.row, first_bytes(admit))
        if admit.spec.params.logprobs is not None:
            self._logprobs.open(stream.row, admit.spec.params.logprobs, position)
        if wants_prompt(admit):
            assert admit.spec.params.prompt_logprobs is not None
            self._prompts.open(stream.row, len(prompt), admit.spec.params.prompt_logprobs)
        calls = grammar if isinstance(grammar, CallMatcher) else None
        reasoning = reasoning_state(admit, calls)
        if isinstance(grammar, CallMatcher):
            grammar = None
        self._adapters.hold(admit.spec)
        place = self._adapters.place_of(admit.spec)
        request = new_request(stream, grammar, reasoning, place, media)
        if media is not None:
            self._media[stream.row] = media
        if grammar is not None or reasoning is not None:
            own = request.constraints
            self._grammars.add(
                stream.row,
                grammar,
                stream.prompt_len,
                reasoning,
                permitted=permitted_mask(own, self._grammars.vocab_size),
                has_words=own is not None and bool(own.words),
            )
        self.send_admitted(stream)
        self.send_from(stream, position)
        self._scheduler.add(request)
        self._counters.request_queued(stream.row, now)
        if admit.spec.trace is not None:
            self._untimed[stream.row] = stream

    def request_started(self, row: int, now: float) -> None:
        """A request is in a step, for the first time or again."""
        self._counters.request_started(row, now)
        stream = self._untimed.get(row)
        if stream is not None and not stream.scheduled_at:
            stream.scheduled_at = now
        stream = self._streams.at(row)
        if stream is not None and stream.registration.begun.num_cached_tokens is None:
            num_cached = min(self._scheduler.num_shared(row), stream.prompt_len)
            begun = replace(stream.registration.begun, num_cached_tokens=num_cached)
            stream.registration = replace(stream.registration, begun=begun)
            if num_cached:
                self.send_admitted(stream)

    def send_admitted(self, stream: CoreStream) -> None:
        """Send a stream's row, and how much of its prompt was cached if that has been computed."""
        admit = stream.registration
        num_cached = admit.begun.num_cached_tokens or 0
        admitted = Admitted(
            admit.stream_id, stream.row, num_cached, admit.begun.moves, admit.derived.left_out
        )
        self.senders[stream.worker].enqueue(admitted)

    def send_times(self, stream: CoreStream) -> None:
        """Send when a traced stream began, if it has."""
        if stream.first_token_at:
            stream_id = stream.registration.stream_id
            times = FirstToken(stream_id, stream.scheduled_at, stream.first_token_at)
            self.senders[stream.worker].enqueue(times)

    def _note_first_tokens(self, rows: RowSet) -> None:
        now = time.monotonic()
        for row in rows.tolist():
            stream = self._untimed.pop(row, None)
            if stream is not None:
                stream.first_token_at = now
                self.send_times(stream)

    def num_outputs(self, stream: CoreStream) -> int:
        """Tokens of the stream's history behind the prompt."""
        return self._tokens.length(stream.row) - stream.prompt_len

    def outputs(self, stream: CoreStream, num: int) -> UInt32s:
        """The first `num` outputs, [num]."""
        return self._tokens.read(stream.row, stream.prompt_len, stream.prompt_len + num)

    def send_from(self, stream: CoreStream, position: int) -> None:
        """Send the stream's worker everything from `position` of its history on."""
        wants_logprobs = stream.registration.spec.params.logprobs is not None
        self.senders[stream.worker].open(stream.row, position, logprobs=wants_logprobs)
        self._scheduler.acks_moved_back()

    def send_prompt_logprobs(self, stream: CoreStream) -> None:
        """Send the prompt's log-probabilities, if all are computed, ahead of any token."""
        sender = self.senders[stream.worker]
        admit = stream.registration
        for start, columns in self._prompts.pieces(stream.row):
            piece = ComputedPromptLogprobs(admit.stream_id, start, columns, admit.begun.moves)
            sender.enqueue(piece)

    def add_prompt_logprobs(
        self, rows: Sequence[int], starts: Sequence[int], pieces: Sequence[Candidates]
    ) -> None:
        """Take in log-probabilities of these rows' prompts, from position `starts[i]` on."""
        for row, start, piece in zip(rows, starts, pieces, strict=True):
            stream = self._streams.at(row) if row != NO_ROW else None
            if stream is not None and self._prompts.add(row, start, piece):
                self._scheduler.has_prompt_logprobs(row)
                self.send_prompt_logprobs(stream)

    def mark_dirty(self, rows: RowSet) -> None:
        """Record that these rows have new tokens."""
        if self._untimed:
            self._note_first_tokens(rows)
        if self._counters.awaits_first_tokens:
            self._counters.tokens_came(rows.tolist(), time.monotonic())
        if len(self.senders) == 1:
            for sender in self.senders.values():
                sender.mark_dirty(rows)
            return
        for worker, own in self._streams.divided(rows):
            self.senders[worker].mark_dirty(own)

    def labels(self, rows: Sequence[int]) -> list[str]:
        """The clients' names for the streams of these rows, which logs show as request ids."""
        streams = [self._streams.at(row) for row in rows]
        return [stream.registration.spec.label for stream in streams if stream is not None]

    def end_by_fault(self, rows: Sequence[int], fault: Fault) -> None:
        """End the streams of these rows with a fault, which is sent behind their tokens."""
        for row in rows:
            stream = self._streams.at(row)
            if stream is None or stream.is_over:
                continue
            logger.warning("the request ends by a fault", extra=of_requests(*self.labels([row])))
            stream.end = End("error", self.num_outputs(stream), fault=fault)
            self._compute_no_more(stream)
            self.send_fault(stream, fault)

    def send_fault(self, stream: CoreStream, fault: Fault) -> None:
        """Send what is left of a stream's tokens, then the fault that ended it."""
        refused = AdmissionRefused(
            stream.registration.stream_id, fault, stream.registration.begun.moves
        )
        self.senders[stream.worker].close_with(stream.row, refused)

    def end(self, stream: CoreStream, end: End) -> None:
        """End a stream for a reason that its tokens do not imply."""
        if stream.end is None:
            stream.end = end
        self.stop(stream)

    def stop(self, stream: CoreStream) -> None:
        """Compute and send nothing more of a stream. Idempotent."""
        if not stream.is_over:
            self._compute_no_more(stream)
            self.senders[stream.worker].close(stream.row)

    def _compute_no_more(self, stream: CoreStream) -> None:
        stream.is_over = True
        if stream.registration.media:  # nothing is computed of them any more
            stream.registration = replace(stream.registration, media=())
            places = self._media.pop(stream.row, None)
            if places is not None and self._images is not None:
                self._images.release(places)
        self._untimed.pop(stream.row, None)
        self._counters.request_ended(stream.row, time.monotonic())
        self._scheduler.remove(stream.row)
        self._adapters.release(stream.registration.spec)
        self._grammars.drop(stream.row)
        self._possible_ends.drop(stream.row)
        if self._logprob_budget.holds(stream.row):
            self._logprob_budget.shrink(
                stream.row, stream_bytes(stream.registration, self.num_outputs(stream))
            )

    def forget(self, stream: CoreStream) -> None:
        """Drop everything kept of a stream; its row can be reused."""
        self.stop(stream)
        self.senders[stream.worker].close(stream.row)
        self._tokens.drop(stream.row)
        self._logprobs.drop(stream.row)
        self._prompts.drop(stream.row)
        self._logprob_budget.close(stream.row)
        self._streams.remove(stream)
