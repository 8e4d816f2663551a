"""Regular expressions of the names that some patterns do not take.

A JSON Schema's patterns search: `^` and `$` stand for the ends of a name, and a pattern without
them takes any name that it occurs in. A pattern becomes a nondeterministic automaton (K. Thompson,
1968), several of them one deterministic automaton by its sets of states, whose states that take
nothing are written as an expression by removing one state after the other (S. Kleene, 1956).

- Patterns are the grammar library's: `\\d` and `\\w` are of ASCII, `\\s` is of Unicode, `.` is any
  character but a newline. A pattern that is not read here has no complement.
- Sizes are bounded: a set of states doubles with each, and an expression with each state.
- Control characters are in no expression: JSON has several spellings of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["CONTROLS", "escaped", "names_outside", "takes"]

CONTROLS = r"\x00-\x1f\x7f"
_TOP = 0x10FFFF
_MAX_EDGES = 2_000  # of the nondeterministic automaton
_MAX_LOOKS = 300_000  # at edges, from which the deterministic one is made
_MAX_STATES = 100  # of the deterministic one
_MAX_CHARS = 8_192  # of an expression
_MAX_COUNT = 200  # of repetitions

Ranges = tuple[tuple[int, int], ...]
"""Code points, from and to inclusive, in order and apart."""

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_BLANKS: Ranges = (
    *((9, 13), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_CONTROL_RANGES: Ranges = ((0, 0x1F), (0x7F, 0x7F))
_CHARACTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_CODES = {
    "x": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{2})"),
    "u": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{4})"),
}
_REPEAT = re.compile(r"\{(\d+)(,?)(\d*)\}")


class _Unread(Exception):  # noqa: N818  (an outcome)
    """A pattern has what is not read here, or too much of it."""


def names_outside(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """Return a pattern of all names without control characters that are none of `names` and that no
    pattern takes; an empty one, if there are none; None, if it cannot be told or is too long.
    """
    try:
        automaton = _Automaton()
        for pattern in patterns:
            _Reader(automaton, pattern).read()
        for name in names:
            automaton.add_name(name)
        table, rejecting = _deterministic(automaton)
        found = _expression(table, rejecting)
    except _Unread:
        return None
    return f"^{found}$" if found is not None else ""


def takes(pattern: str, name: str) -> bool | None:
    """True if the pattern takes this name; None, if that cannot be told."""
    try:
        automaton = _Automaton()
        _Reader(automaton, pattern).read()
        return automaton.takes(name)
    except _Unread:
        return None


def escaped(character: str) -> str:
    """A character as it stands in an expression, in a set or alone."""
    return (
        character if character.isalnum() and character.isascii() else f"\\x{{{ord(character):x}}}"
    )


class _Edge(NamedTuple):
    ranges: Ranges
    target: int


class _Automaton:
    """States by number: 0 is the start, 1 takes what came, whatever follows.

    silent: targets that cost no character, with the end of a name at which alone they are open.
    """

    def __init__(self) -> None:
        self.edges: list[list[_Edge]] = [[], [_Edge(((0, _TOP),), 1)]]
        self.silent: list[list[tuple[str, int]]] = [[], []]
        self._num_edges = 0
        self._num_looks = 0

    def state(self) -> int:
        self.edges.append([])
        self.silent.append([])
        return len(self.edges) - 1

    def add(self, source: int, ranges: Ranges, target: int) -> None:
        self._count()
        self.edges[source].append(_Edge(ranges, target))

    def pass_over(self, source: int, target: int, where: str = "") -> None:
        """where: "^" or "$", at which alone the way is open."""
        self._count()
        self.silent[source].append((where, target))

    def add_name(self, name: str) -> None:
        last = self.state()
        self.pass_over(0, last, "^")
        for character in name:
            following = self.state()
            self.add(last, ((ord(character), ord(character)),), following)
            last = following
        self.pass_over(last, 1, "$")

    def closed(self, states: Iterable[int], where: str) -> frozenset[int]:
        """These states and those that they reach without a character. where: the ends of the name
        that this place is, of "^" and "$".
        """
        found, waiting = set(states), list(states)
        while waiting:
            for condition, target in self.silent[waiting.pop()]:
                if condition in where and target not in found:  # an empty one is in any
                    found.add(target)
                    waiting.append(target)
        return frozenset(found)

    def after(self, states: Iterable[int], point: int) -> frozenset[int]:
        """The states behind a character; a search may begin there, too."""
        self._num_looks += sum(len(self.edges[state]) for state in states)
        if self._num_looks > _MAX_LOOKS:
            raise _Unread
        found = {
            edge.target
            for state in states
            for edge in self.edges[state]
            if any(low <= point <= high for low, high in edge.ranges)
        }
        return self.closed({0, *found}, "")

    def takes(self, name: str) -> bool:
        states = self.closed({0}, "^")
        for character in name:
            states = self.after(states, ord(character))
        return self.is_taken(states, is_empty=not name)

    def is_taken(self, states: Iterable[int], *, is_empty: bool) -> bool:
        return 1 in self.closed(states, "^$" if is_empty else "$")

    def _count(self) -> None:
        self._num_edges += 1
        if self._num_edges > _MAX_EDGES:
            raise _Unread


class _Reader:
    """Reads a pattern into an automaton, by recursive descent."""

    def __init__(self, automaton: _Automaton, pattern: str) -> None:
        self._automaton = automaton
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> None:
        first = self._automaton.state()
        self._automaton.pass_over(0, first)
        last = self._choice(first)
        if self._at < len(self._text):
            raise _Unread
        self._automaton.pass_over(last, 1)

    def _choice(self, source: int) -> int:
        last = self._automaton.state()
        self._depth += 1
        if self._depth > 50:
            raise _Unread
        while True:
            self._automaton.pass_over(self._sequence(source), last)
            if self._peek() != "|":
                self._depth -= 1
                return last
            self._at += 1

    def _sequence(self, source: int) -> int:
        while (each := self._peek()) not in ("", "|", ")"):
            if each in "^$":
                self._at += 1
                target = self._automaton.state()
                self._automaton.pass_over(source, target, each)
                source = target
            else:
                source = self._repeated(source)
        return source

    def _repeated(self, source: int) -> int:
        begun = self._at
        first = self._automaton.state()
        self._automaton.pass_over(source, first)
        last = self._atom(first)
        ended = self._at
        counts = self._counts()
        if counts is None:
            return last
        least, most = counts
        behind = self._at
        if self._peek() in ("*", "+", "?", "{"):  # of a repetition: read otherwise elsewhere
            raise _Unread
        if (most or least) > _MAX_COUNT:
            raise _Unread
        skip, ways = source, [source] if least == 0 else []
        for number in range(1, max(least, most or 0, 1) + 1):
            if number > 1:
                first = self._automaton.state()
                self._automaton.pass_over(skip, first)
                self._at = begun
                last = self._atom(first)
                assert self._at == ended
            if number >= least:
                ways.append(last)
            skip = last
        if most is None:
            self._automaton.pass_over(last, first)
        self._at = behind
        if most == 0:
            ways = [source]
        target = self._automaton.state()
        for way in ways:
            self._automaton.pass_over(way, target)
        return target

    def _counts(self) -> tuple[int, int | None] | None:
        """The least and the largest count of the atom before; lazily or not is the same here."""
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        each = self._peek()
        if each in simple:
            self._at += 1
            found = simple[each]
        elif each == "{":
            listed = _REPEAT.match(self._text, self._at)
            if listed is None or (listed[3] and not listed[2]):
                raise _Unread
            self._at = listed.end()
            least = int(listed[1])
            most = int(listed[3]) if listed[3] else None if listed[2] else least
            if most is not None and most < least:
                raise _Unread
            found = least, most
        else:
            return None
        if self._peek() == "?":
            self._at += 1
        return found

    def _atom(self, source: int) -> int:
        each = self._next()
        if each == "(":
            if self._peek() == "?":
                self._at += 1
                if self._next() != ":":
                    raise _Unread
            last = self._choice(source)
            if self._next() != ")":
                raise _Unread
            return last
        if each in "*+?{":
            raise _Unread
        ranges: Ranges
        if each == "[":
            ranges = self._set()
        elif each == ".":
            ranges = _without(((0, _TOP),), ((10, 10),))
        elif each == "\\":
            ranges = self._escape()
        else:
            ranges = ((ord(each), ord(each)),)
        target = self._automaton.state()
        self._automaton.add(source, ranges, target)
        return target

    def _set(self) -> Ranges:
        is_negative = self._peek() == "^"
        self._at += is_negative
        found: list[tuple[int, int]] = []
        while (each := self._next()) != "]" or not found:
            if each == "[" or self._text[self._at - 1 : self._at + 1] in ("&&", "~~", "--"):
                raise _Unread
            ranges = self._escape() if each == "\\" else ((ord(each), ord(each)),)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                other = self._next()
                if other == "[" or (other == "-"):
                    raise _Unread
                upper = self._escape() if other == "\\" else ((ord(other), ord(other)),)
                low, high = ranges[0][0], upper[0][1]
                if len(ranges) > 1 or len(upper) > 1 or ranges[0][1] > low or upper[0][0] < high:
                    raise _Unread
                if high < low:
                    raise _Unread
                ranges = ((low, high),)
            found += ranges
        joined = _joined(found)
        return _without(((0, _TOP),), joined) if is_negative else joined

    def _escape(self) -> Ranges:
        each = self._next()
        if (named := _SETS.get(each.lower())) is not None:
            return named if each.islower() else _without(((0, _TOP),), named)
        if each in _CHARACTERS:
            point = _CHARACTERS[each]
        elif each in "xu":
            found = _CODES[each].match(self._text, self._at)
            if found is None or (point := int(found[1] or found[2], 16)) > _TOP:
                raise _Unread
            self._at = found.end()
        elif each.isascii() and not each.isalnum():
            point = ord(each)
        else:
            raise _Unread
        return ((point, point),)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        each = self._peek()
        if not each:
            raise _Unread
        self._at += 1
        return each


_SETS: dict[str, Ranges] = {"d": _DIGITS, "w": _WORD, "s": _BLANKS}


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def _without(ranges: Ranges, taken: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        for begin, end in taken:
            if begin > high or end < low:
                continue
            if begin > low:
                found.append((low, begin - 1))
            low = end + 1
        if low <= high:
            found.append((low, high))
    return tuple(found)


def _deterministic(automaton: _Automaton) -> tuple[list[dict[int, Ranges]], set[int]]:
    """Return the ways between states, of which 0 is the start, and the states that take nothing."""
    bounds = {0, _TOP + 1}
    for low, high in _CONTROL_RANGES:
        bounds |= {low, high + 1}
    for edges in automaton.edges:
        for edge in edges:
            for low, high in edge.ranges:
                bounds |= {low, high + 1}
    points = sorted(bounds)
    pieces = [
        (low, high - 1)
        for low, high in itertools.pairwise(points)
        if not any(begin <= low <= end for begin, end in _CONTROL_RANGES)
    ]
    # the start is a state of its own: only there a name may be empty, and `^` is open
    numbers: dict[tuple[frozenset[int], bool], int] = {}
    waiting = [(automaton.closed({0}, "^"), True)]
    numbers[waiting[0]] = 0
    table: list[dict[int, Ranges]] = []
    rejecting: set[int] = set()
    while waiting:
        states, is_start = key = waiting.pop(0)
        ways: dict[int, list[tuple[int, int]]] = {}
        for low, high in pieces:
            target = automaton.after(states, low), False
            if 1 in target[0]:  # taken, whatever follows
                continue
            if target not in numbers:
                if len(numbers) >= _MAX_STATES:
                    raise _Unread
                numbers[target] = len(numbers)
                waiting.append(target)
            ways.setdefault(numbers[target], []).append((low, high))
        table.append({target: _joined(ranges) for target, ranges in ways.items()})
        if not automaton.is_taken(states, is_empty=is_start):
            rejecting.add(numbers[key])
        if is_start and 1 in states:
            return [{}], set()
    return _smallest(table, rejecting)


def _smallest(
    table: list[dict[int, Ranges]], rejecting: set[int]
) -> tuple[list[dict[int, Ranges]], set[int]]:
    """The same automaton without states that differ from others in nothing (E. F. Moore, 1956)."""
    group = [int(number in rejecting) for number in range(len(table))]
    while True:
        kinds: dict[object, int] = {}
        following = []
        for number, ways in enumerate(table):
            merged: dict[int, list[tuple[int, int]]] = {}
            for target, ranges in ways.items():
                merged.setdefault(group[target], []).extend(ranges)
            kind = (
                group[number],
                frozenset((target, _joined(ranges)) for target, ranges in merged.items()),
            )
            following.append(kinds.setdefault(kind, len(kinds)))
        if len(kinds) == len(set(group)):
            break
        group = following
    order = {each: index for index, each in enumerate(dict.fromkeys(group))}  # the start's first
    smaller: list[dict[int, Ranges]] = [{} for _ in order]
    for number, ways in enumerate(table):
        merged = {}
        for target, ranges in ways.items():
            merged.setdefault(order[group[target]], []).extend(ranges)
        smaller[order[group[number]]] = {to: _joined(ranges) for to, ranges in merged.items()}
    return smaller, {order[group[number]] for number in rejecting}


def _expression(table: Sequence[dict[int, Ranges]], ends: set[int]) -> str | None:
    """The expression of the ways from state 0 to one of `ends`; None if there are none."""
    start, end = -1, -2
    ways: dict[tuple[int, int], str] = {(start, 0): ""}
    for source, found in enumerate(table):
        for target, ranges in found.items():
            ways[source, target] = _of_ranges(ranges)
    for number in ends:
        ways[number, end] = ""
    left = set(range(len(table)))
    while left:
        num_in = {n: sum(b == n != a for a, b in ways) for n in left}
        num_out = {n: sum(a == n != b for a, b in ways) for n in left}
        chosen = min(left, key=lambda n: (num_in[n] * num_out[n], n))
        left.remove(chosen)
        loop = ways.pop((chosen, chosen), None)
        between = f"{_one(loop)}*" if loop else ""
        into = {a: text for (a, b), text in ways.items() if b == chosen}
        out = {b: text for (a, b), text in ways.items() if a == chosen}
        ways = {key: text for key, text in ways.items() if chosen not in key}
        for source, before in into.items():
            for target, after in out.items():
                text = f"{_whole(before)}{between}{_whole(after)}"
                other = ways.get((source, target))
                ways[source, target] = text if other is None else _either(other, text)
        if sum(map(len, ways.values())) > _MAX_CHARS:
            raise _Unread
    return _whole(ways[start, end]) if (start, end) in ways else None


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    return f"{one}|{other}"


def _whole(text: str) -> str:
    """An expression that others may stand beside."""
    return f"(?:{text})" if _is_choice(text) else text


def _one(text: str) -> str:
    """An expression that a star may stand behind."""
    is_set = text.startswith("[") and text.find("]") == len(text) - 1
    return text if is_set else f"(?:{text})"


def _is_choice(text: str) -> bool:
    depth, at = 0, 0
    while at < len(text):
        if text[at] == "[":
            at = text.index("]", at)
        depth += (text[at] == "(") - (text[at] == ")")
        if text[at] == "|" and depth == 0:
            return True
        at += 1
    return False


def _of_ranges(ranges: Ranges) -> str:
    """A set of these code points, the shorter of two ways to write it."""
    outside = _without(((0, _TOP),), ranges)
    plain = "".join(map(_shown, ranges))
    negative = "".join(map(_shown, outside))
    return f"[{plain}]" if len(plain) <= len(negative) else f"[^{negative}]"


def _shown(bounds: tuple[int, int]) -> str:
    low, high = (escaped(chr(each)) for each in bounds)
    return low if low == high else f"{low}-{high}"
