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


def logprobs_shown(delta: Delta, texts: TokenTexts, with_all: bool) -> list[TokenLogprobs]:
    """The log-probabilities of a delta that are shown: those of content, or all."""
    entries = delta.logprobs or []
    if with_all:
        return entries
    return [each for part in only_content([entries], delta, texts) for each in part]


def only_content(
    entries: Iterable[list[TokenLogprobs]], delta: Delta, texts: TokenTexts
) -> Iterator[list[TokenLogprobs]]:
    """The log-probabilities of a delta's content. entries: of all its tokens, in parts."""
    kind = kind_of(delta)
    if kind is not None:
        if kind & 0xFF in (0, EventKind.CONTENT):
            yield from entries
        return
    raws = [texts.of(token_id).raw or b"" for token_id in delta.token_ids]
    are_content = iter(content_tokens(raws, events_of(delta)))
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
