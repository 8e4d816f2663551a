"""Records work once and replays it: CUDA graphs, and a stand-in on a CPU.

- A recorded function takes nothing and returns nothing: it reads and writes tensors that stay in
  place. Host values that it reads while being recorded are fixed from then on.
- Its allocations lie in a pool that all recordings share. The largest is recorded first, so that
  smaller ones reuse its memory; a function's temporaries must not be read once it has ended.
- A recording that fails is logged, and its step runs eagerly. Only an unusable device raises.
- Ranks record the same pieces: before each they agree whether time is left, and after it whether
  all have it. One that runs out of memory raises, as others may wait for it in a sum.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # torch's own annotations leave constructors out

CAPTURE_S = 120.0  # time limit of recording while a core starts

Work = Callable[[], None]
Agree = Callable[[bool], bool]  # whether all ranks say so


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, work: Work) -> Work:
        """Run `work`, record it, and return a function that replays it."""

    def check(self) -> None:
        """Raise if the device is unusable after a failed recording."""


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """The steps that a runner records."""

    sizes: Sequence[int] = ()  # rows of decode steps, ascending; without any nothing is recorded
    buckets: Sequence[int] = ()  # tokens of other steps, ascending
    recorder: Recorder | None = None  # replaces a card's in tests


NO_CAPTURE = CaptureConfig()


class CudaRecorder:
    """Records CUDA graphs. Made and used on the enqueuing thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # one stream for all recordings, as the pool's blocks are reused within a stream only
        self._stream = _cuda.Stream(device)
        self._aborted_captures: list[Any] = []  # kept alive: torch's allocators still refer to them

    def record(self, work: Work) -> Work:
        """Run `work` once on the recording stream to initialise libraries, then capture it."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            work()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: calls of other threads must not invalidate this capture
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            self._end_capture_of(graph)
            raise
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves torch's capture stream current
        replay: Work = graph.replay
        return replay

    def _end_capture_of(self, graph: Any) -> None:
        """Tell the allocator that a capture aborted by the driver has ended.

        torch does not, and treats it as still underway: cached memory is then not released when
        memory is short, and emptying the cache, with which every capture begins, raises. Later
        captures get a new pool, as this one's pinned-memory pool cannot be closed from here.
        """
        allocator: Any = torch._C
        # raises if the capture has ended, which it has after errors other than the device's
        with contextlib.suppress(RuntimeError, AttributeError):
            device = torch.cuda.current_device()
            allocator._cuda_endAllocateToPool(device, self._pool)
            self._aborted_captures.append(graph)
            broken, self._pool = self._pool, torch.cuda.graph_pool_handle()
            allocator._cuda_releasePool(device, broken)

    def check(self) -> None:
        """Synchronise, which raises again the errors that a device does not recover from."""
        torch.cuda.synchronize(self._device)


def record_all(
    recorder: Recorder,
    work: Iterable[tuple[str, Work, Callable[[Work], None]]],
    total: int,
    *,
    within_s: float = CAPTURE_S,
    failed: Callable[[Exception], None] = lambda _: None,
    agree: Agree | None = None,
) -> None:
    """Record up to `total` pieces of work, each with its name and a callback for its replay.

    Stops at the deadline with a log line. A piece that fails is logged and skipped, and `failed` is
    told why; `work` yields the next one only afterwards, so it can leave out pieces that would fail
    for the same reason. agree: for ranks, which call it alike. Raises if the device is unusable;
    OutOfMemoryError of a rank.
    """
    started = time.monotonic()
    num = 0
    all_say: Agree = agree or bool
    with tqdm(total=total, desc="recording graphs", file=sys.stderr, disable=None) as bar:
        for name, one, keep in work:
            if not all_say(time.monotonic() - started <= within_s):
                logger.warning(
                    "recording CUDA graphs stopped after %.0f s, before %s: %d of %d are recorded",
                    within_s,
                    name,
                    num,
                    total,
                )
                return
            replay, why = None, Exception("another rank could not record it")
            try:
                replay = recorder.record(one)
            except Exception as error:
                if agree is not None and isinstance(error, torch.OutOfMemoryError):
                    raise
                why = error
                logger.warning("%s could not be recorded and runs eagerly", name, exc_info=True)
                recorder.check()
            if all_say(replay is not None) and replay is not None:
                keep(replay)
                num += 1
            else:
                failed(why)
            bar.update()
    logger.info("recorded %d CUDA graphs in %.1f s", num, time.monotonic() - started)
