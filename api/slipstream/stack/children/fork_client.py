"""The side of the fork server (`slipstream_ipc.fork_server`) that starts it: a supervisor, or a
process that starts several supervisors.

Children whose modules are imported there are forked, in milliseconds and with shared memory.
Without the server, or where it fails, they are started as programs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from slipstream_ipc.child import ChildProcess, execute, module_command
from slipstream_ipc.fork_server import (
    ENVIRONMENT,
    SOCKET_FD_VARIABLE,
    Fork,
    Forked,
    ForkServerAnswer,
    Preload,
    Preloaded,
    Refused,
)
from slipstream_ipc.process import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_FORK_S = 5.0  # in which a fork is answered; it takes milliseconds
_MAX_ANSWER_BYTES = 4096
_logger = logging.getLogger(__name__)


class ForkRefusedError(OSError):
    """The fork server answers that it could not fork; the next fork may succeed."""


class ForkClient:
    """A running fork server. One request is unanswered at a time."""

    def __init__(
        self, preloads: Sequence[Preload], *, stays_reaper: bool = True, fork_s: float = _FORK_S
    ) -> None:
        """Start it, and have it import `preloads` in this order. stays_reaper: this process goes on
        as the reaper of its descendants' orphans, not only while it forks. fork_s: seconds in which
        a fork is answered. Raises: OSError.
        """
        self._decode = msgspec.json.Decoder[ForkServerAnswer](ForkServerAnswer).decode
        self._waiting = deque(preloads)  # not imported yet
        self._is_importing = False  # the first of them
        self._preloaded: set[str] = set()
        self._stays_reaper = stays_reaper
        if stays_reaper:
            _become_reaper(True)
        self._socket, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with end:
                self._process = execute(
                    module_command("slipstream_ipc.fork_server"),
                    {**os.environ, **ENVIRONMENT, SOCKET_FD_VARIABLE: str(end.fileno())},
                    descriptors=(end.fileno(),),
                    leads="group",
                    before=partial(die_with_parent, os.getpid()),
                )
            self._socket.settimeout(fork_s)
            self.preload_next()
        except BaseException:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when a module is imported, or the server has ended."""
        return self._socket.fileno()

    @property
    def has_awaited(self) -> bool:
        """True if a module is going to be imported but is not yet."""
        return bool(self._waiting)

    def is_awaited(self, module: str) -> bool:
        """True if this module is going to be imported but is not yet."""
        return any(one.module == module for one in self._waiting)

    def read(self) -> None:
        """Read the answer to a `Preload`. Raises: OSError where the server has failed."""
        answer = self._answer()
        if not self._is_importing:
            raise ConnectionAbortedError("the fork server answers what was not asked")
        done = self._waiting.popleft()
        if isinstance(answer, Preloaded):
            self._preloaded.add(done.module)
        else:
            why = answer.why if isinstance(answer, Refused) else "an unexpected answer"
            _logger.warning("%s is not forked but started anew: %s", done.module, why)
        self._is_importing = False

    def preload_next(self) -> None:
        """Import the next module, if any is left. Raises: OSError."""
        if self._waiting and not self._is_importing:
            self._socket.send(msgspec.json.encode(self._waiting[0]))
            self._is_importing = True

    def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        is_whole: bool = False,
        leads_session: bool = False,
    ) -> ChildProcess | None:
        """A child of this process that runs `module`; None where the server has not imported it, or
        is importing another one. descriptors: ours, by the number that the child gets. is_whole,
        leads_session: see `Fork`.

        Raises: ForkRefusedError; OSError where the server has failed.
        """
        if module not in self._preloaded or self._is_importing:
            return None
        fork = Fork(module, dict(environment), tuple(descriptors), is_whole, leads_session)
        try:
            request = msgspec.json.encode(fork)
        except UnicodeEncodeError:  # only a program can be given such a variable
            raise ForkRefusedError("its environment is not UTF-8") from None
        if not self._stays_reaper:
            _become_reaper(True)
        try:
            socket.send_fds(self._socket, [request], list(descriptors.values()))
            answer = self._answer()
        finally:
            if not self._stays_reaper:
                _become_reaper(False)
        if isinstance(answer, Forked):
            return ChildProcess(answer.pid, leads_group=not leads_session)
        if isinstance(answer, Refused):
            raise ForkRefusedError(answer.why)
        raise ConnectionAbortedError("an unexpected answer")

    def kill(self) -> None:
        """Kill it, which `read` then reports. What it forked lives on."""
        self._waiting.clear()
        self._preloaded.clear()
        self._process.kill()

    def close(self) -> None:
        """Kill and reap it."""
        self._process.reap()
        self._socket.close()

    def _answer(self) -> ForkServerAnswer:
        line = self._socket.recv(_MAX_ANSWER_BYTES)
        if not line:
            raise ConnectionResetError("the fork server has ended")
        try:
            answer: ForkServerAnswer = self._decode(line)
        except msgspec.DecodeError as error:
            raise ConnectionAbortedError(f"the fork server answers nonsense: {error}") from None
        return answer


def _become_reaper(is_one: bool) -> None:
    """Set whether this process adopts orphans, as children of a fork server at once are."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0)  # decision 013
