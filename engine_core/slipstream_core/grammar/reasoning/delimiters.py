"""Reads the delimiters of reasoning and of calls from a stream's ids, as an automaton.

- A delimiter is one id or a short sequence. It is read where its ids come one after another, behind
  the delimiter before it; of several that end with the same id, the longest.
- At a border, ids that begin a delimiter of reasoning are held: only the next ones say whether the
  border goes on. At the start of an answer in a grammar white space is held, too.
- Streams with equal delimiters share an automaton, which remembers each of its moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from slipstream_ipc.messages import ReasoningIds

Ids = tuple[int, ...]
OTHER = -1  # stands for every id that no delimiter has
_MAX_BLANKS = 8  # before reasoning, at the start of an answer in a grammar


class IdPlace(IntEnum):
    """The place of the next id."""

    START = 0  # of an answer in a grammar, which begins here or behind reasoning
    BORDER = 1
    REASONING = 2
    CONTENT = 3
    CALL = 4  # in the grammar of calls, which alone says where it ends
    GRAMMAR = 5  # to the end of the answer


class DelimiterState:
    """The state behind some ids.

    recent: the last of them, as many as may be the beginning of a delimiter. num_held: how many of
    these are held. moves: by id, those that were asked for. is_reasoning, is_call, is_grammar: of
    the place, as an enumeration's members are slow to name.
    """

    __slots__ = (
        "is_call",
        "is_grammar",
        "is_reasoning",
        "moves",
        "num_held",
        "place",
        "recent",
        "watches_all",
    )

    def __init__(self, place: IdPlace, recent: Ids = (), num_held: int = 0) -> None:
        self.place = place
        self.recent = recent
        self.num_held = num_held
        self.moves: dict[int, DelimiterMove] = {}
        self.is_reasoning = place is IdPlace.REASONING
        self.is_call = place is IdPlace.CALL
        self.is_grammar = place is IdPlace.GRAMMAR
        # whether the next id has to be looked at, whatever it is
        self.watches_all = bool(recent) or place in (IdPlace.START, IdPlace.BORDER, IdPlace.CALL)


class DelimiterMove(NamedTuple):
    """The effect of an id. num: ids of the delimiter that it completes. trigger: that delimiter, if
    it begins a call in the grammar. is_within: that delimiter ends reasoning without being its end.
    """

    to: DelimiterState
    num: int = 0
    trigger: Ids = ()
    is_within: bool = False


class DelimiterAutomaton:
    """The delimiters of a ReasoningIds. first_ids: with which they begin."""

    def __init__(self, ids: ReasoningIds) -> None:
        longer = ids.sequences
        self._begins = _all_of(ids.begins, longer.begins)
        self._ends = _all_of(ids.ends, longer.ends)
        self._calls = frozenset(_all_of(ids.calls, longer.calls))
        self._borders = frozenset(_all_of(ids.borders, longer.borders))
        self._triggers = frozenset(_all_of(ids.triggers, longer.triggers))
        self._blanks = frozenset(ids.blanks)
        others = {*self._begins, *self._ends, *self._calls, *self._borders} - self._triggers
        every = others | self._triggers
        self._others = others | _prefixes(others)
        self._prefixes = _prefixes(every)
        self._begin_prefixes = _prefixes(self._begins)
        self._held_prefixes = self._begin_prefixes | _prefixes(self._ends)
        self.first_ids = frozenset(each[0] for each in every)
        self.known_ids = frozenset(token_id for each in every for token_id in each) | self._blanks
        self._states: dict[tuple[IdPlace, Ids, int], DelimiterState] = {}

    def state(self, place: IdPlace, recent: Ids = (), num_held: int = 0) -> DelimiterState:
        """The one state that these make."""
        key = place, recent, num_held
        return self._states.get(key) or self._states.setdefault(key, DelimiterState(*key))

    def move(self, state: DelimiterState, token_id: int) -> DelimiterMove:
        """The effect of an id in a state that is neither in a call nor in the grammar."""
        if token_id not in self.known_ids:
            token_id = OTHER
        found = state.moves.get(token_id)
        if found is None:
            found = state.moves[token_id] = self._computed(state, (*state.recent, token_id))
        return found

    def next_end(self, state: DelimiterState) -> int:
        """The id that goes on with the end of reasoning that `state` has the most of, or begins the
        first one.
        """
        for part in _suffixes(state.recent):
            for end in self._ends:
                if len(part) < len(end) and end[: len(part)] == part:
                    return end[len(part)]
        return self._ends[0][0]

    def next_begins(self, state: DelimiterState) -> set[int]:
        """The ids that go on with a beginning of reasoning, of which `state` holds a part."""
        held = state.recent[len(state.recent) - state.num_held :]
        parts = [held[at:] for at in range(len(held) + 1) if self._blanks.issuperset(held[:at])]
        return {
            each[len(part)]
            for part in parts
            for each in self._begins
            if len(each) > len(part) and each[: len(part)] == part
        }

    def next_triggers(self, state: DelimiterState) -> set[int]:
        """The ids that make what `state` has begun a trigger of calls, and no other delimiter."""
        parts = [part for part in _suffixes(state.recent) if part]
        found = {
            each[len(part)]
            for part in parts
            for each in self._triggers
            if len(each) > len(part) and each[: len(part)] == part
        }
        also = {each for each in found for part in parts if (*part, each) in self._others}
        return found - also

    def _computed(self, state: DelimiterState, tail: Ids) -> DelimiterMove:
        """tail: the recent ids and the new one."""
        match state.place:
            case IdPlace.REASONING:
                if num := _longest(tail, self._ends):
                    return DelimiterMove(self.state(IdPlace.BORDER), num)
                if num := _longest(tail, self._calls):
                    trigger = tail[-num:] if tail[-num:] in self._triggers else ()
                    return DelimiterMove(self.state(IdPlace.CONTENT), num, trigger, is_within=True)
                return DelimiterMove(self._going_on(IdPlace.REASONING, tail))
            case IdPlace.START:
                num = _longest(tail, self._begins)
                if num and self._blanks.issuperset(tail[:-num]):
                    return DelimiterMove(self.state(IdPlace.REASONING), num)
                before = tail[: len(tail) - _longest(tail, self._begin_prefixes)]
                if len(before) <= _MAX_BLANKS and self._blanks.issuperset(before):
                    return DelimiterMove(self.state(IdPlace.START, tail, len(tail)))
                return DelimiterMove(self.state(IdPlace.GRAMMAR))
            case _:
                return self._outside(state, tail)

    def _outside(self, state: DelimiterState, tail: Ids) -> DelimiterMove:
        """The move in content, or at a border."""
        if num := _longest(tail, self._triggers):
            return DelimiterMove(self.state(IdPlace.CONTENT), num, tail[-num:])
        if state.place is IdPlace.CONTENT:
            if num := _longest(tail, self._borders):
                return DelimiterMove(self.state(IdPlace.BORDER), num)
            return DelimiterMove(self._going_on(IdPlace.CONTENT, tail))
        held = tail[len(state.recent) - state.num_held :]
        num = _longest(held, self._begins)
        if num and self._blanks.issuperset(held[:-num]):
            return DelimiterMove(self.state(IdPlace.REASONING), num)
        if num := _longest(tail, self._borders):
            return DelimiterMove(self.state(IdPlace.BORDER), num)
        num = _longest(held, self._ends)
        if num and self._blanks.issuperset(held[:-num]):
            return DelimiterMove(self.state(IdPlace.BORDER), num)
        num = _longest(held, self._held_prefixes)
        if self._blanks.issuperset(held[: len(held) - num]):
            return DelimiterMove(self._going_on(IdPlace.BORDER, tail, num))
        return DelimiterMove(self._going_on(IdPlace.CONTENT, tail))

    def _going_on(self, place: IdPlace, tail: Ids, num_held: int = 0) -> DelimiterState:
        num = _longest(tail, self._prefixes)
        return self.state(place, tail[len(tail) - num :], num_held)


@lru_cache(64)
def delimiter_automaton(ids: ReasoningIds) -> DelimiterAutomaton:
    """The automaton of these delimiters."""
    return DelimiterAutomaton(ids)


def _all_of(ids: Ids, sequences: Iterable[Ids]) -> tuple[Ids, ...]:
    return (*((each,) for each in ids), *sequences)


def _prefixes(sequences: Iterable[Ids]) -> frozenset[Ids]:
    """The proper prefixes of sequences, without the empty one."""
    return frozenset(each[:num] for each in sequences for num in range(1, len(each)))


def _suffixes(ids: Ids) -> list[Ids]:
    """The longest first, down to the empty one."""
    return [ids[at:] for at in range(len(ids) + 1)]


def _longest(tail: Ids, found: Collection[Ids]) -> int:
    """The number of ids at the end of `tail` that are one of these; 0: none."""
    return next((len(each) for each in _suffixes(tail) if each in found), 0)
