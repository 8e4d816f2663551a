"""The supervisor of a stack: starts its processes, watches them, restarts them and ends them.

One loop waits for the children's status pipes, signals (SIGCHLD included), deadlines and, when a
`Stack` started it, the end of the parent process. See `roles` for succession, `restarts` for
pauses and budgets, `status_broadcast` for what the HTTP fronts are sent, and `throughput_log` for
the line on the stack's throughput.

- The stack is ready once every child has reported ready. The stack fails with exit code 1 when a
  child dies before it was first ready, when a child reports an error (its successor would fail the
  same way), and when a child dies with its restart budget used up. Only the first failure is
  reported, as others follow from it. The exit code is 2 where a child reports, while the stack
  starts, that the configuration is at fault: another start would fail the same way.
- Beats alone do not wake the supervisor while all processes serve: the status of a child that can
  have no news (`Child.has_news`) is read in turns that others cause. Exits come as SIGCHLD.
- A child without heartbeats for `hang_timeout_s` counts as hung and is killed; time in which its
  loop was ready to run and had no CPU does not count. A dead process is
  reaped before its successor is activated. Spares are started one at a time, and only while all
  processes serve.
- On a signal the stack drains: running requests continue for `drain_s`, restarts included. Then
  children whose loop runs get SIGTERM and the others SIGKILL; after STOP_S all get SIGKILL. Each
  further signal skips to the next stage, except for one that repeats the last within REPEAT_S:
  wrappers signal a process and its group. SIGHUP ends it only as the hang-up of a terminal; without
  one the fronts read their keys and certificate anew. No process, socket or
  folder made here is left behind.
- Children that a fork server imports for (`ChildSpec.preloads`) wait for that while the stack
  starts.
  They are forked then, or started as programs where the server has failed.
- The supervisor holds the sockets that fronts listen at (`listeners`) from before the first child
  starts until the stack stops. While it drains, fronts still accept connections, to report that.
- Where a fleet's supervisor started it (`beats`), it reports that its loop turns. If that one reads
  nothing for SILENT_S, fronts are told nothing, so that they report a supervisor that is silent.
- Failures before the stack is ready are reported through `report` only, and shown by the program
  that started it; later ones are logged, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from slipstream.client.endpoints import http_address
from slipstream.stack.children.fork_client import ForkClient
from slipstream.stack.children.line_pipe import LineWriter
from slipstream.stack.children.listeners import Listeners
from slipstream.stack.children.process import Child, ChildExit, ChildSpec
from slipstream.stack.children.process_usage import children_of, state_of
from slipstream.stack.children.role_statistics import SUPERVISOR, RoleStatistics
from slipstream.stack.children.roles import CORE, WORKER, Role
from slipstream.stack.parent_watch import STANDARD_INPUT, watch_parent
from slipstream.stack.runtime_dir import RuntimeDirectory, RuntimeDirectoryInUseError
from slipstream.stack.signals import SignalQueue, has_terminal
from slipstream.stack.status_broadcast import StatusBroadcast
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessReady,
    ProcessRestarted,
    ProcessStarted,
    RequestsRunning,
    SpareReady,
    StackDraining,
    StackEvent,
    StackFailed,
    StackReady,
    SupervisorBeat,
    SupervisorConfig,
)
from slipstream.stack.throughput_log import ThroughputLog
from slipstream_ipc.crash_note import read_note
from slipstream_ipc.fork_server import Preload
from slipstream_ipc.process import BEAT_S, SILENT_S, go_on_after_parent, name_process, role_of
from slipstream_ipc.telemetry.logs import configure_logging

FAILED = 1  # exit codes
MISCONFIGURED = 2
STOP_S = 3.0  # from SIGTERM to SIGKILL
REPEAT_S = 1.0  # in which a signal that comes again is the same one
_FLUSH_S = 1.0  # after `drain_s`, to send the last output
# from SIGKILL until a child is abandoned: the kernel may need seconds to free its memory, more on a
# busy machine; only a process that waits for a broken device takes for ever
GIVE_UP_S = 10.0
# the period for reading statuses that do not wake the supervisor; longer than a beat
_QUIET_S = 1.5 * BEAT_S
_LEAST_QUIET_HANG_S = 8 * BEAT_S  # `hang_timeout_s` from which on a beat may be read that late
_logger = logging.getLogger(__name__)


def _measured_after_s(timeout_s: float) -> float:
    """The seconds of silence after which a child's CPU time is measured."""
    return min(SILENT_S, timeout_s / 2)


