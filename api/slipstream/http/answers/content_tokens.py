"""Which tokens of an answer are of its content, for its log-probabilities.

A token counts for the part that its last byte belongs to. Messages do not say where a token's text
lies among events, so the events are looked for in the bytes of the tokens, one after another.

- Content and reasoning are found as they stand. So are names and arguments, unless the worker has
  rewritten them: those are skipped.
- A short text may occur in the delimiter before it, too: an occurrence that ends with a token is
  preferred.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from slipstream.delta_batch import TokenLogprobs
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.outputs import Delta, events_of, kind_of
from slipstream_ipc.messages import AnswerEvent, EventKind

_MAX_OCCURRENCES = 64  # of one text that are looked at


class ContentLogprobs:
    """Chooses the log-probabilities of one stream's content, delta by delta.

    A token without text is of the content if it follows content and is no added token: it is then a
    part of a character. Of a stream that is not read as events everything is content.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._is_read = False
        self._is_content = True  # what was read last is

    def is_even(self, delta: Delta, kind: int) -> bool:
        """Whether all tokens of a delta of this kind are of the content, or none is, as the kind
        says; the delta counts as read then.
        """
        if kind == 0:
            return not self._is_read
        is_content = kind & 0xFF == EventKind.CONTENT
        if is_content and delta.num_tokens > 1:
            return False
        self._is_read, self._is_content = True, is_content
        return True

    def of(self, delta: Delta) -> list[TokenLogprobs]:
        """Those of the next delta."""
        entries = delta.logprobs or []
        if kind_of(delta) == 0:
            if not self._is_read:
                return entries
            if not self._is_content:
                return []
            added = [self._texts.of(token_id).is_added for token_id in delta.token_ids]
            return [entry for entry, is_added in zip(entries, added, strict=False) if not is_added]
        events = events_of(delta)
        if events:
            self._is_read, self._is_content = True, events[-1].kind == EventKind.CONTENT
        return [each for part in only_content([entries], delta, self._texts) for each in part]


def only_content(
    entries: Iterable[list[TokenLogprobs]], delta: Delta, texts: TokenTexts
) -> Iterator[list[TokenLogprobs]]:
    """The log-probabilities of a delta's content. entries: of all its tokens, in parts."""
    if kind_of(delta) == 0:
        yield from entries
        return
    events = events_of(delta)
    if all(event.kind != EventKind.CONTENT for event in events):
        return
    raws = [texts.of(token_id).raw or b"" for token_id in delta.token_ids]
    are_content = iter(content_tokens(raws, events))
    for part in entries:
        yield [entry for entry, is_content in zip(part, are_content, strict=False) if is_content]


def content_tokens(raws: Sequence[bytes], events: Sequence[AnswerEvent]) -> list[bool]:
    """For each token whether it is of the content. raws: the tokens' bytes."""
    ends = list(accumulate(map(len, raws)))
    token_ends = set(ends)
    text = b"".join(raws)
    found = [False] * len(raws)
    position = 0
    for event in events:
        part = event.text.encode()
        if not part:
            continue
        begin = _find(text, part, position, token_ends)
        is_content = event.kind == EventKind.CONTENT
        if begin < 0:
            if not is_content:
                continue
            begin = position  # bytes that are no character: they are shown as U+FFFD
        end = min(begin + len(part), len(text))
        if is_content:
            # tokens whose last byte lies in [begin, end)
            for index in range(bisect_left(ends, begin + 1), bisect_left(ends, end + 1)):
                found[index] = bool(raws[index])
        position = end
    return found


def _find(text: bytes, part: bytes, position: int, ends: set[int]) -> int:
    """The first occurrence from `position` on that ends with a token, else the first; -1: none."""
    first = at = text.find(part, position)
    for _ in range(_MAX_OCCURRENCES):
        if at < 0 or at + len(part) in ends:
            break
        at = text.find(part, at + 1)
    else:
        at = -1
    return first if at < 0 else at
