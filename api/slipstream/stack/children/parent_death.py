"""The parent-death signal of a child that is executed, set before its first line of Python runs."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with(parent: int) -> Callable[[], None]:
    """Return a function for a child to call between fork and exec, so that it is killed when
    `parent` dies. The signal is bound to the thread that forks.
    """

    def in_the_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl was called
            os._exit(1)

    return in_the_child
