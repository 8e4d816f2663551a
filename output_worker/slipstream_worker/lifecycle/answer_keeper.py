"""Keeps the answers of streams whose requests ask for it, and answers Recalls.

- A stream that is to be kept owes its answer until it has ended. It is made soon after that, behind
  everything that is urgent, or when it is asked for.
- The core holds every kept answer for the next worker, and has the registration of a stream until
  it holds its answer or was told that there is none. After an attach both sides compare ids.
- A fresh worker is sent the answers last, beside the steps; until then Recalls wait.
- The records of streams that run are bounded like the answers. A scope may have as much as is left
  for all others.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque

import msgspec
from msgspec.structs import replace

from slipstream_ipc.history.text_log import START
from slipstream_ipc.messages import (
    AnswerEvent,
    DropKept,
    EventKind,
    Keep,
    KeepOptions,
    Kept,
    KeptAnswer,
    KeptIds,
)
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.validation.kept_size import max_text_bytes, num_text_bytes
from slipstream_worker.core_link import CoreLink
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.kept_answers import KeptAnswers
from slipstream_worker.streams.slow_path import catch_up, whole_output
from slipstream_worker.streams.stream import Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

logger = logging.getLogger(__name__)

# of the answers that are made in one turn of the loop, approximate (decision 025)
_TOKENS_PER_TURN = 2**11
_READMITTED_FACTOR = 2  # records of streams that were accepted before may take this much more

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeptAnswer)


class AnswerKeeper:
    """The kept answers of one worker, and the streams that owe theirs."""

    def __init__(
        self,
        core: CoreLink,
        columns: StreamColumns,
        detokenizers: DetokenizerFactory,
        max_bytes: int,
    ) -> None:
        """`max_bytes`: of all answers together, and of the records of streams that run; 0: no
        answer is kept.
        """
        self._core = core
        self._columns = columns
        self._detokenizers = detokenizers
        self._max_bytes = max_bytes
        self._answers = KeptAnswers(max_bytes)
        self._owed: dict[WorkerStream, KeepOptions] = {}
        self._record_bytes: Counter[bytes] = Counter()  # of those, by scope
        self._ended: deque[WorkerStream] = deque()  # of those, oldest first
        self._making: dict[WorkerStream, StreamOutput] = {}  # of these, as far as they are made
        self.is_complete = False  # whether the core has sent all that an earlier worker has kept

    @property
    def max_answer_bytes(self) -> int:
        """The size limit of an answer: see `ModelCard`."""
        return self._answers.max_answer_bytes

    @property
    def num_answers(self) -> int:
        """Answers that are kept."""
        return len(self._answers)

    @property
    def num_bytes(self) -> int:
        """The size of the kept answers."""
        return self._answers.num_bytes

    def has(self, stream_id: bytes) -> bool:
        """True if this answer is kept."""
        return stream_id in self._answers

    def is_of_another(self, stream_id: bytes, scope: bytes) -> bool:
        """True if an answer is kept under this id for another scope."""
        return self._answers.is_of_another(stream_id, scope)

    # ---- streams ---------------------------------------------------------------------------

    def why_full(self, keep: KeepOptions, *, was_accepted: bool) -> str:
        """The reason to reject a stream with this record; empty if there is room for it."""
        num_bytes, total = len(keep.record), self._record_bytes.total()
        most = 2 * max(self._max_bytes, MESSAGE_BUDGET_BYTES)
        if was_accepted:
            is_full = total + num_bytes > _READMITTED_FACTOR * most
        else:
            is_full = self._record_bytes[keep.scope] + num_bytes > most - total
        return f"the records of running requests take {total} bytes already" if is_full else ""

    def expect_answer(self, stream: WorkerStream) -> None:
        """Note a new stream, which may be one to be kept."""
        keep = stream.keep
        if keep is not None and stream not in self._owed:
            self._owed[stream] = keep
            self._record_bytes[keep.scope] += len(keep.record)

    def ended(self, stream: WorkerStream) -> None:
        """A stream has ended, and owes its answer if it is to be kept."""
        if stream in self._owed:
            self._ended.append(stream)

    def cancel(self, stream: WorkerStream) -> None:
        """A stream does not owe its answer any more."""
        if stream not in self._owed:
            return
        self._settle(stream)
        if stream.registration is not None:
            self._core.enqueue(DropKept((stream.stream_id,)))

    def removed(self, stream: WorkerStream) -> None:
        """A stream is forgotten: its answer is made now, or never."""
        if stream in self._owed and stream.stage is Stage.ENDED:
            self._make(stream)
        else:
            self.cancel(stream)

    @property
    def has_work(self) -> bool:
        """True if `flush` has anything to do."""
        return bool(self._ended) or self._answers.has_unsent

    def flush(self) -> None:
        """Make answers of streams that have ended, and send some to the core. Call it regularly."""
        num_left = _TOKENS_PER_TURN
        while self._ended and num_left > 0:
            stream = self._ended[0]
            if stream in self._owed:
                num_left -= self._columns.num_tokens(stream)
                self._make(stream, _TOKENS_PER_TURN)
            if stream not in self._owed:
                self._ended.popleft()
        if self._answers.has_unsent and self._core.is_idle:
            entries = self._answers.unsent(MESSAGE_BUDGET_BYTES)
            if self._core.send_last(Keep(entries)):
                self._answers.mark_sent(entries)

    def clear(self) -> None:
        """Forget everything: the core sends it again."""
        self._owed.clear()
        self._record_bytes.clear()
        self._ended.clear()
        self._making.clear()
        self._answers.clear()
        self.is_complete = False

    # ---- the core --------------------------------------------------------------------------

    def attached(self) -> None:
        """The link to the core is new: state what is kept."""
        self._answers.mark_all_sent()  # it asks for what it lacks
        owed = tuple([stream.stream_id for stream in self._owed])
        self._core.enqueue(KeptIds(self._answers.stream_ids, owed, self.is_complete))

    def take(self, message: Kept) -> None:
        """Answers that an earlier worker has kept."""
        for entry in message.entries:
            self._put(entry.stream_id, entry.scope, entry.answer)
        self._answers.mark_sent(message.entries)
        self.is_complete |= message.last

    def send_again(self, stream_ids: tuple[bytes, ...]) -> None:
        """The core does not hold these answers."""
        self._answers.mark_unsent(stream_ids)

    # ---- clients ---------------------------------------------------------------------------

    def recall(
        self, stream_id: bytes, scope: bytes, stream: WorkerStream | None
    ) -> KeptAnswer | None:
        """The answer kept under this id and scope. stream: the stream of this id, if there is
        one.
        """
        keep = None if stream is None else self._owed.get(stream)
        if stream is not None and keep is not None:
            if keep.scope != scope:
                return None
            if stream.stage is not Stage.ENDED:
                return KeptAnswer(keep, _num_prompt_tokens(stream))
            self._make(stream)
        encoded = self._answers.get(stream_id, scope)
        return None if encoded is None else _decoder.decode(encoded)

    def forget(self, stream_id: bytes) -> None:
        """Keep this answer no longer."""
        if self._answers.remove(stream_id):
            self._core.enqueue(DropKept((stream_id,)))

    # ---- inside ----------------------------------------------------------------------------

    def _make(self, stream: WorkerStream, max_tokens: int = sys.maxsize) -> None:
        """Make the answer of a stream that has ended and owes it, or go on for `max_tokens`."""
        if not self._max_bytes:
            self.cancel(stream)
            return
        assert stream.output is not None
        keep = self._owed[stream]
        answer = KeptAnswer(keep, _num_prompt_tokens(stream), stream.output.end)
        try:
            output = self._making.get(stream) or whole_output(stream, self._detokenizers)
            if not catch_up(self._columns, stream, output, max_tokens):
                self._making[stream] = output
                return
            answer = _with_text(answer, output)
        except Exception:
            logger.exception("an answer is kept without its text", extra=of_requests(stream.label))
        texts = (answer.text, *[event.text for event in answer.events])
        if num_text_bytes(texts) > max_text_bytes(len(keep.record), self.max_answer_bytes):
            self.cancel(stream)
            return
        self._settle(stream)
        self._put(stream.stream_id, keep.scope, _encoder.encode(answer))

    def _settle(self, stream: WorkerStream) -> None:
        """A stream owes nothing any more."""
        keep = self._owed.pop(stream)
        self._making.pop(stream, None)
        self._record_bytes[keep.scope] -= len(keep.record)
        if not self._record_bytes[keep.scope]:
            del self._record_bytes[keep.scope]
        stream.keep_no_more()

    def _put(self, stream_id: bytes, scope: bytes, answer: bytes) -> None:
        dropped = self._answers.put(stream_id, scope, answer)
        if dropped:
            self._core.enqueue(DropKept(tuple(dropped)))


def _num_prompt_tokens(stream: WorkerStream) -> int:
    return 0 if stream.registration is None else len(stream.registration.prompt_ids) // 4


def _with_text(answer: KeptAnswer, output: StreamOutput) -> KeptAnswer:
    """The answer with its text or events. output: with all of its units."""
    log = output.log
    text = log.text_between(START, log.end)
    if not isinstance(output, AnswerOutput):
        return replace(answer, text=text)
    found = output.event_log.events_between(START, log.end)
    events: tuple[AnswerEvent, ...] = ()
    if not isinstance(found, int):
        events = found
    elif found:
        kind, call = EventKind(found & 0xFF), found >> 8
        events = (AnswerEvent(kind, text, call, num_tokens=log.num_tokens),)
    return replace(answer, events=events)
