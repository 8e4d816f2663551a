"""The supervisor of a fleet on one machine: starts its stacks, replaces those that end, ends all.

- Each replica, and the HTTP fronts together, are a stack with a supervisor process of its own. This
  process owns no stream, no message and no socket.
- The fleet is ready once every stack is. A stack that fails before that ends the fleet, with its
  exit code. Later one that ends, for whatever reason, is started again after a pause, and clients
  move its streams meanwhile. A stack that uses up its restarts is left out; the fleet ends when
  these are the fronts or the last replica.
- A stack whose supervisor is silent for `hang_timeout_s`, before its first beat for FIRST_BEAT_S,
  counts as hung and is killed. Time in which this process was stopped itself does not count, nor
  time in which that supervisor was ready to run and had no CPU.
- So a replica whose supervisor gets a SIGTERM drains, ends and starts again.
- A signal to end is passed on to all stacks, each of which drains as it would alone; so is a
  further one, which they take for the next stage. What has not ended then is killed.
- Where their processes are forks (see `Supervisor`), one process imports for all stacks, forks
  their supervisors, which fork their children, and ends. Where it fails, supervisors are programs;
  so are those that are started again: they are of the version that is installed then.
- Stacks lead sessions of their own, so a terminal's Ctrl-C reaches this process only. They end with
  this process, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from slipstream.stack.children.fork_client import ForkClient, ForkRefusedError
from slipstream.stack.children.line_pipe import LineReader
from slipstream.stack.children.restarts import RestartPolicy
from slipstream.stack.children.roles import CORE
from slipstream.stack.plan.fleet_plan import FleetPlan, PlannedStack
from slipstream.stack.runtime_dir import (
    RuntimeDirectory,
    RuntimeDirectoryInUseError,
    remove_leftovers,
)
from slipstream.stack.signals import SignalQueue, has_terminal
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessReady,
    ProcessRestarted,
    ProcessStarted,
    SpareReady,
    StackDraining,
    StackEvent,
    StackFailed,
    StackReady,
    SupervisorBeat,
)
from slipstream.stack.supervisor_process import (
    SUPERVISOR_MODULE,
    StartedSupervisor,
    fork_supervisor,
    start_supervisor,
)
from slipstream_ipc.child import ChildProcess
from slipstream_ipc.fork_server import Preload
from slipstream_ipc.process import BEAT_S, SILENT_S, go_on_after_parent
from slipstream_ipc.run_delay import RunDelay
from slipstream_ipc.telemetry.logs import LOG_FORMAT_VARIABLE, LOG_REPLICA_VARIABLE

FIRST_BEAT_S = 60.0  # a supervisor imports for less than a second, on a busy machine for more
_FAILED = 1  # exit code
_END_S = 20.0  # after `drain_s`; a supervisor takes at most 14
_logger = logging.getLogger(__name__)


class FleetSupervisor:
    """Runs a fleet in the calling thread, which must be the main thread."""

    def __init__(self, plan: FleetPlan, report: Callable[[StackEvent], None]) -> None:
        """report: is told of replicas as a stack's supervisor tells of processes, of the processes
        of a replica under the replica's name and theirs, and of the fronts under their own.
        """
        self._plan = plan
        self._report = report
        self._stacks = [
            _SupervisedStack(each, RestartPolicy(plan.max_restarts, plan.restart_window_s))
            for each in plan.stacks
        ]
        self._selector = selectors.DefaultSelector()
        self._is_ready = False
        self._zygote: ForkClient | None = None  # what imports for all stacks
        self._turned_at = 0.0  # when the loop turned last
        self._kills_at: float | None = None  # once it ends
        self._exit_code = 0
        self._has_terminal = has_terminal()

    def run(self) -> int:
        """Run the fleet to its end. Returns the exit code: 0 where it was asked to end, else that
        of a supervisor (see `Supervisor`).
        """
        try:
            with (
                RuntimeDirectory(Path(self._plan.runtime_dir)),
                SignalQueue(
                    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD
                ) as signals,
                self._selector,
            ):
                self._selector.register(signals, selectors.EVENT_READ)
                try:
                    self._start_zygote()
                    self._loop(signals)
                finally:
                    self._clean_up()
        except (RuntimeDirectoryInUseError, OSError) as error:
            self._exit_code = _FAILED
            self._report(StackFailed(str(error)))
        return self._exit_code

    @property
    def _is_ending(self) -> bool:
        return self._kills_at is not None

    def _loop(self, signals: SignalQueue) -> None:
        while not self._is_ending or any(stack.process for stack in self._stacks):
            if any(key.fileobj is self._zygote for key, _ in self._selector.select(self._wait_s())):
                self._read_zygote()
            for stack in self._stacks:
                self._read_events(stack)
            for number in signals.drain():
                if number != signal.SIGCHLD:
                    self._on_signal(number)
            now = time.monotonic()
            self._check_beats(now)
            for stack in self._stacks:
                if stack.process is not None and stack.process.ended() is not None:
                    self._on_exit(stack, now)
                elif stack.due_at is not None and now >= stack.due_at:
                    self._start_again(stack, now)
            if self._kills_at is not None and now >= self._kills_at:
                self._kills_at = now + _END_S
                for stack in self._stacks:
                    self._kill(stack)

    def _wait_s(self) -> float | None:
        moments = [stack.due_at for stack in self._stacks if stack.due_at is not None]
        if self._kills_at is not None:
            moments.append(self._kills_at)
        now = time.monotonic()
        if any(stack.silent_until is not None for stack in self._stacks):
            moments.append(now + BEAT_S)
        return max(0.0, min(moments) - now) if moments else None

    def _check_beats(self, now: float) -> None:
        was_stopped = now >= self._turned_at + SILENT_S  # and they perhaps, too
        self._turned_at = now
        for stack in self._stacks:
            if stack.silent_until is None:
                continue
            if was_stopped:
                stack.silent_until = max(stack.silent_until, now + stack.timeout_s)
            elif now >= stack.silent_until + stack.run_delay.lacked_s():
                stack.silent_until = None
                stack.error = f"hung: no heartbeat for {stack.timeout_s:g} s"
                self._kill(stack)

    # ---- what imports for all stacks -----------------------------------------------------

    def _start_zygote(self) -> None:
        """Have it import, and then start the stacks."""
        specs = [spec for stack in self._plan.stacks for spec in stack.config.children]
        preloads = {spec.forks: Preload(spec.forks, spec.config) for spec in specs if spec.forks}
        if preloads:
            preloads[SUPERVISOR_MODULE] = Preload(SUPERVISOR_MODULE, msgspec.Raw(b"{}"))
            try:
                self._zygote = ForkClient(list(preloads.values()), stays_reaper=False)
            except OSError as error:
                _logger.warning("each stack imports for itself: %s", error)
            else:
                self._selector.register(self._zygote, selectors.EVENT_READ)
                return
        self._start_all()

    def _read_zygote(self) -> None:
        assert self._zygote is not None
        try:
            self._zygote.read()
            self._zygote.preload_next()
        except OSError as error:
            _logger.warning("each stack imports for itself from now on: %s", error)
            self._close_zygote()
        if self._zygote is None or not self._zygote.has_awaited:
            self._start_all()
            self._close_zygote()

    def _close_zygote(self) -> None:
        if self._zygote is not None:
            self._selector.unregister(self._zygote)
            self._zygote.close()
            self._zygote = None

    # ---- stacks --------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Start the stacks that were never started, unless the fleet is to end."""
        for stack in self._stacks:
            if not stack.started_at and not self._is_ending:
                self._start(stack)

    def _start(self, stack: _SupervisedStack) -> None:
        stack.due_at = None
        stack.ready_at = None
        stack.started_at = time.monotonic()
        stack.error = stack.detail = ""
        environment = {
            **os.environ,
            LOG_FORMAT_VARIABLE: self._plan.log_format,
            LOG_REPLICA_VARIABLE: stack.name if stack.plan.is_replica else "",
            **stack.plan.environment,
        }
        before_exec = partial(_before_exec, stack.plan.cpus)  # safe: this process has one thread
        config = msgspec.structs.replace(stack.plan.config, beats=True)
        if started := self._forked(stack, environment):
            children = [msgspec.structs.replace(spec, preloads=False) for spec in config.children]
            config = msgspec.structs.replace(config, children=tuple(children))  # it has them all
        else:
            started = start_supervisor(environment, before_exec)
        stack.process, stack.stdin = started.process, started.stdin
        stack.expect_beat(stack.started_at, FIRST_BEAT_S)
        stack.events = LineReader(started.stdout_fd)
        self._selector.register(stack.events, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which SIGCHLD tells
            stack.stdin.write(msgspec.json.encode(config) + b"\n")
            stack.stdin.flush()
        self._report(ProcessStarted(stack.name, stack.process.pid))

    def _forked(
        self, stack: _SupervisedStack, environment: Mapping[str, str]
    ) -> StartedSupervisor | None:
        """Its supervisor as a fork; None where it has to be a program."""
        if self._zygote is None:
            return None
        try:
            started = fork_supervisor(self._zygote, environment)
        except OSError as error:
            _logger.warning("%s is not forked but started anew: %s", stack.name, error)
            if not isinstance(error, ForkRefusedError):
                self._close_zygote()  # what it says next might be an answer to this
            return None
        if started is not None and stack.plan.cpus:
            try:
                os.sched_setaffinity(started.process.pid, stack.plan.cpus)  # it waits for a config
            except ProcessLookupError:
                pass  # it has ended, which SIGCHLD tells
            except OSError:
                started.discard()
                raise
        return started

    def _start_again(self, stack: _SupervisedStack, now: float) -> None:
        try:
            self._start(stack)
        except OSError as error:  # no memory, processes, descriptors
            if stack.process is None:
                self._on_loss(stack, now, 0.0, f"it could not be started: {error}")
            else:  # of a process that runs and cannot be followed
                stack.process.kill()

    def _read_events(self, stack: _SupervisedStack) -> None:
        if stack.events is None:
            return
        for line in stack.events.read():
            self._on_event(stack, msgspec.json.decode(line, type=StackEvent))
        if stack.events.has_ended():
            with contextlib.suppress(KeyError):
                self._selector.unregister(stack.events)

    def _on_event(self, stack: _SupervisedStack, event: StackEvent) -> None:
        match event:
            case SupervisorBeat():
                stack.expect_beat(time.monotonic())
            case StackReady():
                self._on_ready(stack)
            case StackFailed(error=error):
                stack.error = error
            case ProcessReady(name=name, detail=detail) if name == CORE:
                stack.detail = detail
            case ProcessReady() if stack.plan.is_replica:
                pass  # the replica's own readiness says as much
            case (
                ProcessReady()
                | ProcessStarted()
                | SpareReady()
                | ProcessEnded()
                | ProcessRestarted()
            ):
                if stack.plan.is_replica:
                    event = msgspec.structs.replace(event, name=f"{stack.name}: {event.name}")
                self._report(event)

    def _on_ready(self, stack: _SupervisedStack) -> None:
        assert stack.process is not None
        now, pid = time.monotonic(), stack.process.pid
        stack.ready_at = now
        if stack.plan.is_replica and stack.how_ended is None:
            seconds = now - stack.started_at
            self._report(ProcessReady(stack.name, pid, stack.detail, seconds))
        elif stack.how_ended is not None:
            seconds = now - stack.ended_at
            _logger.info("%s is process %d now, after %.2f s", stack.name, pid, seconds)
            how = stack.how_ended
            self._report(ProcessRestarted(stack.name, pid, how, seconds, stack.detail))
        if not self._is_ready and all(each.ready_at is not None for each in self._stacks):
            self._is_ready = True
            self._report(StackReady(self._plan.address))

    def _on_exit(self, stack: _SupervisedStack, now: float) -> None:
        assert stack.process is not None
        self._read_events(stack)  # its last words
        code = stack.process.reap()
        if stack.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it did not take its config
                stack.stdin.close()
            stack.stdin = None
        served_s = 0.0 if stack.ready_at is None else now - stack.ready_at
        how = stack.error or (f"signal {-code}" if code < 0 else f"exit code {code}")
        pid, stack.process = stack.process.pid, None
        stack.ready_at = stack.silent_until = None
        if stack.events is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(stack.events)
            stack.events.close()
            stack.events = None
        if self._is_ending:
            return
        if not self._is_ready:
            self._fail(f"{stack.name}: {how}", max(code, _FAILED))
            return
        self._report(ProcessEnded(stack.name, pid, how))
        if code == 0 and served_s and stack.plan.is_replica:  # asked to: no loss
            _logger.info("%s has drained; it is started again", stack.name)
            stack.how_ended, stack.ended_at, stack.due_at = how, now, now
            return
        self._on_loss(stack, now, served_s, how)

    def _on_loss(self, stack: _SupervisedStack, now: float, served_s: float, how: str) -> None:
        """Start it again after a pause, or leave it out."""
        stack.how_ended, stack.ended_at = how, now
        pause_s = stack.policy.pause_s(now, served_s)
        if pause_s is not None:
            _logger.warning("%s ended: %s; it is started again", stack.name, how)
            stack.due_at = now + pause_s
            return
        _logger.error("%s ended: %s; it is left out after %s", stack.name, how, stack.policy.limit)
        replicas = [each for each in self._stacks if each.plan.is_replica]
        if not stack.plan.is_replica or not any(each.is_wanted for each in replicas):
            self._fail(f"{stack.name}: {how}; {stack.policy.limit} are allowed", _FAILED)

    # ---- ending --------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and not self._has_terminal:
            _logger.info("SIGHUP: keys and certificates are read anew; serving goes on")
            for stack in self._stacks:
                if stack.process is not None:
                    stack.process.send_signal(number)
            return
        if not self._is_ending:
            _logger.info("stopping (%s)", number.name)
            self._report(StackDraining(self._plan.drain_s))
        self._end(self._plan.drain_s if self._is_ready else 0.0)

    def _fail(self, error: str, exit_code: int) -> None:
        self._exit_code = exit_code
        self._report(StackFailed(error))
        self._end(0.0 if not self._is_ready else self._plan.drain_s)

    def _end(self, drain_s: float) -> None:
        """Let the stacks end; those that are to end already take it for the next stage."""
        if self._kills_at is None:
            self._kills_at = time.monotonic() + drain_s + _END_S
        for stack in self._stacks:
            stack.due_at = None
            if stack.process is not None:
                stack.process.terminate()

    def _kill(self, stack: _SupervisedStack) -> None:
        if stack.process is not None:
            _logger.warning("killing %s (process %d)", stack.name, stack.process.pid)
            stack.process.kill()  # its children die with it: see `Child`

    def _clean_up(self) -> None:
        self._close_zygote()
        for stack in self._stacks:
            if stack.process is not None:  # only after an error in this file
                stack.process.reap()
            folder = Path(stack.plan.config.runtime_dir)
            remove_leftovers(folder)  # of one that was killed
            with contextlib.suppress(OSError):  # it has none, or foreign files
                folder.rmdir()


def _before_exec(cpus: Collection[int] | None) -> None:
    """Prepare a stack's supervisor between fork and exec."""
    go_on_after_parent()  # one that is stopped while it imports, too
    if cpus:
        # else n loads and n teams of threads fight for cores (decision 037)
        os.sched_setaffinity(0, cpus)


class _SupervisedStack:
    """A stack and its supervisor process, while it has one."""

    def __init__(self, plan: PlannedStack, policy: RestartPolicy) -> None:
        self.plan = plan
        self.name = plan.name
        self.policy = policy
        self.process: ChildProcess | None = None
        self.stdin: IO[bytes] | None = None  # which ends it
        self.events: LineReader | None = None
        self.started_at = 0.0
        self.ready_at: float | None = None
        self.timeout_s = 0.0  # of the next beat
        self.silent_until: float | None = None  # when it counts as hung; None: it does not run
        self.run_delay = RunDelay()  # its supervisor's since the last `expect_beat`
        self.due_at: float | None = None  # when it is started again
        self.error = ""  # as it reported
        self.detail = ""  # of its core
        self.how_ended: str | None = None  # the last one
        self.ended_at = 0.0

    def expect_beat(self, now: float, at_least_s: float = 0.0) -> None:
        """Allow it `hang_timeout_s` for its next beat, and no less than `at_least_s`."""
        self.timeout_s = max(self.plan.config.hang_timeout_s, at_least_s)
        self.silent_until = now + self.timeout_s
        if self.process is not None:
            self.run_delay.begin(self.process.pid)

    @property
    def is_wanted(self) -> bool:
        """True if the stack runs or is going to."""
        return self.process is not None or self.due_at is not None
