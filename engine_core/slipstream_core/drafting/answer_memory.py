"""Answers that were given before, found again by their prompt or by four of their tokens.

- Only what shares cached prefixes shares answers: each root has a memory of its own, and what one
  tenant or one `cache_salt` was told is drafted for no other.
- Bytes are bounded over all roots; the answer that was used longest ago goes first.
- A hash may be that of other tokens: then a draft is wrong, no more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_ipc.arrays import UInt32s

MATCH = 4  # tokens that have to be equal
_MAX_TOKENS = 4096  # of an answer: taking it in must not hold up a step
_BYTES_A_TOKEN = 160  # the id, and an entry of a dictionary with two integers
_BYTES_AN_ANSWER = 1024
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_PLACES = 32  # bits of a place in an answer


class Place(NamedTuple):
    """A place in an answer, in front of the token at `position`."""

    answer: int
    position: int


@dataclass(frozen=True, slots=True)
class _Root:
    by_tokens: dict[int, int] = field(default_factory=dict)  # hash: answer and position
    by_prompt: dict[int, int] = field(default_factory=dict)  # hash: answer


@dataclass(frozen=True, slots=True)
class _Answer:
    root: bytes
    prompt: int
    token_ids: UInt32s


class AnswerMemory:
    """The answers of all roots."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[bytes, _Root] = {}
        self._answers: OrderedDict[int, _Answer] = OrderedDict()  # used last comes last
        self._next = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, root: bytes, prompt: UInt32s, answer: UInt32s) -> None:
        """Keep an answer, or the beginning of a long one, in place of another to the prompt."""
        token_ids = answer[:_MAX_TOKENS].copy()
        if len(token_ids) <= MATCH or _num_bytes(token_ids) > self._max_bytes:
            return
        prompt_hash = _hash_of_prompt(prompt)
        found = self._roots.setdefault(root, _Root())
        known = found.by_prompt.get(prompt_hash)
        if known is not None:
            if np.array_equal(self._answers[known].token_ids, token_ids):
                self._answers.move_to_end(known)
                return
            self._remove(known)
            found = self._roots.setdefault(root, _Root())
        number, self._next = self._next, self._next + 1
        self._answers[number] = _Answer(root, prompt_hash, token_ids)
        self.num_bytes += _num_bytes(token_ids)
        found.by_prompt[prompt_hash] = number
        places = range((number << _PLACES) + MATCH, (number << _PLACES) + len(token_ids))
        found.by_tokens.update(zip(_hashes(token_ids)[:-1].tolist(), places, strict=True))
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._answers)))

    def behind_prompt(self, root: bytes, prompt: UInt32s) -> Place | None:
        """The beginning of the answer to this prompt."""
        found = self._roots.get(root)
        number = None if found is None else found.by_prompt.get(_hash_of_prompt(prompt))
        return None if number is None else self._used(Place(number, 0))

    def behind(self, root: bytes, last: UInt32s) -> Place | None:
        """The place behind these MATCH tokens, in the answer that has them and came last."""
        found = self._roots.get(root)
        if found is None or len(last) < MATCH:
            return None
        place = found.by_tokens.get(_hash(last))
        return None if place is None else self._used(Place(place >> _PLACES, place & 0xFFFFFFFF))

    def read(self, place: Place, num: int) -> list[int]:
        """Up to `num` tokens from a place on; none if the answer is gone."""
        answer = self._answers.get(place.answer)
        if answer is None:
            return []
        ids: list[int] = answer.token_ids[place.position : place.position + num].tolist()
        return ids

    def _used(self, place: Place) -> Place:
        self._answers.move_to_end(place.answer)
        return place

    def _remove(self, number: int) -> None:
        answer = self._answers.pop(number)
        self.num_bytes -= _num_bytes(answer.token_ids)
        root = self._roots[answer.root]
        if root.by_prompt.get(answer.prompt) == number:
            del root.by_prompt[answer.prompt]
        for each in _hashes(answer.token_ids)[:-1].tolist():
            if root.by_tokens.get(each, -1) >> _PLACES == number:
                del root.by_tokens[each]
        if not root.by_prompt:
            del self._roots[answer.root]


def _num_bytes(token_ids: UInt32s) -> int:
    return _BYTES_AN_ANSWER + _BYTES_A_TOKEN * len(token_ids)


def _hash_of_prompt(prompt: UInt32s) -> int:
    return hash(prompt.tobytes())


def _hash(token_ids: UInt32s) -> int:
    """The hash of MATCH tokens, as `_hashes` has it."""
    found = 0
    for each in token_ids.tolist():
        found = (found * _FACTOR + each) & _WORD
    return found


def _hashes(token_ids: UInt32s) -> npt.NDArray[np.uint64]:
    """The hashes of all MATCH adjacent tokens."""
    ids, num = token_ids.astype(np.uint64), len(token_ids) - MATCH + 1
    found = np.zeros(num, np.uint64)
    for at in range(MATCH):
        found = found * np.uint64(_FACTOR) + ids[at : at + num]  # wraps around
    return found
