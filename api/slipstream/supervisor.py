"""The supervisor: starts a stack's processes, watches them, ends them together.

Owns: one loop over the children's status pipes, signals (child exits among them) and, when a
`Stack` started it, that process's life. Does not know: what the children do, what a model is.

Rules:
- Ready means that every child said so. A child that ends unasked, or reports an error, ends the
  whole stack with code 1; only the first failure is told, the others follow from it.
- Stopping: SIGTERM to all that are ready, SIGKILL to the others, and to all after STOP_S or a
  second signal. Nothing is left: no process, no socket, no folder that was made here.
- Failures before ready are told through `report` alone (whoever started us shows them), later
  ones in the log too.
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

import msgspec

from slipstream.events import Event, ProcessReady, StackFailed, StackReady, SupervisorConfig
from slipstream.processes import Child, ChildSpec
from slipstream.runtime_dir import RuntimeDirectory, RuntimeDirectoryInUse
from slipstream.signals import SignalQueue

STOP_S = 3.0  # from SIGTERM to SIGKILL
_GIVE_UP_S = 1.0  # from SIGKILL until we leave a child that even that does not end
_STANDARD_INPUT = 0
_logger = logging.getLogger(__name__)


class Supervisor:
    """Runs one stack in the calling thread, which must be the main one."""

    def __init__(self, config: SupervisorConfig, report: Callable[[Event], None]) -> None:
        self._config = config
        self._report = report
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._is_ready = self._is_stopping = self._is_killing = False
        self._deadline: float | None = None
        self._exit_code = 0

    def run(self) -> int:
        """Run the stack to its end; the exit code, 0 where it ended because it was asked to."""
        try:
            with (
                RuntimeDirectory(Path(self._config.runtime_dir)),
                SignalQueue(
                    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD
                ) as signals,
                contextlib.ExitStack() as cleanup,
            ):
                cleanup.callback(self._selector.close)
                cleanup.callback(self._leave_nobody)
                self._watch(signals, partial(self._on_signals, signals))
                if self._config.parent_pid is not None:
                    self._watch_parent(self._config.parent_pid, cleanup)
                for spec in self._config.children:
                    self._start(spec)
                self._loop()
        except (RuntimeDirectoryInUse, OSError) as error:
            self._fail(str(error))
        return self._exit_code

    def _loop(self) -> None:
        while any(child.state != "gone" for child in self._children):
            wait_s = None if self._deadline is None else max(0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._is_killing:
                    self._abandon()
                    return
                self._kill(f"not stopped {STOP_S:g} s after SIGTERM")

    # ---- what may happen -----------------------------------------------------------------

    def _on_status(self, child: Child) -> None:
        if child.status.has_ended():
            return  # noticed already, by an event of the same round
        became_ready = child.read_status()
        if child.status.has_ended():
            self._selector.unregister(child.status)
        if child.error and not self._is_stopping:
            self._fail(f"{child.name}: {child.error}")
        elif became_ready:
            self._report(ProcessReady(child.name, child.pid, child.detail, child.seconds))
            if all(one.state == "ready" for one in self._children) and not self._is_stopping:
                self._is_ready = True
                self._report(StackReady(self._config.address))

    def _on_signals(self, signals: SignalQueue) -> None:
        for number in signals.drain():
            if number == signal.SIGCHLD:
                self._on_exits()
            elif self._is_stopping:
                self._kill(f"second signal, {number.name}")
            else:
                self._stop(number.name)

    def _on_exits(self) -> None:
        for child in self._children:
            if child.state == "gone" or not child.has_ended():
                continue
            self._on_status(child)  # its last words come before its end
            if not child.status.has_ended():
                self._selector.unregister(child.status)
            pid, was_ready = child.pid, child.state == "ready"
            how = child.reap()
            if self._is_stopping:
                _logger.debug("%s (process %d) ended: %s", child.name, pid, how)
            else:
                when = "unexpectedly" if was_ready else "before it was ready"
                self._fail(f"{child.name} (process {pid}) ended {when}: {how}")

    def _on_parent(self) -> None:
        """The parent closed our standard input, or died; it has nothing to say there."""
        with contextlib.suppress(BlockingIOError):
            if os.read(_STANDARD_INPUT, 4096) == b"":
                self._selector.unregister(_STANDARD_INPUT)
                self._stop("parent asked")

    # ---- what follows --------------------------------------------------------------------

    def _start(self, spec: ChildSpec) -> None:
        if self._is_stopping:
            return
        try:
            child = Child(spec)
        except OSError as error:
            self._fail(f"{spec.name}: cannot be started: {error}")
            return
        self._children.append(child)
        self._watch(child.status, partial(self._on_status, child))
        _logger.info("started %s as process %d", child.name, child.pid)

    def _fail(self, error: str) -> None:
        self._exit_code = 1
        if self._is_ready:
            _logger.error("%s; the stack ends", error)
        self._report(StackFailed(error))
        self._stop("failure")

    def _stop(self, reason: str) -> None:
        if self._is_stopping:
            return
        _logger.info("stopping (%s)", reason)
        self._is_stopping = True
        self._deadline = time.monotonic() + STOP_S
        for child in self._children:
            if child.state == "starting":
                child.kill()  # it serves nobody yet, and may not listen until it has loaded
            else:
                child.terminate()

    def _kill(self, reason: str) -> None:
        self._is_killing = True
        self._deadline = time.monotonic() + _GIVE_UP_S
        for child in self._children:
            if child.state != "gone":
                _logger.warning("killing %s (process %d): %s", child.name, child.pid, reason)
                child.kill()

    def _leave_nobody(self) -> None:
        for child in self._children:
            child.kill()  # only an error of our own can have left one alive

    def _abandon(self) -> None:
        self._exit_code = 1
        for child in self._children:
            if child.state != "gone":
                _logger.error("%s (process %d) survives SIGKILL", child.name, child.pid)

    # ---- what to look at -----------------------------------------------------------------

    def _watch(self, source: object, on_ready: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, on_ready)  # type: ignore[arg-type]

    def _watch_parent(self, parent: int, cleanup: contextlib.ExitStack) -> None:
        """Standard input's end is the parent's wish; its pidfd tells of a death that leaves the
        pipe open because a fork of it holds the other end.
        """
        os.set_blocking(_STANDARD_INPUT, False)
        self._watch(_STANDARD_INPUT, self._on_parent)
        with contextlib.suppress(AttributeError, OSError):  # an old kernel: the pipe must do
            pidfd = os.pidfd_open(parent)
            cleanup.callback(os.close, pidfd)
            self._watch(pidfd, partial(self._on_parent_death, pidfd))
        if os.getppid() != parent:
            self._stop("parent is gone")

    def _on_parent_death(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        self._stop("parent died")


def log_to_stderr() -> None:
    """The supervisor's own lines, in the form the children's have."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("SLIPSTREAM_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s supervisor %(levelname)s %(message)s",
    )


def main() -> int:
    """For a `Stack`: the config on standard input, events on standard output."""
    log_to_stderr()
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(_STANDARD_INPUT, 65536)
        if not chunk:
            return 1  # the parent died while it spoke
        line += chunk
    config = msgspec.json.decode(line, type=SupervisorConfig)

    def report(event: Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            os.write(sys.stdout.fileno(), msgspec.json.encode(event) + b"\n")

    return Supervisor(config, report).run()


if __name__ == "__main__":
    sys.exit(main())
