"""Forks of this process that go on as programs which need not import everything again.

- Only a process with a single thread is forked: another thread may hold a lock, which no thread of
  the copy would ever release. The teams of OpenMP and BLAS are threads, so a process that has run a
  parallel region is not forked either.
- The copy keeps the descriptors it is given and the standard streams, as an executed program would.
- A copy's imports are older than the files: see `slipstream_ipc.process` on versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_NUM_STREAMS = 3
# that a parent may handle, and a fork of it does not
RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class CannotForkError(OSError):
    """This process has threads."""


def check_single_threaded() -> None:
    """Raises: CannotForkError where this process has other threads, of whatever library."""
    # asked of the kernel: teams of OpenMP and BLAS are threads, too (decision 013)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        raise CannotForkError(f"it has {num_threads} threads")


def become(
    main: Callable[[], int],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    *,
    unset: Sequence[str] = (),
) -> NoReturn:
    """Go on in a fork as a program that was just started, and exit with the code of `main`.

    descriptors: those to keep besides the standard streams, by the number that each one gets.
    environment, unset: variables to set, and to remove.
    """
    code = 1
    try:
        for number in RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RESET_SIGNALS)
        sys.excepthook = sys.__excepthook__
        _keep(descriptors)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the one before may have been read
        os.environ.update(environment)
        for name in unset:
            os.environ.pop(name, None)
        logging.root.handlers.clear()
        gc.enable()
        code = main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # none may reach what called the fork
        sys.excepthook(*sys.exc_info())
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or the reader is gone
                stream.flush()
        os._exit(code)


def _keep(descriptors: Mapping[int, int]) -> None:
    first = max((_NUM_STREAMS - 1, *descriptors, *descriptors.values())) + 1
    moved = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first) for number, fd in descriptors.items()
    }
    kept = {*range(_NUM_STREAMS), *moved.values()}
    for name in os.listdir("/proc/self/fd"):  # the listing's own is closed by now
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=number < _NUM_STREAMS)
        os.close(fd)