class Supervisor:
    """Runs one stack in the calling thread, which must be the main thread."""

    def __init__(
        self,
        config: SupervisorConfig,
        report: Callable[[StackEvent], None],
        beat: Callable[[], bool] | None = None,
    ) -> None:
        """beat: is called every BEAT_S, as long as the loop turns; whether what was reported before
        has been read.
        """
        self._config = config
        self._report = report
        self._beat = beat
        self._beat_due_at = 0.0
        self._read_at: float | None = None  # when all was read that was reported; None: no beats
        self._roles = {
            spec.name: Role(spec, config.max_restarts, config.restart_window_s)
            for spec in config.children
        }
        self._statistics = RoleStatistics(self._roles)
        self._status_broadcast = StatusBroadcast(self._roles, self._statistics)
        self._throughput_log = ThroughputLog(self._statistics, config.log_stats_interval_s)
        self._children: list[Child] = []  # all children not reaped yet
        self._quiet: list[Child] = []  # of them, those whose status does not wake the selector
        self._quiet_read_at = 0.0
        self._listeners: Listeners | None = None
        self._fork_server: ForkClient | None = None
        self._is_reaper = False  # of what its children leave behind
        self._selector = selectors.DefaultSelector()
        self._phase: Literal["starting", "serving", "draining", "stopping", "killing"] = "starting"
        self._deadline: float | None = None  # of the current phase
        self._has_terminal = has_terminal()
        self._last_signal: tuple[signal.Signals, float] | None = None  # that counted, and when
        self._exit_code = 0

    def run(self) -> int:
        """Run the stack to its end. Returns the exit code: 0 where it was asked to end, else FAILED
        or MISCONFIGURED.
        """
        os.environ.update(self._config.environment)
        try:
            with (
                RuntimeDirectory(Path(self._config.runtime_dir)),
                SignalQueue(
                    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD
                ) as signals,
                contextlib.ExitStack() as cleanup,
            ):
                cleanup.callback(self._selector.close)
                cleanup.callback(self._kill_leftovers)
                cleanup.callback(self._close_listeners)
                cleanup.callback(self._close_fork_server)
                self._watch(signals, partial(self._on_signals, signals))
                if self._config.parent_pid is not None:
                    watch_parent(self._config.parent_pid, self._selector, self._stop, cleanup)
                if self._listen():
                    self._start_fork_server()
                    for role in self._roles.values():
                        self._activate(role)
                    self._loop()
        except (RuntimeDirectoryInUseError, OSError) as error:
            self._fail(str(error))
        return self._exit_code

    def _listen(self) -> bool:
        """Bind the fronts' sockets; False, after a failure report, where that is impossible."""
        listen, uds = self._config.listen, self._config.uds
        if listen is None and uds is None:
            return True
        try:
            if uds is not None:
                self._listeners = Listeners.at_path(uds)
            else:
                assert listen is not None
                self._listeners = Listeners.at(*listen)
        except OSError as error:
            where = http_address(*(listen or ("", 0)), uds=uds)
            why = error.strerror or error
            other = "http_port sets another port" if uds is None else "uds sets another path"
            self._fail(f"cannot listen at {where}: {why} ({other})")
            return False
        return True

    def _stop_listening(self) -> None:
        if self._listeners is not None:
            self._listeners.stop()

    def _close_listeners(self) -> None:
        if self._listeners is not None:
            self._listeners.close()

    def _start_fork_server(self) -> None:
        preloads = {
            spec.forks: Preload(spec.forks, spec.config)
            for spec in self._config.children
            if spec.forks is not None and spec.preloads
        }
        if not preloads:
            return
        self._is_reaper = True
        try:
            self._fork_server = ForkClient(list(preloads.values()))
        except OSError as error:
            _logger.warning("there is no fork server: %s", error)
        else:
            self._watch(self._fork_server, self._on_fork_server)

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._selector.unregister(self._fork_server)
            self._fork_server.close()
            self._fork_server = None

    @property
    def _is_ending(self) -> bool:
        return self._phase in ("stopping", "killing")

    def _loop(self) -> None:
        while self._children or not self._is_ending:
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            now = time.monotonic()
            if self._beat is not None and now >= self._beat_due_at:
                self._beat_due_at = now + BEAT_S
                if self._beat() or self._read_at is None:
                    self._read_at = now
            if not self._is_ending:
                self._read_quiet(now)
                self._on_tick(now)
            self._choose_quiet()
            if self._deadline is not None and now >= self._deadline:
                if self._phase == "draining":
                    self._stop(f"drain_s={self._config.drain_s:g} is over")
                elif self._phase == "stopping":
                    self._kill(f"not stopped {STOP_S:g} s after SIGTERM")
                else:
                    self._abandon()
                    return

    def _wait_s(self) -> float | None:
        """Seconds until the next deadline; None where there is none."""
        timeout_s = self._config.hang_timeout_s
        moments = [] if self._deadline is None else [self._deadline]
        if self._beat is not None:
            moments.append(self._beat_due_at)
        if not self._is_ending:
            moments += [role.due_at for role in self._roles.values() if role.due_at is not None]
            moments += [
                child.hangs_at(timeout_s)
                if child.is_cpu_measured
                else child.last_beat_at + _measured_after_s(timeout_s)
                for child in self._children
                if child.last_beat_at is not None
            ]
            now = time.monotonic()
            moments += [
                silent_at
                for child in self._children
                if child.last_beat_at is not None
                and (silent_at := child.last_beat_at + SILENT_S) > now
            ]
            if self._quiet:
                moments.append(self._quiet_read_at + _QUIET_S)
            if self._may_start_spare:
                moments += [
                    role.spare_due_at
                    for role in self._roles.values()
                    if role.spare is None and role.spare_due_at is not None
                ]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    # ---- timers --------------------------------------------------------------------------

    def _on_tick(self, now: float) -> None:
        """Check heartbeats, start processes and spares that are due, and end a finished drain."""
        for child in self._children:
            self._check_heartbeat(child, now)
        for role in self._roles.values():
            if role.due_at is not None and now >= role.due_at:
                self._activate(role)
        for role in self._roles.values():
            is_due = role.spare_due_at is not None and now >= role.spare_due_at
            if role.spare is None and is_due and self._may_start_spare:
                role.spare = self._start(role.spec, logging.DEBUG)
        if self._read_at is None or now < self._read_at + SILENT_S:
            self._status_broadcast.send(now)
        self._throughput_log.tick(now)
        if self._phase == "draining" and all(
            role.active is not None and role.active.is_drained for role in self._roles.values()
        ):
            num_cut = sum(role.active.num_cut for role in self._roles.values() if role.active)
            what = f"{num_cut} {'request was' if num_cut == 1 else 'requests were'} cut off"
            self._stop(what if num_cut else "all requests have ended")

    def _check_heartbeat(self, child: Child, now: float) -> None:
        timeout_s = self._config.hang_timeout_s
        if child.last_beat_at is None or now < child.last_beat_at + _measured_after_s(timeout_s):
            return
        if not child.is_cpu_measured:
            child.measure_cpu(now)
        if now < child.hangs_at(timeout_s):
            return
        self._on_status(child)  # if the supervisor itself was stopped, beats may be unread
        if child.last_beat_at is not None and now >= child.hangs_at(timeout_s):
            child.last_beat_at = None
            is_busy = child.is_busy(now)
            what = "it uses CPU time" if is_busy else "it is stopped or waits"
            _logger.warning("%s (process %d) hangs: %s", child.name, child.pid, what)
            child.kill(f"hung: no heartbeat for {timeout_s:g} s", is_own_fault=is_busy)

    @property
    def _may_start_spare(self) -> bool:
        """True if a spare may be started: all processes serve, and no other spare is starting."""
        return self._phase == "serving" and all(
            role.is_ready and not role.is_preparing_spare for role in self._roles.values()
        )

    # ---- events --------------------------------------------------------------------------

    def _on_status(self, child: Child) -> None:
        if child.status.has_ended():
            return  # handled already, by another event of the same round
        was_ready, was_available = child.state == "ready", child.available_at is not None
        num_before = child.num_running
        child.read_status()
        if child.status.has_ended():
            self._unwatch_status(child)
        if self._is_ending:
            return
        role = self._roles[child.name]
        if child.num_running and child.num_running != num_before and self._deadline is not None:
            left_s = max(0.0, self._deadline - _FLUSH_S - time.monotonic())
            told = [one.active.num_running or 0 for one in self._roles.values() if one.active]
            self._report(RequestsRunning(sum(told), left_s))
        if child.error and child is role.active:
            is_wrong = self._phase == "starting" and child.is_misconfigured
            self._fail(f"{child.name}: {child.error}", MISCONFIGURED if is_wrong else FAILED)
        elif child.error:
            child.kill(child.error)
        elif child.state == "ready" and not was_ready:
            self._on_ready(role, child)
        elif child is role.spare and child.available_at is not None and not was_available:
            seconds = child.available_at - child.started_at
            _logger.debug("spare %s is ready as process %d", child.name, child.pid)
            self._report(SpareReady(child.name, child.pid, seconds))

    def _choose_quiet(self) -> None:
        """Wait for the status lines that may be urgent, and for no others."""
        is_settled = self._config.hang_timeout_s >= _LEAST_QUIET_HANG_S and self._may_start_spare
        quiet = [child for child in self._children if not child.has_news] if is_settled else []
        if quiet == self._quiet:
            return
        for child in self._quiet:
            if child not in quiet and not child.status.has_ended():
                self._watch(child.status, partial(self._on_status, child))
        for child in quiet:
            if child not in self._quiet:
                self._unwatch_status(child)
        self._quiet = quiet

    def _read_quiet(self, now: float) -> None:
        """Read the statuses that nothing waits for, once in a while."""
        if now >= self._quiet_read_at + BEAT_S / 2:
            self._quiet_read_at = now
            for child in self._quiet:
                self._on_status(child)

    def _unwatch_status(self, child: Child) -> None:
        with contextlib.suppress(KeyError):  # it is quiet, or its status has ended
            self._selector.unregister(child.status)

    def _on_fork_server(self) -> None:
        """A module was imported, or the server has ended."""
        assert self._fork_server is not None
        try:
            self._fork_server.read()
            self._activate_waiting()
            self._fork_server.preload_next()
        except OSError as error:
            _logger.warning("processes are started without a fork server from now on: %s", error)
            self._close_fork_server()
            self._activate_waiting()

    def _activate_waiting(self) -> None:
        """Activate the roles that waited for their module."""
        if not self._is_ending:
            for role in self._roles.values():
                if role.active is None and role.due_at is None:
                    self._activate(role)

    def _on_ready(self, role: Role, child: Child) -> None:
        now = time.monotonic()
        if not role.has_served:
            seconds = now - child.started_at
            self._report(ProcessReady(child.name, child.pid, child.detail, seconds))
        else:
            assert role.last_exit is not None
            seconds, how = now - role.ended_at, role.last_exit.how
            _logger.info("%s is process %d now, after %.2f s", child.name, child.pid, seconds)
            self._report(ProcessRestarted(child.name, child.pid, how, seconds, child.detail))
        role.note_ready()
        if self._phase == "starting" and all(one.is_ready for one in self._roles.values()):
            self._phase = "serving"
            self._report(StackReady(self._config.address))

    def _on_signals(self, signals: SignalQueue) -> None:
        for number in signals.drain():
            if number == signal.SIGCHLD:
                self._on_exits()
            elif number == signal.SIGHUP and not self._has_terminal:
                _logger.info("SIGHUP: keys and certificates are read anew; serving goes on")
                self._reload()
            elif self._is_repeated(number):
                _logger.info("%s came again within %g s: it counts once", number.name, REPEAT_S)
            elif self._is_ending:
                self._kill(f"another signal, {number.name}")
            elif self._phase == "serving" and self._config.drain_s > 0:
                self._drain(number.name)
            else:
                self._stop(number.name)

    def _reload(self) -> None:
        """Have the fronts read their keys and certificate anew. The gates of tcp:// read theirs at
        each handshake.
        """
        for role in self._roles.values():
            for child in self._children:
                if child.name == role.spec.name and role.spec.front_index is not None:
                    child.reload()

    def _is_repeated(self, number: signal.Signals) -> bool:
        """True if this signal repeats the last one that counted; if not, it becomes the last
        one.
        """
        now = time.monotonic()
        if self._last_signal is not None:
            last, at = self._last_signal
            if number == last and now < at + REPEAT_S:
                return True
        self._last_signal = number, now
        return False

    def _on_exits(self) -> None:
        for child in [child for child in self._children if child.has_ended()]:
            self._on_status(child)  # read its last messages before its exit is handled
            self._unwatch_status(child)
            self._statistics.note_exit(child)
            exit_ = child.reap()
            self._children.remove(child)
            for path in Path(self._config.runtime_dir).glob(f"*-{child.pid}.sock"):
                path.unlink(missing_ok=True)
            if self._is_ending:
                _logger.debug("%s (process %d) ended: %s", child.name, child.pid, exit_.how)
            else:
                self._on_child_exit(self._roles[child.name], child, exit_)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap what children have left behind: it is ours since there was a fork server."""
        if not self._is_reaper:
            return
        ours = {child.pid for child in self._children}
        if self._fork_server is not None:
            ours.add(self._fork_server.pid)
        for pid in set(children_of(os.getpid())) - ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _on_child_exit(self, role: Role, child: Child, exit_: ChildExit) -> None:
        is_spare, now = child is role.spare, time.monotonic()
        may_go_on = role.note_exit(child, exit_, now)
        if role_of(role.name) == CORE and not is_spare:
            self._tell_workers(exit_)
        what = f"{child.name} (process {child.pid}) ended"
        if is_spare:
            more = "another is started" if may_go_on else f"no other after {role.limit}"
            _logger.warning("spare %s: %s; %s", what, exit_.how, more)
        elif not role.has_served:
            self._fail(f"{what} before it was ready: {exit_.how}")
        elif not may_go_on:
            allowed = f"{role.limit} are allowed (max_restarts, restart_window_s)"
            self._fail(f"{what}: {exit_.how}; {allowed}")
        else:
            _logger.warning("%s: %s; another one replaces it", what, exit_.how)
            self._report(ProcessEnded(child.name, child.pid, exit_.how))
            if role.due_at is not None and now >= role.due_at:
                self._activate(role)

    def _tell_workers(self, exit_: ChildExit) -> None:
        """Tell the workers how the core has ended, for clients that route among replicas."""
        suspects = None
        if exit_.is_own_fault:  # read before the next core begins its own note
            suspects = read_note(Path(self._config.runtime_dir))
        for role in self._roles.values():
            if role_of(role.name) == WORKER and role.active is not None:
                role.active.tell_core_ended(died_within=exit_.is_own_fault, suspects=suspects)

    # ---- actions -------------------------------------------------------------------------

    def _activate(self, role: Role) -> None:
        """Activate the spare, or a new process, in this role. A role whose module is still being
        imported is activated after that.
        """
        role.due_at = None
        forks = role.spec.forks
        server = self._fork_server
        if forks is not None and server is not None and server.is_awaited(forks):
            return
        level = logging.DEBUG if self._phase == "starting" else logging.INFO
        child = role.spare or self._start(role.spec, level)
        if child is None:
            return
        role.activate(child)
        if self._phase == "draining" and self._deadline is not None:
            child.drain(max(0.0, self._deadline - _FLUSH_S - time.monotonic()))
        self._report(ProcessStarted(child.name, child.pid))

    def _start(self, spec: ChildSpec, log_level: int) -> Child | None:
        if self._is_ending:
            return None
        try:
            child = Child(spec, self._listeners, self._fork_server)
        except OSError as error:
            self._fail(f"{spec.name}: cannot be started: {error}")
            return None
        self._children.append(child)
        self._watch(child.status, partial(self._on_status, child))
        _logger.log(log_level, "started %s as process %d", child.name, child.pid)
        return child

    def _fail(self, error: str, exit_code: int = FAILED) -> None:
        self._exit_code = exit_code
        if self._phase != "starting":
            _logger.error("%s; the stack ends", error)
        self._report(StackFailed(error))
        self._stop("failure")

    def _drain(self, reason: str) -> None:
        within_s = self._config.drain_s
        _logger.info("draining (%s)", reason)
        self._phase = "draining"
        self._deadline = time.monotonic() + within_s + _FLUSH_S
        self._report(StackDraining(within_s))
        for role in self._roles.values():
            if role.active is not None:
                role.active.drain(within_s)

    def _stop(self, reason: str) -> None:
        if self._is_ending:
            return
        has_failed_early = self._exit_code and self._phase == "starting"  # and that is reported
        _logger.log(logging.DEBUG if has_failed_early else logging.INFO, "stopping (%s)", reason)
        self._phase = "stopping"
        self._stop_listening()
        self._deadline = time.monotonic() + STOP_S
        for child in self._children:
            if child.handles_sigterm:
                child.drain(0.0)  # so that it can tell a stop by the stack from a stray SIGTERM
                child.terminate()
            else:
                child.kill()  # it serves no requests, and may not handle SIGTERM while it loads

    def _kill(self, reason: str) -> None:
        if self._phase != "killing":
            self._deadline = time.monotonic() + GIVE_UP_S
        self._phase = "killing"
        for child in self._children:
            _logger.warning("killing %s (process %d): %s", child.name, child.pid, reason)
            child.kill()

    def _kill_leftovers(self) -> None:
        for child in self._children:
            child.kill()  # children remain here only after an error in this file

    def _abandon(self) -> None:
        self._exit_code = FAILED
        for child in self._children:
            what = f"{child.name} (process {child.pid}, state {state_of(child.pid)})"
            _logger.error("%s has not ended %g s after SIGKILL; it is abandoned", what, GIVE_UP_S)

    # ---- selector ------------------------------------------------------------------------

    def _watch(self, source: object, on_ready: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, on_ready)  # type: ignore[arg-type]


def main() -> int:
    """Run under a `Stack`: read the config from standard input, write events to standard output."""
    go_on_after_parent()  # before the checks that notice a parent that is dead already
    configure_logging(SUPERVISOR)
    name_process(f"slip:{SUPERVISOR}")
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(STANDARD_INPUT, 65536)
        if not chunk:
            return 1  # the parent died before it had sent the whole config
        line += chunk
    config = msgspec.json.decode(line, type=SupervisorConfig)

    events = LineWriter(sys.stdout.fileno())  # never blocks, however late events are read
    beat = partial(events.offer, msgspec.json.encode(SupervisorBeat())) if config.beats else None
    return Supervisor(config, lambda event: events.write(msgspec.json.encode(event)), beat).run()


if __name__ == "__main__":
    sys.exit(main())
