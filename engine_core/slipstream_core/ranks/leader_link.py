"""The end of a rank on another machine: comes to the core, and takes its plans.

- Until it has its `Assign` it waits, without a bound, for a core that listens: each connection that
  ends is followed by another one, and the `Join` is said again.
- From then on a thread waits for the end of the connection, and ends the process with it, whatever
  the rank is doing: its next life joins the next core. That thread also writes the beats for which
  the supervisor of this machine waits.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from slipstream_core.config import NodesConfig
from slipstream_core.ranks.bus import NUM_SLOTS
from slipstream_core.ranks.rank_messages import (
    PLAN_NUMBER,
    Assign,
    FromRank,
    Join,
    Joined,
    RankFailed,
    Refuse,
    Released,
    decode_to_rank,
    encode,
)
from slipstream_core.step.buffer import PlanBuffer, PlanBytesError
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.messages import Status
from slipstream_ipc.process import BEAT_S, Beats, report
from slipstream_ipc.telemetry.recent_warnings import RecentWarnings
from slipstream_ipc.transport.curve import Access, keys_for, load_rank_keys
from slipstream_ipc.transport.sockets import DisconnectWatch, beat_below, new_dealer

logger = logging.getLogger(__name__)

_MAX_PLAN_BYTES = 1 << 30
_LEAST_SLOT_BYTES = 1 << 16
_ROUTE_BYTES = 16
_BEAT_MS = int(BEAT_S * 1e3)
_FAREWELL_MS = 1000  # for last words to leave


class RankRefusedError(RuntimeError):
    """The core does not let this rank in; the message says why."""


class _Slot:
    """Memory for one plan, which takes pages as they are written."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size))
        self.plan = PlanBuffer(self.memory)


class LeaderLink:
    """The connection of one rank to its core. Implements Plans."""

    def __init__(self, nodes: NodesConfig) -> None:
        """Raises BadRequest, PermissionError, OSError."""
        self._nodes = nodes
        self._access = Access(insecure=nodes.insecure)
        if nodes.keys is not None:
            keys = keys_for(load_rank_keys(Path(nodes.keys)), nodes.address)
            self._access = Access(keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._is_failing = threading.Event()
        self._slots = [_Slot(_LEAST_SLOT_BYTES) for _ in range(NUM_SLOTS)]
        self._beating: threading.Thread | None = None
        self._num_taken = 0
        self._num_released = 0
        self._open()

    def join(self, join: Join, on_turn: Callable[[], object]) -> Assign:
        """Wait until all ranks have come to the core. on_turn: called at least every BEAT_S.

        Raises RankRefusedError.
        """
        self._say(join)
        warnings = RecentWarnings(logger)
        while True:
            on_turn()
            self._poller.poll(_BEAT_MS)
            trouble = ""
            if self.any_waiting:
                body = self._received()
                if isinstance(body, Assign):
                    self._say(Joined())
                    return body
                trouble = f"the core refuses it for now: {body.why}"
                self._watch.socket.poll(_BEAT_MS)  # a pause, that the connection's end cuts short
                self._say(join)
            seen = self._watch.look()
            if seen.refused:
                raise RankRefusedError(f"{self._nodes.address}: {seen.refused}")
            trouble = trouble or seen.trouble
            if trouble:
                warnings.warn("%s: %s", self._nodes.address, trouble)
            if seen.is_broken:  # a core that ended before all ranks were there
                self._close()
                self._open()
                self._say(join)

    def watch(self) -> None:
        """End this process with the connection from now on, and write beats."""
        self._beating = threading.Thread(
            target=self._end_with_connection, name="core-link", daemon=True
        )
        self._beating.start()

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the end of the connection, which ends this process."""
        assert self._beating is not None
        self._beating.join(timeout_s)

    def fail(self, failed: RankFailed) -> None:
        """Tell the core why this rank ends, and close the connection."""
        self._is_failing.set()
        if self._beating is not None:
            self._beating.join()  # the monitor is this thread's then
        self._say(failed)
        self._close(_FAREWELL_MS)
        self._context.term()

    def close(self) -> None:
        """Close the connection without notice."""
        self._close()
        self._context.term()

    # ---- plans -----------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when something has come since `any_waiting` was False."""
        return int(self._socket.fileno())

    @property
    def any_waiting(self) -> bool:
        """True if `take` would return at once."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def take(self) -> StepPlan:
        """Wait for the next plan, whose arrays are good until it is released.

        Raises PlanBytesError.
        """
        parts = self._socket.recv_multipart(copy=False)
        if len(parts) != 2 or len(parts[0]) != PLAN_NUMBER.size:
            raise PlanBytesError("not a plan")
        number: int = PLAN_NUMBER.unpack(parts[0].bytes)[0]
        if number != self._num_taken:
            raise PlanBytesError(f"plan {number} came where plan {self._num_taken} was due")
        at, size = number % NUM_SLOTS, len(parts[1])
        if size > self._slots[at].memory.nbytes:
            self._slots[at] = _Slot(2 * size)
        self._slots[at].memory[:size] = parts[1].buffer
        self._num_taken += 1
        return self._slots[at].plan.view()

    def release(self) -> None:
        """Say that the oldest plan taken is computed."""
        self._num_released += 1
        self._say(Released(self._num_released))

    # ---- the connection --------------------------------------------------------------------

    def _open(self) -> None:
        self._socket = new_dealer(
            self._context,
            self._nodes.address,
            secrets.token_bytes(_ROUTE_BYTES),
            self._access,
            max_message_bytes=_MAX_PLAN_BYTES,
            connects=False,
        )
        beat_below(self._socket, self._nodes.silent_s)
        self._watch = DisconnectWatch(self._socket, self._poller)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.connect(self._nodes.address)

    def _say(self, body: FromRank) -> None:
        with contextlib.suppress(zmq.Again):  # the connection is closed for good
            self._socket.send(encode(body), zmq.NOBLOCK)

    def _close(self, linger_ms: int = 0) -> None:
        self._watch.close()
        self._poller.unregister(self._socket)
        self._socket.close(linger=linger_ms)

    def _received(self) -> Assign | Refuse:
        """Receive the core's answer. A refusal that is returned is temporary. Raises
        RankRefusedError.
        """
        try:
            body: Assign | Refuse = decode_to_rank(self._socket.recv())
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            why = f"{self._nodes.address}: the core is of another version ({error})"
            raise RankRefusedError(why) from error
        if isinstance(body, Refuse) and body.is_final:
            raise RankRefusedError(f"the core at {self._nodes.address} refuses it: {body.why}")
        return body

    def _end_with_connection(self) -> None:
        beats, events = Beats(), self._watch.socket
        while not self._is_failing.is_set():
            beats.beat(time.monotonic())
            if events.poll(_BEAT_MS) and self._watch.look().is_broken:
                if self._is_failing.is_set():
                    return
                words = f"the connection to the core at {self._nodes.address} is lost"
                report(Status(last_words=words))
                logger.warning("%s", words)
                os._exit(1)
