"""What a CudaRecorder leaves behind, on a card that is none.

`Card` behaves as torch's allocators do around captures (CUDAGraph.cpp, CUDACachingAllocator.cpp of
torch 2.11): one that the driver broke off stays underway there until somebody ends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream_core.runner.graph_capture import CudaRecorder, record_all


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


class Card:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        self.is_valid = True
        self.underway: list[tuple[int, int]] = []
        self.ever_broken: set[tuple[int, int]] = set()  # of pinned memory, which nobody can end
        self.uses: dict[tuple[int, int], int] = {}
        for name, stand_in in {
            "graph_pool_handle": self.handle,
            "Stream": lambda device: Stream(),
            "current_stream": lambda: self.current,
            "set_stream": self.set,
            "stream": self.stream,
            "CUDAGraph": Graph,
            "graph": self.capture,
            "current_device": lambda: 0,
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def handle(self) -> tuple[int, int]:
        self.uses[0, len(self.uses) + 1] = 0
        return 0, len(self.uses)

    def set(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def capture(
        self, graph: Graph, *, pool: tuple[int, int], stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        if self.underway:  # the cache is emptied
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        if pool in self.ever_broken:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.current = stream
        self.underway.append(pool)
        self.uses[pool] += 1
        try:
            yield
        finally:
            if not self.is_valid:
                self.is_valid = True
                self.ever_broken.add(pool)
                raise RuntimeError("operation failed due to a previous error during capture")
            self.end(0, pool)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        self.uses[pool] -= 1


@pytest.mark.parametrize("breaks_off", [False, True])
def test_what_fails_costs_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, breaks_off: bool
) -> None:
    card = Card(monkeypatch)
    before = card.current
    num_runs = 0

    def fails() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 2:  # while it is recorded
            card.is_valid = not breaks_off
            raise RuntimeError("operation not permitted when stream is capturing")

    kept: list[Any] = []
    work = [(str(n), fails if n == 1 else lambda: None, kept.append) for n in range(4)]
    record_all(CudaRecorder(torch.device("cuda")), work, 4)
    assert len(kept) == 3
    assert card.underway == []
    assert card.current is before
    # a recording that broke off holds on to no pool; one that torch ended gives its own up itself
    assert sum(card.uses.values()) == 3 + (not breaks_off)
