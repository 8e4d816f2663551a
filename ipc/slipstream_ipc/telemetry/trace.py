"""Records time spans of a process, cheaply enough for serving, and writes them to a part file.

`slipstream.tracing` combines the parts of all processes.

- Times are `time.monotonic_ns()`. CLOCK_MONOTONIC is one clock for all processes of a machine, so
  the tracks of different processes align without correction.
- A tracer that is off is None: call sites test `if tracer is not None`.
- Recording creates no Python object that stays: four numbers go into preallocated columns.
- The latest `capacity` spans are kept; the number of older ones, which were dropped, is recorded.
- A tracer belongs to one thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from enum import IntEnum, unique
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream_ipc.telemetry.spans import PART_SUFFIX

logger = logging.getLogger(__name__)

CAPACITY = 2**18  # spans; 25 bytes each
NO_STEP = -1  # the step of a span that belongs to none


@unique
class SpanKind(IntEnum):
    """The kinds of spans. Part files contain these numbers, so existing ones never change."""

    SCHEDULE = 1  # core: the step is scheduled
    LAUNCH = 2  # core: the step is handed to the device
    DEVICE = 3  # device: the step runs
    COLLECT = 4  # core: the step's tokens go into the histories
    PUBLISH = 5  # core: new tokens are sent to the worker
    DECODE = 16  # worker: a message of the core is decoded
    DETOKENISE = 17  # worker: tokens become text
    STOP_CHECK = 18  # worker: streams that end are found
    EMIT = 19  # worker: deltas are sent to the clients
    CLIENT = 32  # client: a batch of deltas is delivered


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """The spans recorded by one process. Columns are little-endian, oldest span first by its
    end.
    """

    process: str
    pid: int
    num_dropped: int  # older spans that were overwritten
    kinds: bytes  # u8, [n]
    begins_ns: bytes  # i64, [n]
    ends_ns: bytes  # i64, [n]
    steps: bytes  # i64, [n]; NO_STEP for a span without a step


class Tracer:
    """The latest spans of one thread. `close` writes them to `path`.

    The first span creates an empty file: if it stays empty, its process was killed.
    """

    def __init__(self, path: Path, process: str, capacity: int = CAPACITY) -> None:
        self._path = path
        self._process = process
        self._capacity = capacity
        self._num_added = 0
        self._is_closed = False
        self._kinds: npt.NDArray[np.uint8] = np.zeros(capacity, np.uint8)
        self._times: npt.NDArray[np.int64] = np.zeros((3, capacity), np.int64)
        # setting an item of a memoryview takes half the time of an array's
        self._kind = self._kinds.data
        self._begin, self._end, self._step = (row.data for row in self._times)

    @property
    def num_dropped(self) -> int:
        """Spans that later ones have overwritten."""
        return max(0, self._num_added - self._capacity)

    def add(self, kind: SpanKind, begin_ns: int, end_ns: int, step: int = NO_STEP) -> None:
        """Record a span of time.monotonic_ns()."""
        at = self._num_added % self._capacity
        if not self._num_added:
            with contextlib.suppress(OSError):  # `close` will log it
                self._path.touch()
        self._num_added += 1
        self._kind[at] = kind
        self._begin[at] = begin_ns
        self._end[at] = end_ns
        self._step[at] = step

    def part(self) -> TracePart:
        """The spans that are kept, in the order in which they were added."""
        num_kept = min(self._num_added, self._capacity)
        order = np.arange(self._num_added - num_kept, self._num_added) % self._capacity
        begins, ends, steps = self._times.astype("<i8")[:, order]
        return TracePart(
            process=self._process,
            pid=os.getpid(),
            num_dropped=self.num_dropped,
            kinds=self._kinds[order].tobytes(),
            begins_ns=begins.tobytes(),
            ends_ns=ends.tobytes(),
            steps=steps.tobytes(),
        )

    def close(self) -> None:
        """Write the part file, complete or not at all, if there are any spans. Idempotent.

        An OSError such as a full disk is only logged: tracing must not keep a process from exiting
        cleanly.
        """
        if self._is_closed or not self._num_added:
            return
        self._is_closed = True
        unfinished = self._path.with_name(f".{self._path.name}")
        try:
            unfinished.write_bytes(msgspec.msgpack.encode(self.part()))
            unfinished.replace(self._path)
        except OSError as error:
            logger.warning("cannot write the trace: %s", error)


def open_tracer(path: str | Path | None, process: str) -> Tracer | None:
    """A tracer for this process whose part belongs to the trace `path`; None without a path."""
    if path is None:
        return None
    # each tracer has a unique name: a process may have several, and so may its predecessors
    return Tracer(Path(f"{path}.{process}-{secrets.token_hex(4)}{PART_SUFFIX}"), process)
