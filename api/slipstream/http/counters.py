"""Counters of a front: answers by path and status, chunks of streams, open streams.

- Unknown paths count as "other" and paths with a parameter as their pattern, so that clients cannot
  create counters.
- The numbers have to fit into a beat (`slipstream_ipc.process`), so there are at most `MOST_KINDS`
  pairs of path and status; beyond that only answers with status 200 get a new pair.
- A client that disconnects before its answer has begun counts as status 499, as in nginx.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from slipstream.client.placing.router_counters import RouterCounters, Why
from slipstream_ipc.telemetry.statistics import FrontCounters, FrontGauges, FrontNumbers

CLIENT_CLOSED = 499
MOST_KINDS = 22  # pairs of path and status
OTHER = "other"  # all unknown paths
_OK = 200


class HttpCounters:
    """The counters of one front. The writer of a chunk increments `num_chunks`."""

    def __init__(self, pattern_of: Callable[[str], str] = str) -> None:
        """pattern_of: maps a request's path to the label it is counted under."""
        self._pattern_of = pattern_of
        self._answers: dict[str, int] = {}
        self._num_open_streams = 0
        self.num_chunks = 0

    def answered(self, path: str, status: int) -> None:
        """A request got its answer, or the head of a stream."""
        kind = f"{status} {self._pattern_of(path)}"
        if kind not in self._answers and len(self._answers) >= MOST_KINDS and status != _OK:
            kind = f"{status} {OTHER}"
        self._answers[kind] = self._answers.get(kind, 0) + 1

    def begun(self, path: str) -> None:
        """A stream has begun."""
        self.answered(path, 200)
        self._num_open_streams += 1

    def ended(self) -> None:
        """A stream is complete, or its client has disconnected."""
        self._num_open_streams -= 1

    def numbers(self, num_connections: int) -> FrontNumbers:
        """The current values."""
        return FrontNumbers(
            FrontGauges(num_connections, self._num_open_streams),
            FrontCounters(self._answers.copy(), self.num_chunks),
        )


def with_router(numbers: FrontNumbers, router: RouterCounters | None) -> FrontNumbers:
    """A front's numbers with those of its router, if it is one over several replicas."""
    if router is None:
        return numbers
    counters = replace(
        numbers.counters,
        placed=_by_kind(router.placed),
        moved=_by_kind(router.moved),
        choose_s=router.choose_s,
    )
    return replace(numbers, counters=counters)


def _by_kind(counts: Mapping[tuple[str, Why], int]) -> dict[str, int]:
    return {f"{why} {model}".rstrip(): num for (model, why), num in counts.items()}
