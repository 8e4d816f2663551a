"""Starts a process that a child of the supervisor runs itself, which dies with that child.

It is a fork where its module is imported already and this process has no threads, else a program.
A fork takes milliseconds, and shares the memory of what is imported.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

from slipstream_ipc.forked_process import ForkedProcess, fork
from slipstream_ipc.process import (
    CONTROL_FD_VARIABLE,
    NAME_VARIABLE,
    PARENT_PID_VARIABLE,
    STATUS_FD_VARIABLE,
    VERSION_VARIABLE,
    installed_version,
)

StartedProcess = subprocess.Popen[bytes] | ForkedProcess

_STANDARD_ERROR = 2


def start_own_process(
    module: str,
    config: bytes,
    name: str,
    *,
    descriptors: Sequence[int] = (),
    status_fd: int | None = None,
) -> StartedProcess:
    """A new process that runs the `main` of `module`; `top` shows it as `name`.

    Called on the main thread, as the process dies with the thread that started it. config: what it
    reads from its standard input. descriptors: ours, which it gets under the same numbers.
    status_fd: of them, where it writes its status lines, such as that another version than this
    process's is installed by now. Raises: OSError.
    """
    environment = {PARENT_PID_VARIABLE: str(os.getpid()), NAME_VARIABLE: name}
    if status_fd is not None:
        environment |= {STATUS_FD_VARIABLE: str(status_fd), VERSION_VARIABLE: installed_version()}
    unset = [each for each in (STATUS_FD_VARIABLE, CONTROL_FD_VARIABLE) if each not in environment]
    if module in sys.modules:
        with contextlib.suppress(OSError):  # it has threads, as it does whenever it serves
            return _forked(module, config, environment, descriptors, unset)
    inherited = {key: value for key, value in os.environ.items() if key not in unset}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=_STANDARD_ERROR,
        pass_fds=descriptors,
        env={**inherited, **environment},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(config)  # one that has died already is noticed by its end
    return process


def _forked(
    module: str,
    config: bytes,
    environment: dict[str, str],
    descriptors: Sequence[int],
    unset: Sequence[str],
) -> ForkedProcess:
    """Raises: OSError."""
    fd = os.memfd_create("slipstream-config")
    try:
        os.write(fd, config)
        os.lseek(fd, 0, os.SEEK_SET)
        given = {0: fd, **{each: each for each in descriptors}}
        return fork(sys.modules[module].main, given, environment, unset=unset)
    finally:
        os.close(fd)
