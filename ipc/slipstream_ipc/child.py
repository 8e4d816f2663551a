"""What every child process of a stack does the same way: start, log, report, stop.

Owns: the contract between a parent and its child. A parent starts `python -m MODULE`, writes one
JSON config to the child's standard input and closes it, and names a descriptor in the environment
variable STATUS_FD_VARIABLE, to which the child writes `Status` lines (JSON). SIGTERM asks a child
to stop; SIGINT is the parent's business. When the parent dies, so does the child.

Does not know: what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from types import FrameType
from typing import TypeVar

import msgspec

from slipstream_ipc.messages import Status

STATUS_FD_VARIABLE = "SLIPSTREAM_STATUS_FD"

Config = TypeVar("Config")

_PR_SET_PDEATHSIG = 1


class StopSignal:
    """SIGTERM as something a poller can wait for."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.is_set = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def fileno(self) -> int:
        """Readable once the signal has come."""
        return self._read_fd

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True
        os.write(self._write_fd, b"\0")


def start_child(name: str, config_type: type[Config]) -> tuple[Config, StopSignal]:
    """The first thing a child does: its logging, its config, its stop signal, its parent's death.

    Exits with a status line and code 2 where the config is wrong.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("SLIPSTREAM_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
    )
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to be told
        sys.exit(1)
    stop = StopSignal()
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=config_type), stop
    except msgspec.DecodeError as error:
        report(Status(error=f"configuration of {name}: {error}"))
        sys.exit(2)


def report(status: Status) -> None:
    """Tell the parent, if one listens."""
    fd = os.environ.get(STATUS_FD_VARIABLE)
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):  # it has heard enough, or is dying
            os.write(int(fd), msgspec.json.encode(status) + b"\n")
