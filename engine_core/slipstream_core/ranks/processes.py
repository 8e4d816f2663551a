"""The processes of a core's other ranks: starting them, watching them, ending them.

Those on this machine are started on the main thread, as they die with the thread that has started
them, and belong to the core's process group. A core that is a fork has imported all they need, and
forks them; ranks of another one import it while the core does, so torch is not imported here.
Those on other machines come by themselves (`remote_ranks`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slipstream_core.config import CoreConfig, RankConfig
from slipstream_core.ranks.bus import PlanBus
from slipstream_core.ranks.remote_ranks import RemoteRanks
from slipstream_core.ranks.watch import RankEnd, RankProcess, RankWatch, end_as_well
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.child import start_own_process
from slipstream_ipc.messages import OwnProcess
from slipstream_ipc.process import SILENT_S

logger = logging.getLogger(__name__)

_MODULE = "slipstream_core.ranks.follower"


def import_ranks() -> None:
    """Import what ranks need besides `import_runner`, so that they may be forked."""
    from slipstream_core.ranks.follower import import_libraries

    import_libraries()


class Ranks:
    """The ranks of this core besides itself, and the ways of plans to them.

    bus: to those on this machine. remote: those on others; None where there are none.
    """

    def __init__(self, config: CoreConfig, on_end: Callable[[RankEnd], None] = end_as_well) -> None:
        """Start those of this machine; they import what they need, and wait.

        on_end: called in another thread when one of them ends by itself. Raises OSError.
        """
        self._on_end = on_end
        self._has_ended = threading.Event()
        self.meeting_fd = os.memfd_create("slipstream-ranks", os.MFD_CLOEXEC)
        self.exchange_fd = os.memfd_create("slipstream-exchange", os.MFD_CLOEXEC)
        self.bus = PlanBus(config.num_local_ranks - 1)
        self.remote = None if config.nodes is None else RemoteRanks(config, self._note_end)
        self.are_ready = False
        self._started = [self._start(config, index) for index in range(1, config.num_local_ranks)]
        pids = [each.process.pid for each in self._started]
        self._stopped = StoppedProcesses(pids, config.hang_timeout_s)
        self._watch = RankWatch(self._started, self._note_end, self._kill_hung)

    def _start(self, config: CoreConfig, index: int) -> RankProcess:
        its = RankConfig(
            core=config,
            index=index,
            meeting_fd=self.meeting_fd,
            exchange_fd=self.exchange_fd,
            memory_fd=self.bus.memory_fd,
            doorbell=self.bus.doorbells[index - 1],
            room_fd=self.bus.room_fd,
        )
        status_fd, status_end = os.pipe2(os.O_CLOEXEC)
        descriptors = (
            *(its.meeting_fd, its.exchange_fd, its.memory_fd),
            *(its.doorbell, its.room_fd, status_end),
        )
        try:
            process = start_own_process(
                _MODULE,
                msgspec.json.encode(its),
                f"rank-{index}",
                descriptors=descriptors,
                status_fd=status_end,
            )
        finally:
            os.close(status_end)
        return RankProcess(index, process, status_fd)

    def put(self, plan: StepPlan, *, timeout_s: float) -> None:
        """Have all of them compute a plan. Raises what `PlanBus.put` and `RemoteRanks.put` do."""
        written = self.bus.put(plan, timeout_s=timeout_s)
        if self.remote is not None:
            self.remote.put(written, timeout_s=timeout_s)

    def states(self) -> dict[str, OwnProcess]:
        """The processes of this machine by name, for a `Status`."""
        return {
            f"rank-{each.rank}": OwnProcess(
                "ready" if self.are_ready else "starting", each.process.pid
            )
            for each in self._started
        }

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the end of one of them, and for what `on_end` does."""
        self._has_ended.wait(timeout_s)

    def kill_stopped(self) -> bool:
        """SIGKILL all ranks of this machine that a signal has stopped, however long ago; return
        True if there are any.
        """
        return self._kill(self._stopped.current())

    def _kill_hung(self, now: float) -> None:
        """SIGKILL the ranks of this machine that a signal has stopped for `hang_timeout_s`, which
        ends the core as well.
        """
        self._kill(self._stopped.overdue(now))

    def _kill(self, pids: Sequence[int]) -> bool:
        for each in self._started:
            if each.process.pid in pids:
                logger.error("rank %d (process %d) is stopped", each.rank, each.process.pid)
                each.process.kill()
        return bool(pids)

    def close(self) -> None:
        """End them; what they compute is lost. Idempotent."""
        self._watch.close()
        if self.remote is not None:
            self.remote.close()
        for each in self._started:
            each.process.reap()
            os.close(each.status_fd)
        if self.meeting_fd >= 0:
            os.close(self.meeting_fd)
            os.close(self.exchange_fd)
            self.meeting_fd = -1
        self._started = []
        self.bus.close()

    def _note_end(self, end: RankEnd) -> None:
        self._on_end(end)
        self._has_ended.set()


class StoppedProcesses:
    """The processes that a signal has stopped, and those stopped for too long while this one
    runs.

    One that goes on for a moment between two looks counts as stopped throughout.
    """

    def __init__(self, pids: Sequence[int], timeout_s: float) -> None:
        """pids: of processes of ours. timeout_s: for which one may be stopped."""
        self._pids = pids
        self._timeout_s = timeout_s
        self._since: dict[int, float] = {}  # pid: when it was first found stopped
        self._asked_at = 0.0

    def current(self) -> list[int]:
        """The pids of those that are stopped."""
        return [pid for pid in self._pids if _is_stopped(pid)]

    def overdue(self, now: float) -> list[int]:
        """The pids of those that have been stopped for `timeout_s`. Call it every
        BEAT_S.
        """
        if now > self._asked_at + SILENT_S:  # this process was stopped, perhaps with them
            self._since = {}
        self._asked_at = now
        self._since = {pid: self._since.get(pid, now) for pid in self.current()}
        return [pid for pid, since in self._since.items() if now >= since + self._timeout_s]


def _is_stopped(pid: int) -> bool:
    """True if this process of ours, which is not reaped yet, is stopped."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0] == b"T"  # as proc_pid_stat(5) has it
