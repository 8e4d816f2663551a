"""One child process of a stack: how it is started, what it says, how it ends.

Owns: the parent's half of the contract in `slipstream_ipc.child`. Does not know: what the
processes do, which others there are, or what follows from an end.

Rules:
- A child is started from the main thread (the parent-death signal is bound to the thread that
  forks) and has that signal before its first line of Python runs: no child outlives its parent,
  however early the parent dies.
- A child leads a process group of its own, so a terminal's Ctrl-C reaches the supervisor alone,
  and whatever a child started itself is gone when the child is reaped.
- A child's standard output is our standard error: our own standard output stays ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from slipstream.lines import LineReader
from slipstream_ipc.child import STATUS_FD_VARIABLE
from slipstream_ipc.messages import Status

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
_libc = ctypes.CDLL(None)


class ChildSpec(msgspec.Struct, frozen=True):
    """What to start: `argv`, fed with `config` (JSON) on its standard input."""

    name: str
    argv: tuple[str, ...]
    config: msgspec.Raw


class Child:
    """A child process, from its start to its last breath.

    starting -> ready -> gone, or straight to gone.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.name = spec.name
        self.state: Literal["starting", "ready", "gone"] = "starting"
        self.detail = ""
        self.error = ""  # what it reported before it ended, for the user
        self.seconds = 0.0  # from its start until it was ready
        self._started = time.monotonic()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self.status = LineReader(read_fd)
        try:
            self._process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.PIPE,
                stdout=_STANDARD_ERROR,
                pass_fds=(write_fd,),
                env={**os.environ, STATUS_FD_VARIABLE: str(write_fd)},
                process_group=0,
                preexec_fn=_dying_with(os.getpid()),  # safe: the supervisor has one thread
            )
        except BaseException:
            self.status.close()
            raise
        finally:
            os.close(write_fd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(bytes(spec.config))  # a child that is gone already is noticed by its exit

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        return self._process.pid

    def read_status(self) -> bool:
        """Take in what it said; True where that made it ready."""
        was_ready = self.state == "ready"
        for line in self.status.read():
            try:
                status = msgspec.json.decode(line, type=Status)
            except msgspec.DecodeError as error:
                self.error = self.error or f"it reported {line!r}, which is no status: {error}"
                continue
            self.error = self.error or status.error
            self.detail = status.detail or self.detail
            if status.ready and self.state == "starting":
                self.state = "ready"
                self.seconds = time.monotonic() - self._started
        return self.state == "ready" and not was_ready

    def has_ended(self) -> bool:
        """Whether it has ended; it stays a zombie until `reap`, so its number stays its own."""
        if self.state == "gone":
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def terminate(self) -> None:
        """Ask it to stop."""
        if self.state != "gone":
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all it started, now."""
        if self.state != "gone":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> str:
        """After its end: take its group with it, let go of it, say how it ended."""
        self.kill()
        code = self._process.wait()
        self.status.close()
        self.state = "gone"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _dying_with(parent: int) -> Callable[[], None]:
    def in_the_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(1)

    return in_the_child
