"""The open turn of a prompt: what a chat template has written of the answer already.

Only the template's own text is looked at: what the prompt has in common with the same chat without
an open turn is left out, and with it every message of the chat.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

TEXT = -1  # in place of an id


class ChatTexts(NamedTuple):
    """One chat as its template writes it.

    closed: without an open turn; of a message that is continued, without that message. prompted:
    `closed` with a generation prompt. last: the content of the last message in `closed`.
    """

    prompt: str
    closed: str
    prompted: str
    last: str = ""


def open_turn(texts: ChatTexts, literals: Collection[str]) -> str:
    """The answer's text in the prompt, without what introduces the turn.

    literals: of the answers' format. A turn's introduction ends before the first of them; in a
    prompt without any, all of it is introduction.
    """
    prompted = _difference(texts.prompted, texts.closed, texts.last, literals)
    begin = min((at for each in literals if (at := prompted.find(each)) >= 0), default=None)
    introduction = prompted if begin is None else prompted[:begin]
    if texts.prompt == texts.prompted:
        return prompted[len(introduction) :]
    turn = _difference(texts.prompt, texts.closed, texts.last, literals)
    return turn[_num_common(introduction, turn) :]


def split_at(text: str, token_ids: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """The text in pieces: (id, literal) for each literal, as a tokenizer finds its added tokens,
    and (TEXT, text) between them.
    """
    longest_first = sorted(filter(None, token_ids), key=len, reverse=True)
    begin = 0
    for match in re.finditer("|".join(map(re.escape, longest_first)) or r"(?!)", text):
        if match.start() > begin:
            yield TEXT, text[begin : match.start()]
        yield token_ids[match[0]], match[0]
        begin = match.end()
    if begin < len(text):
        yield TEXT, text[begin:]


def _difference(text: str, closed: str, last: str, literals: Collection[str]) -> str:
    """The part of `text` that follows `closed`; empty if it cannot be told apart."""
    if text.startswith(closed):
        return text[len(closed) :]
    # some templates end a chat with another token where no answer follows
    begin = _num_common(text, closed)
    content = last.strip()
    at = closed.rfind(content) if content else -1
    if at < 0 or at + len(content) > begin:
        return ""
    begin -= max(
        (
            size
            for each in literals
            for size in range(1, min(len(each), begin + 1))
            if text.startswith(each, begin - size)
        ),
        default=0,
    )
    return text[begin:]


def _num_common(one: str, other: str) -> int:
    """Length of the longest common prefix, by comparisons of slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
