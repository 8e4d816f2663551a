"""Checks if a server can be expected at an ipc:// address, without asking it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from pathlib import Path

from slipstream.client.endpoints import LOCK_NAME
from slipstream_ipc.transport.addresses import IPC


def why_absent(address: str) -> str | None:
    """The reason why no server answers at this address.

    None where one may: something listens there, a stack that starts or restarts holds the folder,
    or the address is not an ipc:// one.
    """
    if not address.startswith(IPC):
        return None
    path = Path(address.removeprefix(IPC))
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.setblocking(False)  # a full backlog is EAGAIN
        # the kernel is asked, as ZeroMQ retries without a word (decision 027)
        code = probe.connect_ex(str(path))
    if code == errno.ENOENT:
        why = "there is no such socket"
    elif code == errno.ECONNREFUSED:
        why = "nothing listens on that socket"
    else:
        return None
    return None if _has_supervisor(path.parent) else why


def _has_supervisor(folder: Path) -> bool:
    """True if a stack runs in the folder, as far as its lock file shows."""
    try:
        owner = int((folder / LOCK_NAME).read_text())
        os.kill(owner, 0)
        return not _is_zombie(owner)
    except FileNotFoundError:
        return False
    except ProcessLookupError:
        return False  # it was killed
    except (OSError, ValueError):
        return True  # not to be read, of another user, or about to be written


def _is_zombie(pid: int) -> bool:
    """True if the process has ended and its parent has not noticed yet; False where this kernel
    cannot tell. Raises: ProcessLookupError.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return False
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(pidfd)
