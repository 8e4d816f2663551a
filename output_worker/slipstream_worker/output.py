"""What one stream's tokens become: text, and where it ends.

Owns: the stream's token ids, its text log, the criteria that tokens imply (stop ids, stop strings,
length), and what is released when. Does not know: clients, messages, other streams.

Rules (STREAMS III and IV):
- A pure function of the token history: the same tokens give the same units, cut and end, however
  they are divided into calls.
- Tokens are released together with the text they produced, never before: while some of a token's
  text is held back (it may begin a stop string, or is half a character) the token is, too.
- The earliest end wins: a stop string that is complete before the stop id or the length limit of
  the same token is the reason; a stop id wins over length.
- Where a stop string cuts the text, tokens that produced only what is cut are cut with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream_ipc.messages import End, Fault, FinishReason
from slipstream_ipc.text_log import TextLog
from slipstream_worker.detokenizer import Detokenizer
from slipstream_worker.stop_strings import StopStrings


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
        "end",
        "log",
        "token_ids",
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
    ) -> None:
        """`detokenizer` None leaves the text empty. `stop_ids` holds every id that ends the stream,
        `eos_ids` those of them that the request did not name itself."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._eos_ids = eos_ids
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._include_stop = include_stop
        self._held = ""  # text that may begin a stop string
        self._num_chars = 0  # detokenised
        self._num_emitted = 0  # released, without what is held
        self._ends: deque[int] = (
            deque()
        )  # of each unreleased token: characters up to its text's end
        self._starts: deque[int] = deque()  # … and the characters that were complete before it
        self._num_unread = 0  # last tokens whose text is yet to come
        self.token_ids: list[int] = []
        self.log = TextLog()
        self.end: End | None = None

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take in the next tokens, up to the end they bring; whether the stream is ended."""
        for token_id in token_ids:
            if self.end is not None:
                break
            self._push(token_id)
        return self.end is not None

    def finish(self, reason: FinishReason, fault: Fault | None = None) -> None:
        """End for a reason that the tokens do not imply; all there is is released first."""
        if self.end is None:
            tail = self._detokenizer.flush() if self._detokenizer is not None else ""
            self.log.append(self._held + tail, len(self.token_ids))
            self.end = End(reason, len(self.token_ids), fault=fault)

    def break_off(self, fault: Fault) -> None:
        """End with an error of ours; what is held back is lost, the detokeniser is not asked."""
        if self.end is None:
            del self.token_ids[self.log.num_tokens :]
            self.log.append("", self.log.num_tokens)
            self.end = End("error", self.log.num_tokens, fault=fault)

    def _push(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        end: End | None = None
        if token_id in self._stop_ids and num_tokens > self._min_tokens:
            named = None if token_id in self._eos_ids else token_id
            end = End("stop", num_tokens, named)
        elif num_tokens >= self._max_tokens:
            end = End("length", num_tokens)
        text, is_pending = self._text_of(token_id, end)
        if self._stops is not None:
            self._push_text(text, is_pending, end)
        elif end is not None or not is_pending:
            self.log.append(text, num_tokens)
        elif text:
            self.log.append(text, self.log.num_tokens)
        if self.end is None:
            self.end = end

    def _text_of(self, token_id: int, end: End | None) -> tuple[str, bool]:
        """The text that this token completes, and whether some of its own is yet to come."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", False
        if end is None:
            return detokenizer.step(token_id), detokenizer.is_pending
        if end.reason == "stop" and not self._include_stop:
            return detokenizer.flush(), False
        text = detokenizer.step(token_id)
        return text + detokenizer.flush(), False

    def _push_text(self, text: str, is_pending: bool, end: End | None) -> None:
        """Pass new text through the stop strings; the stream may end by one of them."""
        assert self._stops is not None
        self._starts.append(self._num_chars)
        self._num_chars += len(text)
        self._num_unread += 1
        if not is_pending:
            self._ends.extend([self._num_chars] * self._num_unread)
            self._num_unread = 0
        active = len(self.token_ids) > self._min_tokens
        emit, self._held, stop = self._stops.feed(self._held, text, active)
        if stop is not None:
            num_kept = self._num_kept(self._num_emitted + len(emit))
            del self.token_ids[num_kept:]
            self.log.append(emit, num_kept)
            self.end = End("stop", num_kept, stop)
        elif end is not None:
            self.log.append(emit + self._held, len(self.token_ids))
        else:
            self._num_emitted += len(emit)
            num_released = self.log.num_tokens
            while self._ends and self._ends[0] <= self._num_emitted:
                self._ends.popleft()
                self._starts.popleft()
                num_released += 1
            if emit or num_released > self.log.num_tokens:
                self.log.append(emit, num_released)

    def _num_kept(self, num_chars: int) -> int:
        """Tokens that have a share in the first `num_chars` characters, or end there textless."""
        num_whole = sum(end <= num_chars for end in self._ends)
        num_begun = sum(start < num_chars for start in self._starts)
        return self.log.num_tokens + max(num_whole, num_begun)
