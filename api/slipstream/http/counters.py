"""What a front counts: answers by path and status, chunks of streamed ones, who is there.

Owns: these numbers. Does not know: connections, handlers.

Rules:
- A path that nobody serves counts as "other", one with a name in it as its pattern: what clients
  make up makes no new counters.
- All of it is to fit into a beat (`slipstream_ipc.process`), or nobody would hear of it any more.
  So there are few counters: beyond MOST_KINDS only what goes well gets one of its own path.
- A client that leaves before its answer has begun counts as status 499, as nginx has it.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream_ipc.telemetry.statistics import FrontCounters, FrontGauges, FrontNumbers

GONE = 499
MOST_KINDS = 40  # of answers
OTHER = "other"  # paths
_OK = 200


class HttpCounters:
    """One front's. `num_chunks` is counted up by whoever writes one."""

    def __init__(self, pattern_of: Callable[[str], str] = str) -> None:
        """`pattern_of`: what a request's path counts as."""
        self._pattern_of = pattern_of
        self._answers: dict[str, int] = {}
        self._num_open_streams = 0
        self.num_chunks = 0

    def answered(self, path: str, status: int) -> None:
        """A request has its answer, or the beginning of one."""
        kind = f"{status} {self._pattern_of(path)}"
        if kind not in self._answers and len(self._answers) >= MOST_KINDS and status != _OK:
            kind = f"{status} {OTHER}"
        self._answers[kind] = self._answers.get(kind, 0) + 1

    def begun(self, path: str) -> None:
        """An answer is being streamed."""
        self.answered(path, 200)
        self._num_open_streams += 1

    def ended(self) -> None:
        """One that was is complete, or its client has left."""
        self._num_open_streams -= 1

    def numbers(self, num_connections: int) -> FrontNumbers:
        """All of it."""
        return FrontNumbers(
            FrontGauges(num_connections, self._num_open_streams),
            FrontCounters(self._answers.copy(), self.num_chunks),
        )
