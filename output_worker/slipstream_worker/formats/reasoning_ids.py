"""The token ids by which the core follows the reasoning of a format's answers. Pure.

A delimiter is one token, or several where it begins and ends with tokens: what stands between is
apart from other text then, so its spellings can be listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from slipstream_ipc.formats.answer_format import (
    AnswerFormat,
    CallFormat,
    CallSection,
    ChannelFormat,
    Delimiter,
    Element,
    Repeat,
)
from slipstream_ipc.messages import ReasoningIds, ReasoningSequences
from slipstream_worker.formats.delimiter_tables import Place

_MAX_IDS, _MAX_WAYS = 16, 16  # of one literal; a word of five letters has 16 ways at most


class Spellings(NamedTuple):
    """The spellings of a format's literals in a vocabulary. token_ids: of those that are one token.
    sequences: the ids of others that begin and end with a token, in each way that counts; first as
    the tokenizer writes them.
    """

    token_ids: Mapping[str, int]
    sequences: Mapping[str, tuple[tuple[int, ...], ...]] = MappingProxyType({})

    def ids(self, delimiters: Iterable[Delimiter | None]) -> tuple[int, ...]:
        """The ids of the delimiters that are one token."""
        found = (self.token_ids.get(each.literal) for each in delimiters if each is not None)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    def longer(
        self, delimiters: Iterable[Delimiter | None], *, first: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """The id sequences of the delimiters that are several tokens. first: only the first way of
        each.
        """
        found = (self.sequences.get(each.literal, ()) for each in delimiters if each is not None)
        every = (each for ways in found for each in (ways[:1] if first else ways))
        return tuple(dict.fromkeys(every))

    def has(self, delimiter: Delimiter | None) -> bool:
        """True if the delimiter can be followed."""
        literal = None if delimiter is None else delimiter.literal
        return literal in self.token_ids or literal in self.sequences


def reasoning_ids(
    found: AnswerFormat,
    spellings: Spellings,
    blank_ids: Iterable[int],
    place: Place | None,
    *,
    is_start: bool,
) -> ReasoningIds | None:
    """None where reasoning cannot be followed by ids: the format has none, its end is text, or it
    may end in a call whose beginning is text.

    place: where the prompt leaves the answer; None: within a call, or a header. is_start: at its
    very start.
    """
    reasoning, calls = found.reasoning, found.calls
    if found.channels is not None:
        is_open = place is not None and place.is_reasoning
        return _channel_ids(found.channels, spellings, is_open)
    if reasoning is None or not any(map(spellings.has, reasoning.ends)):
        return None
    reads_calls = calls is not None and (place is None or place.reads_calls)
    firsts: list[Delimiter | None] = []
    if calls is not None and reads_calls and reasoning.calls_within:
        firsts = call_beginnings(calls)
        if not all(map(spellings.has, firsts)):
            return None
    borders = [*reasoning.dropped]
    if calls is not None and reads_calls:
        borders += [*calls.dropped, *_ends_of(calls.sections)]
    if place is None:
        start = "content"
    elif place.is_reasoning:
        start = "reasoning"
    elif place.at_border or is_start:
        start = "start" if is_start else "border"
    else:
        start = "content"
    return ReasoningIds(
        start,  # type: ignore[arg-type]
        begins=spellings.ids(reasoning.begins),
        ends=spellings.ids(reasoning.ends),
        calls=spellings.ids(firsts),
        borders=spellings.ids(borders),
        blanks=tuple(blank_ids),
        sequences=ReasoningSequences(
            begins=spellings.longer(reasoning.begins),
            ends=spellings.longer(reasoning.ends),
            calls=spellings.longer(firsts),
            borders=spellings.longer(borders, first=True),
        ),
    )


def channel_headers(channels: ChannelFormat | None) -> list[str]:
    """The headers of messages with reasoning, from the token before the channel's name on."""
    if channels is None:
        return []
    begin, end = channels.channel.literal, channels.message.literal
    return [f"{begin}{name}{end}" for name in channels.reasoning]


