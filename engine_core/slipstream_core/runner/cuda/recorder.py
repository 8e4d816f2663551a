"""Recording work once and replaying it: CUDA graphs, and what stands in for them on a CPU.

Owns: how a function becomes something to replay (`Recorder`), which batch sizes are recorded, and
the recording of many with a bar and a deadline. Does not know: what is recorded.

Rules:
- A recorded function takes nothing and returns nothing: it reads and writes tensors that stay where
  they are. What it takes from the host while it is recorded is the same for ever.
- Whatever it allocates lies in a pool that all recordings share, largest first, so that the
  smaller fit into the holes: nothing may look there once the function is over.
- A recording that fails is a log line, and the caller computes without. Only a device that is
  beyond use raises.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # torch's own annotations leave constructors out

CAPTURE_S = 120.0  # what recording may take while a core starts

Work = Callable[[], None]


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, work: Work) -> Work:
        """Run `work`, record it, and give back what replays it."""

    def check(self) -> None:
        """Raise if the device is beyond use, after a recording that failed."""


class CudaRecorder:
    """By CUDA graphs. Made and used on the enqueuing thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # one stream for all: blocks of the pool are reused within a stream only
        self._stream = _cuda.Stream(device)
        self._broken_off: list[Any] = []  # torch's allocators go on asking these

    def record(self, work: Work) -> Work:
        """Run once on the recording stream, as libraries and kernels set themselves up then."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            work()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what another thread does meanwhile is none of this recording's business
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except BaseException:
            self._end_capture_of(graph)
            raise
        finally:
            torch.cuda.set_stream(before)  # torch leaves its own in place where a capture fails
        replay: Work = graph.replay
        return replay

    def _end_capture_of(self, graph: Any) -> None:
        """Tell the allocator that a capture is over which the driver broke off.

        torch does not, and takes it to be underway for ever: no cached memory is given back then
        where some is short, and emptying the cache, which every capture begins with, raises. What
        comes gets a pool of another name: pinned memory's of this one cannot be closed from here.
        """
        allocator: Any = torch._C
        # it is over where what raised was no device's error: then this raises
        with contextlib.suppress(RuntimeError, AttributeError):
            device = torch.cuda.current_device()
            allocator._cuda_endAllocateToPool(device, self._pool)
            self._broken_off.append(graph)
            broken, self._pool = self._pool, torch.cuda.graph_pool_handle()
            allocator._cuda_releasePool(device, broken)

    def check(self) -> None:
        """Errors that a device does not recover from come again here."""
        torch.cuda.synchronize(self._device)


class HostRecorder:
    """For CPUs, where nothing is gained by it: tests run the recorded steps' logic so."""

    def record(self, work: Work) -> Work:
        """`work` itself, after it has run once."""
        work()
        return work

    def check(self) -> None:
        """A CPU goes on."""


def batch_sizes(max_num_seqs: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """The numbers of rows to record, ascending.

    `wanted` says them itself; larger ones than `max_num_seqs` are left out. By default 1, 2, 4 and
    multiples of 8, of 16 above 256 and of 64 above 512 (a padding row costs the less the more rows
    there are), and `max_num_seqs` itself.
    """
    if wanted:
        return tuple(sorted({size for size in wanted if 1 <= size <= max_num_seqs}))
    sizes = {1, 2, 4, max_num_seqs}
    sizes.update(range(8, 257, 8), range(272, 513, 16), range(576, max_num_seqs + 1, 64))
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def record_all(
    recorder: Recorder,
    work: Iterable[tuple[str, Work, Callable[[Work], None]]],
    total: int,
    *,
    within_s: float = CAPTURE_S,
) -> None:
    """Record up to `total` pieces of work, each with its name and what takes its replay.

    Stops at the deadline, with a line in the log that says where. What fails is named there and
    passed over; `work` is asked for the next piece afterwards, so that it may leave out what would
    fail likewise. Raises where the device is beyond use.
    """
    started = time.monotonic()
    num = 0
    with tqdm(total=total, desc="recording graphs", file=sys.stderr, disable=None) as bar:
        for name, one, keep in work:
            if time.monotonic() - started > within_s:
                logger.warning(
                    "recording graphs stopped after %.0f s, before %s: %d of %d are there",
                    within_s,
                    name,
                    num,
                    total,
                )
                return
            try:
                keep(recorder.record(one))
                num += 1
            except Exception:
                logger.warning("%s could not be recorded and runs eagerly", name, exc_info=True)
                recorder.check()
            bar.update()
    logger.info("recorded %d graphs in %.1f s", num, time.monotonic() - started)
