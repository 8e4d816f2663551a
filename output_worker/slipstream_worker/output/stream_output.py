"""What one stream's tokens become: text, and where it ends.

Owns: the stream's text log, the criteria that tokens imply (stop ids, stop strings, length), and
what is released when. Does not know: clients, messages, other streams, where token ids are kept.

Rules:
- A pure function of the token history: the same tokens give the same units, cut and end, however
  they are divided into calls.
- Tokens are released together with the text they produced, never before: while some of a token's
  text is held back (it may begin a stop string, or is half a character) the token is, too.
- What was held back and is too much for one message is released as several units.
- The earliest end wins: a stop string that is complete before the stop id or the length limit of
  the same token is the reason; a stop id wins over length.
- Where a stop string cuts the text, tokens that produced only what is cut are cut with it.
- A settled output depends on nothing that came before but counts. So whole tokens that can end
  nothing need not pass through here: `resume_at` says where they have led.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

from slipstream_ipc.history.text_log import TextCursor, TextLog
from slipstream_ipc.messages import End, Fault, FinishReason
from slipstream_worker.detokenizer.factory import Detokenizer
from slipstream_worker.output.stop_strings import StopStrings


class StreamOutput:
    """The output side of one stream. `end` is set once; what comes later is ignored."""

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
    )

    def __init__(
        self,
        *,
        detokenizer: Detokenizer | None,
        stops: StopStrings | None,
        stop_ids: frozenset[int],
        eos_ids: frozenset[int],
        min_tokens: int,
        max_tokens: int,
        include_stop: bool,
        unit_tokens: int = sys.maxsize,
    ) -> None:
        """`detokenizer` None leaves the text empty. `stop_ids` holds every id that ends the stream,
        `eos_ids` those of them that the request did not name itself; `unit_tokens` is how many
        tokens may leave in one message."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._eos_ids = eos_ids
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._include_stop = include_stop
        self._unit_tokens = unit_tokens
        self._held = ""  # text that may begin a stop string
        self._num_chars = 0  # detokenised
        self._num_emitted = 0  # released, without what is held
        # of each unreleased token: the characters up to its text's end
        self._ends: deque[int] = deque()
        self._starts: deque[int] = deque()  # … and those that were complete before it
        self._num_unread = 0  # last tokens whose text is yet to come
        self.num_tokens = 0  # taken in; more than `end.num_tokens` where a stop string cut some
        self.log = TextLog()
        self.end: End | None = None

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take in the next tokens, up to the end they bring; whether the stream is ended."""
        for token_id in token_ids:
            if self.end is not None:
                break
            self._push(token_id)
        return self.end is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is held back, and a whole token's text is its own."""
        if self._held or self._num_unread or self._ends:
            return False
        return self._detokenizer is None or self._detokenizer.is_settled

    def is_harmless(self, text: str) -> bool:
        """Whether a whole token of this text, behind a settled output, leaves it settled."""
        return self._stops is None or self._stops.is_harmless(text)

    def resume_at(self, cursor: TextCursor) -> None:
        """Whole tokens, which end nothing, have been read elsewhere, up to `cursor`.

        The output must have been settled before them; its log begins there.
        """
        self.num_tokens = cursor.num_tokens
        self._num_chars = self._num_emitted = cursor.num_chars
        self.log = TextLog(cursor)

    def take_whole(self, texts: Sequence[str]) -> None:
        """Take in whole tokens of these texts, which end nothing; each is released at once."""
        self.log.append_each(texts, self.num_tokens)
        self.num_tokens += len(texts)
        self._num_chars = self._num_emitted = self.log.end.num_chars

    def finish(self, reason: FinishReason, fault: Fault | None = None) -> None:
        """End for a reason that the tokens do not imply; all there is is released first."""
        if self.end is None:
            tail = self._detokenizer.flush() if self._detokenizer is not None else ""
            self._release(self._held + tail, self.num_tokens)
            self.end = End(reason, self.num_tokens, fault=fault)

    def break_off(self, fault: Fault) -> None:
        """End with an error of ours; what is held back is lost, the detokeniser is not asked."""
        if self.end is None:
            self.log.append("", self.log.num_tokens)
            self.end = End("error", self.log.num_tokens, fault=fault)

    def _push(self, token_id: int) -> None:
        self.num_tokens = num_tokens = self.num_tokens + 1
        end: End | None = None
        if token_id in self._stop_ids and num_tokens > self._min_tokens:
            named = None if token_id in self._eos_ids else token_id
            end = End("stop", num_tokens, named)
        elif num_tokens >= self._max_tokens:
            end = End("length", num_tokens)
        text, num_pending = self._text_of(token_id, end)
        if self._stops is not None:
            self._push_text(text, num_pending, end)
        elif text or num_tokens - num_pending > self.log.num_tokens:
            self._release(text, num_tokens - num_pending)
        if self.end is None:
            self.end = end

    def _text_of(self, token_id: int, end: End | None) -> tuple[str, int]:
        """The text that this token completes, and of how many tokens some is yet to come."""
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
        """Pass new text through the stop strings; the stream may end by one of them."""
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
        """Release text and the tokens up to this one: one unit, or several, where that many tokens
        would not fit into a message. The first has the text, as no token leaves before its own.
        """
        num_released = self.log.num_tokens + self._unit_tokens
        while num_released < num_tokens:
            self.log.append(text, num_released)
            text, num_released = "", num_released + self._unit_tokens
        self.log.append(text, num_tokens)

    def _num_kept(self, num_chars: int) -> int:
        """Tokens that have a share in the first `num_chars` characters, or end there textless."""
        num_whole = sum(end <= num_chars for end in self._ends)
        num_begun = sum(start < num_chars for start in self._starts)
        return self.log.num_tokens + max(num_whole, num_begun)
