"""The output side of one stream: turns its tokens into released text, and finds its end.

Checks the criteria that tokens imply: stop ids, stop strings, length and repetition. Token ids are
not kept here, but for those that a repetition detector needs.

- A pure function of the token history: the same tokens give the same units, cut and end, however
  they are split into calls.
- A token is released together with the text it produced, never before: while some of its text is
  held back (a possible stop string, or an incomplete character) the token is, too.
- Held-back output that is too large for one message is released as several units.
- The earliest end wins: a stop string completed before the stop id or the length limit of the same
  token is the reason; a stop id wins over length, and length over a repetition.
- If a stop string cuts the text, tokens that produced only text after the cut are cut with it.
- The state of a settled output is nothing but counts. Whole tokens that cannot end the stream may
  therefore bypass it; `resume_at` then sets the counts. A repetition detector is to be given these
  tokens, too.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_ipc.history.text_log import TextCursor, TextLog
from slipstream_ipc.messages import REPETITION_DETECTED, End, Fault, FinishReason
from slipstream_worker.detokenizer.factory import Detokenizer
from slipstream_worker.output.repetition import RepetitionDetector
from slipstream_worker.output.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """The conditions that end a stream, besides its stop strings.

    stop_ids: all ids that end it; eos_ids: those among them that the request did not name itself.
    min_tokens: up to this number neither they nor stop strings count. include_stop: the text of the
    id that ends the stream is released.
    """

    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    max_tokens: int = sys.maxsize
    include_stop: bool = False


class StreamOutput:
    """The output side of one stream. `end` is set once; later tokens are ignored."""

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_eos_ids",
        "_held",
        "_include_stop",
        "_max_tokens",
        "_min_tokens",
        "_num_chars",
        "_num_emitted",
        "_num_unread",
        "_starts",
        "_stop_ids",
        "_stops",
        "_unit_tokens",
        "end",
        "log",
        "num_tokens",
        "repetition",
    )

    reads_events = False  # whether its text becomes events (see `answer_output`)

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: StopStrings | None,
        criteria: StopCriteria,
        unit_tokens: int = sys.maxsize,
        repetition: RepetitionDetector | None = None,
    ) -> None:
        """`detokenizer` None leaves the text empty. `unit_tokens` is the number of tokens that fit
        into one message. `repetition` has seen nothing yet.
        """
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = criteria.stop_ids
        self._eos_ids = criteria.eos_ids
        self._min_tokens = criteria.min_tokens
        self._max_tokens = criteria.max_tokens
        self._include_stop = criteria.include_stop
        self._unit_tokens = unit_tokens
        self.repetition = repetition
        self._held = ""  # text that may begin a stop string
        self._num_chars = 0  # characters detokenised
        self._num_emitted = 0  # characters released, without those held back
        # for each unreleased token: characters up to the end of its text, …
        self._ends: deque[int] = deque()
        self._starts: deque[int] = deque()  # … and characters before it
        self._num_unread = 0  # last tokens with incomplete text
        self.num_tokens = 0  # pushed; more than `end.num_tokens` if a stop string cut some
        self.log = TextLog()
        self.end: End | None = None

    def push(self, token_ids: Sequence[int]) -> bool:
        """Process the next tokens, up to the end they bring; returns whether there is an end."""
        for token_id in token_ids:
            if self.end is not None:
                break
            self._push(token_id)
        return self.end is not None

    @property
    def is_settled(self) -> bool:
        """True if nothing is held back and the next whole token's text is its own."""
        if self._held or self._num_unread or self._ends:
            return False
        return self._detokenizer is None or self._detokenizer.is_settled

    def is_harmless(self, text: str) -> bool:
        """True if a whole token with this text leaves a settled output settled and running."""
        return self._stops is None or self._stops.is_harmless(text)

    def resume_at(self, cursor: TextCursor) -> None:
        """Skip whole tokens up to `cursor` that were released elsewhere and end nothing.

        The output must have been settled before them; its log begins at `cursor`.
        """
        self.num_tokens = cursor.num_tokens
        self._num_chars = self._num_emitted = cursor.num_chars
        self.log = TextLog(cursor)

    def append_whole(self, texts: Sequence[str]) -> None:
        """Append whole tokens with these texts, which end nothing; each is released at once."""
        self.log.append_each(texts, self.num_tokens)
        self.num_tokens += len(texts)
        self._num_chars = self._num_emitted = self.log.end.num_chars

    def finish(self, reason: FinishReason, fault: Fault | None = None) -> None:
        """End for a reason that the tokens do not imply, after releasing everything held back."""
        if self.end is None:
            tail = self._detokenizer.flush() if self._detokenizer is not None else ""
            self._release(self._held + tail, self.num_tokens)
            self.end = End(reason, self.num_tokens, fault=fault)

    def end_with_error(self, fault: Fault) -> None:
        """End with an error; text held back is lost and the detokeniser is not called."""
        if self.end is None:
            self.log.append("", self.log.num_tokens)
            self.end = End("error", self.log.num_tokens, fault=fault)

    def _push(self, token_id: int) -> None:
        self.num_tokens = num_tokens = self.num_tokens + 1
        end: End | None = None
        repetition = self.repetition
        repeats = repetition is not None and repetition.ends_with(num_tokens, token_id)
        if token_id in self._stop_ids and num_tokens > self._min_tokens:
            named = None if token_id in self._eos_ids else token_id
            end = End("stop", num_tokens, named)
        elif num_tokens >= self._max_tokens:
            end = End("length", num_tokens)
        elif repeats:
            end = End("repetition", num_tokens, REPETITION_DETECTED)
        text, num_pending = self._text_of(token_id, end)
        if self._stops is not None:
            self._push_text(text, num_pending, end)
        elif text or num_tokens - num_pending > self.log.num_tokens:
            self._release(text, num_tokens - num_pending)
        if self.end is None:
            self.end = end

    def _text_of(self, token_id: int, end: End | None) -> tuple[str, int]:
        """The text that this token completes, and the number of last tokens with text pending."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", 0
        if end is None:
            return detokenizer.step(token_id), detokenizer.num_pending
        if end.reason == "stop" and not self._include_stop:
            return detokenizer.flush(), 0
        text = detokenizer.step(token_id)
        return text + detokenizer.flush(), 0

    def _push_text(self, text: str, num_pending: int, end: End | None) -> None:
        """Pass new text through the stop strings, which may end the stream."""
        assert self._stops is not None
        self._starts.append(self._num_chars)
        self._num_chars += len(text)
        self._num_unread += 1
        if num_pending < self._num_unread:
            self._ends.extend([self._num_chars] * (self._num_unread - num_pending))
            self._num_unread = num_pending
        active = self.num_tokens > self._min_tokens
        emit, self._held, stop = self._stops.feed(self._held, text, active)
        if stop is not None:
            num_kept = self._num_kept(self._num_emitted + len(emit))
            self._release(emit, num_kept)
            self.end = End("stop", num_kept, stop)
        elif end is not None:
            self._release(emit + self._held, self.num_tokens)
        else:
            self._num_emitted += len(emit)
            num_released = self.log.num_tokens
            while self._ends and self._ends[0] <= self._num_emitted:
                self._ends.popleft()
                self._starts.popleft()
                num_released += 1
            if emit or num_released > self.log.num_tokens:
                self._release(emit, num_released)

    def _release(self, text: str, num_tokens: int) -> None:
        """Release text, and tokens up to `num_tokens`: as one unit, or as several if that many
        tokens do not fit into a message. The first unit has all the text, as no token leaves before
        its own.
        """
        log, unit_tokens = self.log, self._unit_tokens
        while num_tokens - log.num_tokens > unit_tokens:
            log.append(text, log.num_tokens + unit_tokens)
            text = ""
        log.append(text, num_tokens)

    def _num_kept(self, num_chars: int) -> int:
        """Tokens that contribute to the first `num_chars` characters, or end there without text."""
        num_whole = sum(end <= num_chars for end in self._ends)
        num_begun = sum(start < num_chars for start in self._starts)
        return self.log.num_tokens + max(num_whole, num_begun)
