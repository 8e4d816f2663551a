"""Injects the faults of a schedule into a stack, or a fleet of them, and its clients until all
requests have ended.

- Before each round the clients begin requests that were held back for it, the last ones after the
  last round: so no request is needed to outlast the rounds.
- The first round begins when all clients read; every later one when all processes hit by the last
  round are replaced (as the supervisor reports) and the round's pause has passed.
- A stopped server process is never continued: the supervisor has to notice. A stopped client is
  continued after a while, which makes it a reader that does not read, on the wire as well.
- Targets are chosen from the processes that the stack reports at that moment; if there is none, the
  fault misses.
- A file limit and a full disk are undone after a while. A process may end because of them: that is
  no failure as long as it is replaced and no stream shows a difference.
- A tokenizer process belongs to its worker: it has recovered when there is a new one.
- A replica that was killed or drained has recovered when it is ready again. What was missing of it
  then has, too. Of one that was stopped, processes may end once it goes on: they were silent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path

from msgspec import Struct

from slipstream.stack.plan.front_plan import is_front
from slipstream.stack.stack import Stack
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessRestarted,
    ProcessStarted,
    SpareReady,
    StackFailed,
)
from slipstream_bench.common import process_census
from slipstream_ipc.process import role_of
from slipstream_lab.common.served_fleet import ServedFleet, names_within, own_name, replica_of
from slipstream_verify.chaos.clients import ChaosClient
from slipstream_verify.chaos.schedule import Action, PlannedFault, Round, Target

_SIZE = "64m"
_BLOCK = bytes(2**16)
_SIGNALS: dict[Action, signal.Signals] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "drain": signal.SIGTERM,
}
_STATEFUL: set[Target] = {"worker", "core"}  # each can rebuild its state from the other
_POLL_S = 0.05  # interval of checking the clients; events of the stack wake at once
_RECOVERY_S = 120.0  # after this, recovery has failed
_CLIENT_STOP_S = 1.0, 8.0  # duration of a client's stop
_TOGETHER_S = 1.0  # after its return a process has rebuilt its state from the other
_SHORTAGE_S = 1.0, 4.0  # duration of a file limit or a full disk
_SILENCE_S = 4.0, 8.0  # duration of a replica's stop, longer than clients wait for it
_TOKENIZER_PROCESS = "slipstream_worker.tokenizer.process"  # in the process's command line
_RANK = "slipstream_core.ranks.follower"  # likewise


class Volume:
    """Runtime folder and cache of a stack, on a disk of 64 MiB."""

    def __init__(self, folder: Path) -> None:
        self.runtime_dir = folder / "run"
        self.cache = folder / "cache"
        self.runtime_dir.mkdir(mode=0o700)
        self.cache.mkdir(mode=0o700)
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fill the disk completely."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_BLOCK)

    def empty(self) -> None:
        """Free the space. Idempotent."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Volume | str]:
    """Mount such a disk at `folder`, with XDG_CACHE_HOME set to its cache; yields the reason
    instead if mounting is not permitted.
    """
    folder.mkdir()
    options = f"size={_SIZE},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "slipstream-chaos", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        refusal = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        refusal = str(error)
    if refusal:
        yield refusal
        return
    before = os.environ.get("XDG_CACHE_HOME")
    try:
        volume = Volume(folder)
        os.environ["XDG_CACHE_HOME"] = str(volume.cache)
        yield volume
    finally:
        if before is None:
            os.environ.pop("XDG_CACHE_HOME", None)
        else:
            os.environ["XDG_CACHE_HOME"] = before
        command = ["umount", "--lazy", str(folder)]
        subprocess.run(command, check=False)


class InjectedFault(Struct):
    """An injected fault that hit. how: the process's end, as reported by the supervisor;
    recovered_s: when its process was replaced; name: the process's. Times are time.monotonic.
    """

    round: int
    fault: PlannedFault
    pid: int
    at_s: float
    had_spare: bool = False
    how: str | None = None
    recovered_s: float | None = None
    name: str = ""


class ChaosFailed(Exception):  # noqa: N818  (says what is the case, as its text does)
    """The run cannot continue: the stack has failed or does not recover, or a client has died."""


