"""Signals as a queue that a selector can wait for.

Nothing runs inside a signal handler; the event loop drains the queue. Only the main thread may use
this, and only one queue may be active at a time.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


class SignalQueue:
    """A context manager within which the given signals are queued instead of handled."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._read_fd = self._write_fd = self._wakeup_before = -1

    def __enter__(self) -> SignalQueue:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in self._numbers:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup: the stack is meant to outlive the terminal
            self._before[number] = signal.signal(number, _queued_by_wakeup_fd)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Readable while signals are queued."""
        return self._read_fd

    def drain(self) -> list[signal.Signals]:
        """The signals since the last call, in order of arrival."""
        try:
            return [signal.Signals(number) for number in os.read(self._read_fd, 4096)]
        except BlockingIOError:
            return []


def has_terminal() -> bool:
    """True if this process has a controlling terminal, whose hang-up is a SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _queued_by_wakeup_fd(_number: int, _frame: FrameType | None) -> None:
    """Python writes to the wakeup descriptor only for signals that have a handler."""
