"""Feeds a scanner of arguments with text in parts, and cuts texts at random places."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from slipstream_worker.formats.scanners.scanner import Scanner, ScanStatus

cuts = st.lists(st.integers(0), max_size=6)


class Scanned(NamedTuple):
    """The JSON that a scanner gave, what it did not take, and what it said last."""

    json: str
    rest: str
    status: ScanStatus
    has_begun: bool


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    """`text` in parts, cut at these places modulo its length."""
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def scan(scanner: Scanner, parts: Iterable[str], ids: frozenset[str] = frozenset()) -> Scanned:
    """Feed all parts; those in `ids` as delimiters that are one token."""
    given: list[str] = []
    rest = ""
    num_begun = 0
    status = ScanStatus.MORE
    for part in parts:
        if status in (ScanStatus.DONE, ScanStatus.FAILED):
            rest += part
            continue
        if part in ids:
            taken, status = scanner.feed_delimiter(part)
            num_begun += status is ScanStatus.BEGIN
            rest += "" if taken else part
            given.append(scanner.take())
            if status is ScanStatus.BEGIN:
                _, status = scanner.feed("", 0)
            continue
        at, status = scanner.feed(part, 0)
        while status is ScanStatus.BEGIN:
            num_begun += 1
            given.append(scanner.take())
            at, status = scanner.feed(part, at)
        given.append(scanner.take())
        assert scanner.num_held >= 0
        assert at == len(part) or status in (ScanStatus.DONE, ScanStatus.FAILED)
        rest += part[at:]
    assert num_begun <= 1
    return Scanned("".join(given), rest, status, bool(num_begun))
