"""The fork server: imports what several processes of a stack need once, and forks them.

A supervisor starts it and asks for one thing at a time. What is forked becomes a child of the
supervisor, as if it had started it: the supervisor is the reaper of orphans, and the server forks
through a process that ends at once. So the server may die without consequence for what it forked.

- The server never has a second thread, which is checked before each fork, and runs no operator of a
  model. BLAS is told to use one thread; OpenMP makes its team in the first parallel region.
- What is imported is exempt from garbage collection before a fork, as a collection in one process
  would copy the pages that all of them share.
- It ends with the supervisor: by its parent's death, or the end of its socket.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
from typing import NoReturn

import msgspec

from slipstream_ipc.errors import brief
from slipstream_ipc.forked_process import become, check_single_threaded
from slipstream_ipc.process import die_with_parent, freeze_gc, name_process, run_child
from slipstream_ipc.telemetry.logs import configure_logging

FORK_SERVER = "forkserver"
SOCKET_FD_VARIABLE = "SLIPSTREAM_FORK_SERVER_FD"
# of every process: else numpy's import starts a thread per CPU, which takes a third of its time
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_MAX_REQUEST_BYTES = 2**17
_MAX_DESCRIPTORS = 64
_logger = logging.getLogger(__name__)


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import the module of a child process, and call its `preload`, where it has one, with
    `config`.
    """

    module: str
    config: msgspec.Raw


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that runs the `main` of `module`.

    environment: variables to set. numbers: of the descriptors that come with this request, as the
    process is to have them. is_whole: `environment` is all that the process has. leads_session: it
    leads a session of its own, not only a process group.
    """

    module: str
    environment: dict[str, str]
    numbers: tuple[int, ...]
    is_whole: bool = False
    leads_session: bool = False


class Preloaded(msgspec.Struct, frozen=True, tag=True):
    """The module is imported."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process runs, leads a process group, and ends with the supervisor."""

    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request has failed."""

    why: str


ForkServerRequest = Preload | Fork
ForkServerAnswer = Preloaded | Forked | Refused


def main() -> int:
    """Serve until the supervisor closes its end."""
    configure_logging(FORK_SERVER)
    name_process(f"slip:{FORK_SERVER}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    die_with_parent(parent)
    fd = int(os.environ.pop(SOCKET_FD_VARIABLE))
    os.set_inheritable(fd, False)
    decode = msgspec.json.Decoder[ForkServerRequest](ForkServerRequest).decode
    gc.disable()
    with socket.socket(fileno=fd) as requests:
        while True:
            line, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
            if not line:
                return 0
            try:
                answer = _answer(decode(line), fds, parent)
            except Exception as error:
                answer = Refused(brief(f"{type(error).__name__}: {error}"))
            for each in fds:
                os.close(each)
            requests.send(msgspec.json.encode(answer))


def _answer(request: ForkServerRequest, fds: list[int], parent: int) -> ForkServerAnswer:
    match request:
        case Preload():
            module = importlib.import_module(request.module)
            if preload := getattr(module, "preload", None):
                preload(bytes(request.config))
            # a collection in a child would copy the pages that all share (decision 013)
            freeze_gc(collects=False)
            check_single_threaded()
            return Preloaded()
        case Fork():
            return Forked(_fork(request, fds, parent))


def _fork(request: Fork, fds: list[int], parent: int) -> int:
    """The pid of a new child of `parent`. Raises: OSError."""
    check_single_threaded()
    said, saying = os.pipe2(os.O_CLOEXEC)
    awaited, orphaned = os.pipe2(os.O_CLOEXEC)
    try:
        # twice: the fork is the supervisor's child once the one between is reaped (decision 013)
        between = os.fork()
        if between == 0:
            try:
                if not os.fork():
                    os.close(orphaned)
                    _run(request, fds, parent, awaited, saying)
            except BaseException as error:  # none may reach the loop, which would serve twice
                _logger.error("cannot fork %s: %s", request.module, error)
            finally:
                os._exit(0)
        os.close(saying)
        os.waitpid(between, 0)
        os.write(orphaned, b"\0")  # its parent is the supervisor from now on
        pid = os.read(said, 16)
    finally:
        for fd in (said, awaited, orphaned):
            os.close(fd)
    if not pid:
        raise ChildProcessError("the forked process ended at once")
    return int(pid)


def _run(request: Fork, fds: list[int], parent: int, awaited: int, saying: int) -> NoReturn:
    """Go on as the process that was asked for."""
    if not os.read(awaited, 1):
        os._exit(1)  # the server has died
    if request.leads_session:
        os.setsid()
    else:
        os.setpgid(0, 0)
    die_with_parent(parent)
    os.write(saying, b"%d" % os.getpid())
    main = importlib.import_module(request.module).main
    others = os.environ.keys() - request.environment.keys() if request.is_whole else ()
    given = dict(zip(request.numbers, fds, strict=True))
    become(main, given, request.environment, unset=tuple(others))


if __name__ == "__main__":
    run_child(main)