class FaultInjector:
    """Runs the rounds of `schedule` for as long as requests run."""

    def __init__(
        self,
        stack: Stack | ServedFleet,
        schedule: Sequence[Round],
        spares: set[str],
        volume: Volume | None = None,
        before_round: Callable[[], object] | None = None,
    ) -> None:
        """spares: names of the processes that have a spare. volume: the disk of the stack's
        folders. before_round: called in front of each.
        """
        self._stack = stack
        self._clients: Sequence[ChaosClient] = ()
        self._schedule = list(schedule)
        self._wanted_spares = spares
        self._before_round = before_round
        self._round = 0
        self._due: list[tuple[float, PlannedFault]] = []  # faults of the current round, by time
        self._next_round_s: float | None = None  # set between rounds
        self._to_continue: dict[ChaosClient, float] = {}
        self._volume = volume
        self._to_undo: list[tuple[float, Callable[[], object]]] = []
        self.injected: list[InjectedFault] = []
        self.spares: dict[str, int] = {}  # pids of ready spares, by name
        self.num_missed = 0
        self.num_double_deaths = 0  # worker and core died before the other had recovered

    def run(self, clients: Sequence[ChaosClient], within_s: float) -> None:
        """Run until every client has read everything. Raises: ChaosFailed."""
        self._clients = clients
        deadline = time.monotonic() + within_s
        has_begun = False
        while not self._all_have_ended():
            now = time.monotonic()
            if now > deadline:
                raise ChaosFailed(f"the requests are not over after {within_s:g} s")
            if has_begun:
                self._act(now)
            elif has_begun := all(client.has_begun() for client in clients):
                self._end_round(now)
            self._read_events(min(_POLL_S, self._wait_s(now)))

    def wait_until_recovered(self) -> None:
        """Wait until every process hit last is replaced and the spares are ready.

        Raises: ChaosFailed.
        """
        deadline = time.monotonic() + _RECOVERY_S
        self._undo(inf)
        while self._missing() or not self._have_spares:
            self._read_events(_POLL_S)
            self._check_recovery(time.monotonic())
            if time.monotonic() > deadline:
                missing = ", ".join(self._wanted_spares - set(self.spares))
                raise ChaosFailed(f"no spare after {_RECOVERY_S:g} s: {missing}")

    @property
    def num_rounds(self) -> int:
        """The number of rounds that have begun."""
        return self._round

    def _all_have_ended(self) -> bool:
        try:
            return all(client.has_ended() for client in self._clients)
        except RuntimeError as error:
            raise ChaosFailed(str(error)) from None

    @property
    def _have_spares(self) -> bool:
        return self._wanted_spares <= set(self.spares)

    def _missing(self) -> list[InjectedFault]:
        return [one for one in self.injected if one.recovered_s is None]

    def _wait_s(self, now: float) -> float:
        moments = [at for at, _ in self._due] + list(self._to_continue.values())
        moments += [at for at, _ in self._to_undo]
        if self._next_round_s is not None:
            moments.append(self._next_round_s)
        return max(0.0, min(moments, default=now + _POLL_S) - now)

    # ---- injecting -------------------------------------------------------------------------

    def _act(self, now: float) -> None:
        for client, at in list(self._to_continue.items()):
            if now >= at:
                del self._to_continue[client]
                client.signal(signal.SIGCONT)
        self._undo(now)
        self._check_recovery(now)
        if self._next_round_s is not None and now >= self._next_round_s:
            self._next_round_s = None
            if self._before_round is not None:
                self._before_round()
                now = time.monotonic()
            faults = self._schedule[self._round].faults
            self._round += 1
            self._due = [(now + fault.after_s, fault) for fault in faults]
        while self._due and now >= self._due[0][0]:
            self._inject(self._due.pop(0)[1])
        is_over = not (self._due or self._missing() or self._to_undo)
        if self._next_round_s is None and is_over:
            self._end_round(now)

    def _end_round(self, now: float) -> None:
        if self._round < len(self._schedule):
            following = self._schedule[self._round]
            if self._have_spares or not following.awaits_spares:
                self._next_round_s = now + following.pause_s
                self._allow()
        else:
            self._allow()

    def _allow(self) -> None:
        for client in self._clients:
            client.allow(self._round)

    def _inject(self, fault: PlannedFault) -> None:
        if fault.target == "client":
            self._inject_into_client(fault)
            return
        if fault.target == "disk":
            self._fill_disk(fault)
            return
        if fault.target == "prompts":
            self._inject_into_prompt_process(fault)
            return
        pids = self._stack.pids
        at: Target = "core" if fault.target == "rank" else fault.target  # which ends with its rank
        names = [name for name in pids if _is_at(name, at)]
        if not names:
            self.num_missed += 1
            return
        name = names[int(fault.pick * len(names))]
        pid, has_spare = pids[name], name in self.spares
        injected = InjectedFault(
            self._round - 1, fault, pid, time.monotonic(), has_spare, name=name
        )
        try:
            if fault.action == "limit":
                self._limit_files(fault, pid)
                injected.recovered_s = injected.at_s  # unless the process ends because of it
            elif fault.target == "replica" and fault.action == "stop":
                self._silence(injected)
            else:
                hit = self._rank_pid(pid, fault.pick) if fault.target == "rank" else pid
                os.kill(hit, _SIGNALS[fault.action])
        except ProcessLookupError:  # it has ended; the event is still to come
            self.num_missed += 1
            return
        if fault.action == "limit":
            self.injected.append(injected)
            return
        if fault.target == "replica" and fault.action == "kill":
            self.num_double_deaths += 1  # of its worker and its core
        # a spare takes over at once, but rebuilds its predecessor's state a little later
        missing = {
            one.fault.target
            for one in self.injected
            if one.recovered_s is None or one.recovered_s > injected.at_s - _TOGETHER_S
        } - {fault.target}
        if at in _STATEFUL and missing & _STATEFUL:
            self.num_double_deaths += 1
        self.injected.append(injected)

    def _silence(self, injected: InjectedFault) -> None:
        """Stop all processes of a replica for a while. Raises: ProcessLookupError."""
        os.kill(injected.pid, signal.SIGSTOP)  # first, so that it replaces none of them
        stopped = process_census.descendants(injected.pid)
        for pid in stopped:
            _send(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in stopped:
                _send(pid, signal.SIGCONT)
            injected.how, injected.recovered_s = "", time.monotonic()

        self._to_undo.append((_end_of(_SILENCE_S, injected.fault), go_on))

    def _inject_into_prompt_process(self, fault: PlannedFault) -> None:
        workers = [name for name in self._stack.pids if _is_at(name, "worker")]
        name = workers[int(fault.pick * len(workers))] if workers else ""
        pid = self._prompt_pid(name)
        try:
            if pid is None:
                raise ProcessLookupError
            os.kill(pid, _SIGNALS[fault.action])
        except ProcessLookupError:
            self.num_missed += 1
            return
        now = time.monotonic()
        self.injected.append(InjectedFault(self._round - 1, fault, pid, now, how="", name=name))

    def _rank_pid(self, core: int, pick: float) -> int:
        """One of the core's other ranks. Raises: ProcessLookupError."""
        commands = process_census.commands(process_census.descendants(core) - {core})
        ranks = sorted(pid for pid, each in commands.items() if _RANK in each)
        if not ranks:
            raise ProcessLookupError
        return ranks[int(pick * len(ranks))]

    def _prompt_pid(self, worker: str) -> int | None:
        """The tokenizer process of the worker of this name; None while there is none."""
        pid = self._stack.pids.get(worker)
        if pid is None:
            return None
        commands = process_census.commands(process_census.descendants(pid) - {pid})
        return next((pid for pid, each in commands.items() if _TOKENIZER_PROCESS in each), None)

    def _limit_files(self, fault: PlannedFault, pid: int) -> None:
        """Keep the process from opening further files. Raises: ProcessLookupError."""
        files = resource.RLIMIT_NOFILE
        held = process_census.holding(pid)
        if held is None:
            raise ProcessLookupError
        before = resource.prlimit(pid, files)
        resource.prlimit(pid, files, (held.num_fds, before[1]))

        def restore() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, files, before)

        self._to_undo.append((_end_of(_SHORTAGE_S, fault), restore))

    def _fill_disk(self, fault: PlannedFault) -> None:
        if self._volume is None:
            self.num_missed += 1
            return
        self._volume.fill()
        self._to_undo.append((_end_of(_SHORTAGE_S, fault), self._volume.empty))
        now = time.monotonic()
        self.injected.append(InjectedFault(self._round - 1, fault, 0, now, how="", recovered_s=now))

    def _undo(self, now: float) -> None:
        """Undo file limits, full disks and silences whose time is over."""
        for each in [each for each in self._to_undo if each[0] <= now]:
            self._to_undo.remove(each)
            each[1]()

    def _inject_into_client(self, fault: PlannedFault) -> None:
        living = [
            one for one in self._clients if one not in self._to_continue and not one.has_ended()
        ]
        if not living:
            self.num_missed += 1
            return
        client = living[int(fault.pick * len(living))]
        pid, now = client.pid, time.monotonic()
        if fault.action == "kill":
            client.kill()
        else:
            client.signal(signal.SIGSTOP)
            low, high = _CLIENT_STOP_S
            self._to_continue[client] = now + low + fault.pick * (high - low)
        self.injected.append(
            InjectedFault(self._round - 1, fault, pid, now, how="", recovered_s=now)
        )

    # ---- events of the stack ---------------------------------------------------------------

    def _read_events(self, timeout_s: float) -> None:
        event = self._stack.next_event(timeout_s)
        while event is not None:
            match event:
                case StackFailed():
                    raise ChaosFailed(f"the stack failed: {event.error}")
                case SpareReady():
                    self.spares[event.name] = event.pid
                case ProcessStarted():
                    if self.spares.get(event.name) == event.pid:
                        del self.spares[event.name]
                case ProcessEnded():
                    self._note_end(event)
                case ProcessRestarted():
                    for one in self._missing():
                        if one.how is not None and one.name == event.name:
                            one.recovered_s = time.monotonic()
            event = self._stack.next_event(0.0)
        if not self._stack.is_running:
            raise ChaosFailed("the stack has ended")

    def _note_end(self, event: ProcessEnded) -> None:
        for name in names_within(event.name, self.spares):
            if name != event.name:  # a spare that died with its replica
                del self.spares[name]
        injected = [one for one in self._missing() if one.pid == event.pid]
        for one in self._missing():
            if replica_of(one.name) == event.name:  # what was to be replaced ends with its replica
                one.name = event.name
                injected.append(one)
        is_short = [
            one for one in self.injected if one.pid == event.pid and one.fault.action == "limit"
        ]
        for one in is_short[:1]:  # it ended because of the limit: wait for its successor
            one.recovered_s = None
            injected.append(one)
        if not injected and any(one.fault.action == "fill" for one in self._latest()):
            full = InjectedFault(
                self._round - 1, self._latest()[0].fault, event.pid, time.monotonic()
            )
            full.name = event.name
            self.injected.append(full)
            injected.append(full)
        is_of_a_hit_one = any(
            one.fault.target == "replica" and one.name == replica_of(event.name)
            for one in self.injected
            if one.round >= self._round - 2  # a process may end late
        )
        if not injected and not is_of_a_hit_one:
            what = f"{event.name} (process {event.pid}) ended without an injected fault"
            raise ChaosFailed(f"{what}: {event.how}")
        for one in injected:
            one.how = event.how

    def _latest(self) -> list[InjectedFault]:
        """The faults injected in the current or last round."""
        return [one for one in self.injected if one.round == self._round - 1]

    def _check_recovery(self, now: float) -> None:
        for one in self._missing():
            if one.fault.target == "prompts" and self._prompt_pid(one.name) not in (None, one.pid):
                one.recovered_s = now
            if now > one.at_s + _RECOVERY_S:
                what = f"{one.fault.name} at {one.at_s:.1f}"
                raise ChaosFailed(f"not recovered {_RECOVERY_S:g} s after: {what}")


def _end_of(within_s: tuple[float, float], fault: PlannedFault) -> float:
    low, high = within_s
    return time.monotonic() + low + fault.pick * (high - low)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_at(name: str, target: Target) -> bool:
    """Whether a process of this name belongs to the target."""
    name = own_name(name)
    return is_front(name) if target == "front" else role_of(name) == target