def _channel_ids(
    channels: ChannelFormat, spellings: Spellings, is_open: bool
) -> ReasoningIds | None:
    """The ids for messages in channels: reasoning begins with its channel's name, right behind the
    token that stands before names, and the token that begins a message's text.
    """
    headers = [spellings.sequences.get(each, ()) for each in channel_headers(channels)]
    names = [way[1:-1] for ways in headers for way in ways]
    ends, borders = spellings.ids(channels.ends), spellings.ids((channels.channel,))
    if not all(headers) or channels.ends[0].literal not in spellings.token_ids:
        return None
    return ReasoningIds(
        "reasoning" if is_open else "content",
        begins=tuple(each[0] for each in names if len(each) == 1),
        ends=ends,
        borders=borders,
        num_behind=1,
        sequences=ReasoningSequences(begins=tuple(each for each in names if len(each) > 1)),
    )


def call_beginnings(calls: CallFormat) -> list[Delimiter | None]:
    """The delimiters with which calls begin that may stand anywhere; None: something else."""
    return [first_delimiter(each.elements) for each in calls.sections if not each.at_start]


def first_delimiter(elements: Sequence[Element]) -> Delimiter | None:
    """The delimiter that the elements begin with, if it is always the same."""
    match elements[0]:
        case Delimiter() as delimiter:
            return delimiter
        case Repeat(inner):
            return first_delimiter(inner)
        case _:
            return None


def _ends_of(sections: Sequence[CallSection]) -> list[Delimiter]:
    """The delimiters that sections always end with."""
    lasts = [each.elements[-1] for each in sections]
    return [last for last in lasts if isinstance(last, Delimiter)]


def find_spellings(
    literals: Iterable[str],
    token_ids: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
    id_of: Callable[[str], int | None],
) -> Spellings:
    """The spellings of a format's literals. token_ids: of the tokens that these are, and are made
    of. encode: a text to its ids. id_of: the id of a token with exactly this text.
    """
    parts = re.compile("|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or "(?!)")
    sequences = {}
    for literal in literals:
        found = list(parts.finditer(literal))
        if literal in token_ids or len(found) < 2:
            continue
        if found[0].start() == 0 and found[-1].end() == len(literal):
            usual = tuple(encode(literal))
            first, last = token_ids[found[0][0]], token_ids[found[-1][0]]
            if usual[:1] != (first,) or usual[-1:] != (last,) or len(usual) > _MAX_IDS:
                continue
            ways = [usual, *_ways(literal, parts, token_ids, id_of)]
            sequences[literal] = tuple(dict.fromkeys(ways))[:_MAX_WAYS]
    return Spellings({each: token_ids[each] for each in literals if each in token_ids}, sequences)


def _ways(
    literal: str,
    parts: re.Pattern[str],
    token_ids: Mapping[str, int],
    id_of: Callable[[str], int | None],
) -> list[tuple[int, ...]]:
    """The id sequences that spell `literal`, shortest first. The text between tokens may be any
    tokens that make it.
    """
    size = len(literal)
    ways: list[list[tuple[int, ...]]] = [[] for _ in range(size + 1)]
    ways[size] = [()]
    tokens, text_end = {each.start(): each[0] for each in parts.finditer(literal)}, size
    for at in range(size - 1, -1, -1):
        token = tokens.get(at)
        text_end = at if token else text_end
        texts = [token] if token else [literal[at:end] for end in range(at + 1, text_end + 1)]
        for text in texts:
            token_id = token_ids[text] if token else id_of(text)
            if token_id is not None:
                ways[at] += [(token_id, *rest) for rest in ways[at + len(text)]]
        ways[at] = sorted((each for each in ways[at] if len(each) <= _MAX_IDS), key=len)[:_MAX_WAYS]
    return ways[0]
