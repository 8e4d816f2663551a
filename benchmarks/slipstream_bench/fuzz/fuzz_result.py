"""The result of a fuzz run, and the sum of the parts of a run. Pure."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

_MOST_SHOWN = 10


class FuzzResult(Struct, frozen=True, kw_only=True):
    """The result of a run.

    wanted: total number of messages, if this is the state of a run in parts. admitted, refused:
    streams that attackers were given, and their messages that were refused, as far as they read the
    answers. identical, total: the honest client's streams. errors: internal errors that worker and
    core survived, with tracebacks. held: what worker and core still hold at the end. commits: of
    the code, one per part where they differ.
    """

    seed: int
    messages: int
    by_kind: dict[str, int]
    seconds: float
    admitted: int
    refused: int
    identical: int
    total: int
    differences: tuple[str, ...]
    num_errors: int
    errors: tuple[str, ...]
    longest_turn_ms: float
    rss_start: int
    rss_end: int
    held: dict[str, int]
    wanted: int = 0
    num_parts: int = 1
    commits: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether the run had no effect on the stack and the honest client."""
        return (
            0 < self.total == self.identical and not self.num_errors and not any(self.held.values())
        )

    def and_then(self, part: FuzzResult) -> FuzzResult:
        """This result combined with that of the following part."""
        return FuzzResult(
            seed=self.seed,
            messages=self.messages + part.messages,
            by_kind=_sum(self.by_kind, part.by_kind),
            seconds=self.seconds + part.seconds,
            admitted=self.admitted + part.admitted,
            refused=self.refused + part.refused,
            identical=self.identical + part.identical,
            total=self.total + part.total,
            differences=(*self.differences, *part.differences)[:_MOST_SHOWN],
            num_errors=self.num_errors + part.num_errors,
            errors=(*self.errors, *part.errors)[:_MOST_SHOWN],
            longest_turn_ms=max(self.longest_turn_ms, part.longest_turn_ms),
            rss_start=self.rss_start or part.rss_start,
            rss_end=part.rss_end,
            held=_sum(self.held, part.held),
            wanted=self.wanted,
            num_parts=self.num_parts + 1,
            commits=tuple(dict.fromkeys((*self.commits, *part.commits))),
        )


def nothing_yet(wanted: int, seed: int) -> FuzzResult:
    """The result of a run in parts before its first part."""
    return FuzzResult(
        seed=seed,
        messages=0,
        by_kind={},
        seconds=0.0,
        admitted=0,
        refused=0,
        identical=0,
        total=0,
        differences=(),
        num_errors=0,
        errors=(),
        longest_turn_ms=0.0,
        rss_start=0,
        rss_end=0,
        held={},
        wanted=wanted,
        num_parts=0,
    )


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    names = dict.fromkeys([*one, *other])
    total = Counter(one)
    total.update(other)
    return {name: total[name] for name in names}
