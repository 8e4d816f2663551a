"""Compiles the elements of a call format to a graph.

A node is a place between elements. It says which literals may come next, where each leads, and
which scanner reads what comes otherwise. Blanks may stand at every node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from slipstream_ipc.formats.answer_format import (
    Alternative,
    Blank,
    CallFormat,
    CallId,
    CallIndex,
    Delimiter,
    Element,
    JsonCall,
    JsonObject,
    KeywordArguments,
    LiteralText,
    Name,
    NamedCallId,
    NestedElements,
    Repeat,
    TaggedParameters,
)
from slipstream_worker.formats.literals import Literals, split_literals
from slipstream_worker.formats.scanners.json_call import JsonCallScanner, JsonObjectScanner
from slipstream_worker.formats.scanners.keyword_arguments import KeywordArgumentsScanner
from slipstream_worker.formats.scanners.nested_elements import NestedElementsScanner
from slipstream_worker.formats.scanners.scanner import ScanContext, Scanner, WordScanner
from slipstream_worker.formats.scanners.tagged_parameters import TaggedParametersScanner

END = 0  # the node behind a section's last element

CallElement = JsonObject | JsonCall | TaggedParameters | NestedElements | KeywordArguments
ScannedElement = Name | CallId | NamedCallId | CallIndex | CallElement


class Branch(NamedTuple):
    """The branch that a literal leads to."""

    target: int  # node
    closes: bool = False  # it stands behind a call, which has ended with or before it
    is_empty_call: bool = False  # it stands where the arguments would be: there are none


class Scan(NamedTuple):
    """An element that a scanner reads."""

    element: ScannedElement
    target: int  # node behind it
    first_chars: frozenset[str] | None  # None: any
    recovery: int  # node from which the end of a call that failed is looked for


class Node(NamedTuple):
    """A state of the graph, with the literals and scans that may follow."""

    texts: Literals[Branch]
    ids: Mapping[int, Branch]
    scans: tuple[Scan, ...]
    may_end: bool  # the section may be over here


class First(NamedTuple):
    """The literals and scans that may follow a node, before it is known which literals are
    tokens.
    """

    literals: dict[Delimiter | LiteralText, Branch]
    scans: tuple[Scan, ...]
    may_end: bool


def is_call(element: Element) -> bool:
    """True if the element ends with the arguments of a call."""
    return isinstance(element, CallElement)


def make_scanner(element: ScannedElement, context: ScanContext) -> Scanner:
    """A scanner at the element's beginning."""
    match element:
        case Name() | CallId() | NamedCallId() | CallIndex():
            return WordScanner(element)
        case JsonObject():
            return JsonObjectScanner()
        case JsonCall():
            return JsonCallScanner(element)
        case TaggedParameters():
            return TaggedParametersScanner(element, context)
        case NestedElements():
            return NestedElementsScanner(element, context)
        case KeywordArguments():
            return KeywordArgumentsScanner(element, context)


def _first_chars(element: ScannedElement) -> frozenset[str] | None:
    match element:
        case JsonObject() | JsonCall():
            return frozenset("{")
        case _:
            return None


class CallGraph:
    """The graph of a call format's sections.

    openings[i]: the node before section i. closers[node]: the delimiters by which a call is seen to
    be over that failed before this node.
    """

    def __init__(self, call_format: CallFormat, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules: list[Callable[[], First]] = [lambda: First({}, (), True)]
        self.openings = [self._sequence(part.elements, END, False) for part in call_format.sections]
        self.firsts = [rule() for rule in self._rules]
        self.nodes = [self._node(first) for first in self.firsts]
        self.scans = tuple({scan: None for node in self.nodes for scan in node.scans})
        self.closers = [self._closers(node) for node in range(len(self.nodes))]

    def _node(self, first: First) -> Node:
        texts, ids = split_literals(first.literals, self._token_ids)
        # an element that is known by its first character goes before one that takes any
        scans = tuple(sorted(first.scans, key=lambda scan: scan.first_chars is None))
        return Node(Literals(texts), ids, scans, first.may_end)

    def _closers(self, node: int) -> dict[Delimiter | LiteralText, Branch]:
        """Delimiters that may follow from `node` on before anything is scanned: those by which a
        call that failed is seen to be over.
        """
        found: dict[Delimiter | LiteralText, Branch] = {}
        seen = {node}
        nodes = [node]
        while nodes:
            for literal, branch in self.firsts[nodes.pop()].literals.items():
                if isinstance(literal, Delimiter):
                    found.setdefault(literal, branch)
                if branch.target not in seen and (
                    isinstance(literal, LiteralText) or branch.closes
                ):
                    seen.add(branch.target)
                    nodes.append(branch.target)
        return found

    def _add(self, first: Callable[[], First]) -> int:
        self._rules.append(_cached(first))
        return len(self._rules) - 1

    def _sequence(self, elements: tuple[Element, ...], target: int, behind_call: bool) -> int:
        """The node before `elements`, behind which is `target`."""
        behind = [behind_call]
        for element in elements:
            behind.append(behind[-1] or _holds_call(element))
        for element, is_behind in zip(reversed(elements), reversed(behind[:-1]), strict=True):
            target = self._element(element, target, is_behind)
        return target

    def _element(self, element: Element, target: int, behind_call: bool) -> int:
        match element:
            case Blank():
                return target
            case Delimiter() | LiteralText():
                first = First({element: Branch(target, behind_call)}, (), False)
                return self._add(lambda: first)
            case Alternative(branches):
                nodes = [self._sequence(branch, target, behind_call) for branch in branches]
                return self._add(lambda: self._union(nodes))
            case Repeat(body, separator):
                # the node behind the body is needed by the body, and leads into the body again
                behind = self._add(lambda: self._union([again, target]))
                before = self._sequence(body, behind, False)
                again = self._sequence(separator, before, False)
                return before
            case _:
                recovery = target
                if isinstance(element, TaggedParameters) and isinstance(element.end, Delimiter):
                    end = First({element.end: Branch(target, closes=True)}, (), False)
                    recovery = self._add(lambda: end)
                scan = Scan(element, target, _first_chars(element), recovery)
                if isinstance(element, JsonObject) and element.may_be_empty:
                    return self._add(lambda: self._scan_or_nothing(scan))
                first = First({}, (scan,), False)
                return self._add(lambda: first)

    def _union(self, nodes: list[int]) -> First:
        literals: dict[Delimiter | LiteralText, Branch] = {}
        scans: tuple[Scan, ...] = ()
        may_end = False
        for node in nodes:
            first = self._rules[node]()
            for literal, branch in first.literals.items():
                if literals.setdefault(literal, branch) != branch:
                    raise ValueError(f"alternatives begin alike: with {literal.literal!r}")
            scans += tuple(scan for scan in first.scans if scan not in scans)
            may_end |= first.may_end
        return First(literals, scans, may_end)

    def _scan_or_nothing(self, scan: Scan) -> First:
        behind = self._rules[scan.target]()
        literals = {
            literal: branch._replace(is_empty_call=True)
            for literal, branch in behind.literals.items()
            if branch.closes
        }
        return First(literals, (scan,), False)


def _holds_call(element: Element) -> bool:
    match element:
        case Repeat(body):
            return any(map(_holds_call, body))
        case Alternative(branches):
            return any(_holds_call(part) for branch in branches for part in branch)
        case _:
            return is_call(element)


def _cached(first: Callable[[], First]) -> Callable[[], First]:
    known: list[First] = []

    def get() -> First:
        if not known:
            known.append(first())
        return known[0]

    return get
