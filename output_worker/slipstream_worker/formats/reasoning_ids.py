"""The token ids by which the core follows the reasoning of a format's answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from slipstream_ipc.formats.answer_format import (
    AnswerFormat,
    CallFormat,
    CallSection,
    ChannelFormat,
    Delimiter,
    Element,
    Repeat,
)
from slipstream_ipc.messages import ReasoningIds
from slipstream_ipc.messages.answer import ReasoningPlace
from slipstream_worker.formats.places import Place


def reasoning_ids(
    found: AnswerFormat,
    token_ids: Mapping[str, int],
    blank_ids: Iterable[int],
    place: Place | None,
    *,
    is_start: bool,
    name_ids: Mapping[str, int] = MappingProxyType({}),
) -> ReasoningIds | None:
    """None where reasoning cannot be followed by ids: the format has none, its end is no token, or
    it may end in a call whose beginning is none.

    token_ids: of the format's literals that are one token. place: where the prompt leaves the
    answer; None: within a call, or a header. is_start: at its very start. name_ids: of the channels
    with reasoning whose names are one token.
    """
    reasoning, calls = found.reasoning, found.calls
    if found.channels is not None:
        is_open = place is not None and place.is_reasoning
        return _channel_ids(found.channels, token_ids, name_ids, is_open)
    if reasoning is None:
        return None
    reads_calls = calls is not None and (place is None or place.reads_calls)
    ends = _ids(reasoning.ends, token_ids)
    begins_of_calls: tuple[int, ...] = ()
    if calls is not None and reads_calls and reasoning.calls_within:
        firsts = call_beginnings(calls)
        begins_of_calls = _ids(filter(None, firsts), token_ids)
        if len(begins_of_calls) < len(set(firsts)):
            return None
    if not ends:
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
        begins=_ids(reasoning.begins, token_ids),
        ends=ends,
        calls=begins_of_calls,
        borders=_ids(borders, token_ids),
        blanks=tuple(blank_ids),
    )


def _channel_ids(
    channels: ChannelFormat,
    token_ids: Mapping[str, int],
    name_ids: Mapping[str, int],
    is_open: bool,
) -> ReasoningIds | None:
    """Of messages in channels: reasoning begins with its channel's name, right behind the token
    that stands before names, and the token that begins a message's text.
    """
    begins = tuple([name_ids[name] for name in channels.reasoning if name in name_ids])
    ends, borders = _ids(channels.ends, token_ids), _ids((channels.channel,), token_ids)
    if len(begins) < len(channels.reasoning) or not borders:
        return None
    if not ends or channels.ends[0].literal not in token_ids:
        return None
    start: ReasoningPlace = "reasoning" if is_open else "content"
    return ReasoningIds(start, begins, ends, borders=borders, num_behind=1)


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


def _ids(delimiters: Iterable[Delimiter | None], token_ids: Mapping[str, int]) -> tuple[int, ...]:
    found = (token_ids.get(each.literal) for each in delimiters if each is not None)
    return tuple(dict.fromkeys(each for each in found if each is not None))
