"""The actions of delimiters at each place outside calls: the tables of a format and a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from slipstream_ipc.formats.answer_format import (
    Alternative,
    AnswerFormat,
    CallFormat,
    CallSection,
    ChannelFormat,
    Delimiter,
    JsonObject,
    LiteralText,
    delimiters,
    spelled_literals,
)
from slipstream_worker.formats.call_graph import CallGraph, Scan
from slipstream_worker.formats.literals import Literals, split_literals
from slipstream_worker.formats.scanners.scanner import BLANKS


class Move(IntEnum):
    """The effect of a delimiter outside calls."""

    DROP = 0
    BEGIN_REASONING = 1
    END_REASONING = 2
    OPEN_SECTION = 3
    CLOSE_CALL = 4  # one that failed
    OPEN_HEADER = 5  # of a message in a channel
    END_MESSAGE = 6


class PlaceAction(NamedTuple):
    """A move; of those in a section, the node that it leads to."""

    move: Move
    node: int = 0


class Place(NamedTuple):
    """The place of plain text in an answer.

    at_border: nothing but blanks since the beginning, or since the last delimiter. failed_at: the
    node behind the arguments of a call that failed and was not closed yet; 0: none.
    """

    is_reasoning: bool
    at_border: bool
    reads_calls: bool
    failed_at: int = 0


class Triggers(NamedTuple):
    """The texts and ids that are more than plain text at one place."""

    texts: Literals[PlaceAction]
    ids: Mapping[int, PlaceAction]
    scans: tuple[Scan, ...]  # of sections that begin without a delimiter, at a border
    hazard_chars: frozenset[str]


class FormatTables:
    """A format and a vocabulary. literals: of the tokens that are delimiters, by id. spelled: those
    of these ids that are read as their letters.
    """

    def __init__(self, answer_format: AnswerFormat, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: literal to id of the added tokens of the vocabulary. Raises ValueError for a
        format whose literals cannot be told apart.
        """
        self.format = answer_format
        literals = {part.literal for part in delimiters(answer_format)}
        self._token_ids = {
            literal: token_id for literal, token_id in token_ids.items() if literal in literals
        }
        self.literals = {token_id: literal for literal, token_id in self._token_ids.items()}
        channels = answer_format.channels
        calls = channel_calls(channels) if channels else answer_format.calls
        self.graph = CallGraph(calls, self._token_ids) if calls else None
        self.headers = _header_literals(channels, self._token_ids) if channels else None
        spelled = spelled_literals(answer_format)
        self.spelled = frozenset(self._token_ids[each] for each in spelled & self._token_ids.keys())
        self.tokens = frozenset(self._token_ids) - spelled
        unquotable = answer_format if channels else calls
        self.unquotable = (
            {part.literal for part in delimiters(unquotable)}
            if calls and not calls.quotable
            else set()
        )
        failures = range(1, len(self.graph.nodes)) if self.graph else range(0)
        self.triggers = {
            place: self._triggers(place)
            for place in map(Place._make, product(*[(False, True)] * 3, [0, *failures]))
        }
        self.has_borders = any(
            self._meanings(Place(False, True, calls)) != self._meanings(Place(False, False, calls))
            or self._scans(Place(False, True, calls))
            for calls in (False, True)
        )

    def _triggers(self, place: Place) -> Triggers:
        texts, ids = split_literals(self._meanings(place), self._token_ids)
        hazards = frozenset(BLANKS) | {text[0] for text in texts}
        return Triggers(Literals(texts), ids, self._scans(place), hazards)

    def _scans(self, place: Place) -> tuple[Scan, ...]:
        if not (self.format.calls and place.at_border and self._reads_calls_at(place)):
            return ()
        assert self.graph is not None
        firsts = [self.graph.firsts[node] for node in self.graph.openings]
        return tuple(scan for first in firsts for scan in first.scans)

    def _reads_calls_at(self, place: Place) -> bool:
        reasoning = self.format.reasoning
        if self.graph is None or not place.reads_calls:
            return False
        return not place.is_reasoning or (reasoning is not None and reasoning.calls_within)

    def _meanings(self, place: Place) -> dict[Delimiter | LiteralText, PlaceAction]:
        found: dict[Delimiter | LiteralText, PlaceAction] = {}
        reasoning, calls = self.format.reasoning, self.format.calls
        channels = self.format.channels
        if self._reads_calls_at(place):
            assert self.graph is not None
            for literal, branch in self.graph.closers[place.failed_at].items():
                move = Move.CLOSE_CALL if branch.closes else Move.OPEN_SECTION
                found[literal] = PlaceAction(move, branch.target)
        if channels is not None:
            for literal in (channels.start, channels.channel):
                found.setdefault(literal, PlaceAction(Move.OPEN_HEADER))
            for literal in channels.ends:
                found.setdefault(literal, PlaceAction(Move.END_MESSAGE))
        if calls is not None and self._reads_calls_at(place):
            assert self.graph is not None
            for section, node in zip(calls.sections, self.graph.openings, strict=True):
                if place.at_border or not section.at_start:
                    for literal, branch in self.graph.firsts[node].literals.items():
                        found.setdefault(literal, PlaceAction(Move.OPEN_SECTION, branch.target))
            for literal in calls.dropped:
                found.setdefault(literal, PlaceAction(Move.DROP))
        if reasoning is not None:
            if place.at_border:
                move = Move.DROP if place.is_reasoning else Move.BEGIN_REASONING
                for literal in reasoning.begins:
                    found.setdefault(literal, PlaceAction(move))
            if place.at_border or place.is_reasoning:
                for literal in reasoning.ends:
                    found.setdefault(literal, PlaceAction(Move.END_REASONING))
            for literal in reasoning.dropped:
                found.setdefault(literal, PlaceAction(Move.DROP))
        return found


def channel_calls(channels: ChannelFormat) -> CallFormat:
    """The format of the call behind the header of a message to a function."""
    ends = Alternative(tuple((end,) for end in channels.ends))
    return CallFormat("", (CallSection((JsonObject(may_be_empty=True), ends)),))


def _header_literals(
    channels: ChannelFormat, token_ids: Mapping[str, int]
) -> tuple[Literals[Delimiter], Mapping[int, Delimiter]]:
    parts: dict[Delimiter | LiteralText, Delimiter] = {part: part for part in delimiters(channels)}
    texts, ids = split_literals(parts, token_ids)
    return Literals(texts), ids
