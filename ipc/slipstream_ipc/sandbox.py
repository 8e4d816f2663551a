"""A process that does one thing at a time for its parent, and that a bad request may kill.

Its memory and the processor time of each request are bounded. `Sandbox` is the parent's side: the
process is replaced when it dies, and a request over which two processes died is to blame; a single
death might have had an outside cause. `answer_requests` is the process's own side.

- A message is its length in bytes, then its bytes; what they mean is for the two sides.
- The process speaks first: why it cannot start, or nothing.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable
from io import BufferedIOBase, BufferedRWPair
from typing import TypeVar

import msgspec

from slipstream_ipc.child import ChildProcess, start_own_process

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 8
_MAX_DEATHS = 2
_SILENT_S = 120.0  # of a process that neither answers nor exceeds its processor time
_MAX_ANSWER_BYTES = 2**31
_MAX_MEMORY_BYTES = 2**32  # of address space

Answer = TypeVar("Answer")


class DeadlyRequest(Exception):  # noqa: N818  (an outcome)
    """A request that kills its process. is_slow: it takes more processor time than there is."""

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        super().__init__()


class _Died(Exception):  # noqa: N818  (an outcome)
    """The process ended, or was killed, over a request."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"code {code}")


class Sandbox:
    """The parent's side. It starts the process with the first request, or before; one thread at a
    time asks.
    """

    def __init__(self, name: str, module: str, config: Callable[[int], bytes]) -> None:
        """name: of the process. module: whose `main` it runs. config: what that reads from its
        standard input, for the descriptor of its socket.
        """
        self._name = name
        self._module = module
        self._config = config
        self._process: ChildProcess | None = None
        self._stream: BufferedRWPair | None = None
        self._starting: BufferedRWPair | None = None  # to a process that is not ready yet
        self._lock = threading.Lock()  # guards starting and ending the process
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process that runs; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, which gets ready meanwhile. Raises OSError."""
        if self._starting is None and self._stream is None:
            self._starting = self._start()

    def ask(self, asked: bytes, decode: Callable[[bytes], Answer]) -> Answer:
        """The answer to a request; blocks. decode: raises msgspec.DecodeError for what is no
        answer, which counts as a death.

        Raises DeadlyRequest; OSError where no process starts.
        """
        for _ in range(_MAX_DEATHS):
            stream = self._ready_stream()
            try:
                return self._answer(stream, decode, asked)
            except _Died as death:
                logger.warning("the %s process died over a request (%s)", self._name, death)
                if death.code == -signal.SIGPROF:
                    raise DeadlyRequest(is_slow=True) from death
        raise DeadlyRequest(is_slow=False)

    def close(self) -> None:
        """Kill the process, whatever it is doing. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.reap()

    def _ready_stream(self) -> BufferedRWPair:
        if self._stream is None:
            stream, self._starting = self._starting or self._start(), None
            try:
                why_not = self._answer(stream, bytes.decode)
            except _Died as death:
                raise OSError(f"the {self._name} process cannot start ({death})") from death
            if why_not:
                raise OSError(why_not)
            self._stream = stream
        return self._stream

    def _start(self) -> BufferedRWPair:
        own_end, end = socket.socketpair()
        own_end.settimeout(_SILENT_S)
        with end, own_end, self._lock:
            if self._is_closed:
                raise OSError(f"the {self._name} process is not needed any more")
            self._process = start_own_process(
                self._module,
                self._config(end.fileno()),
                self._name,
                descriptors=(end.fileno(),),
                may_fork=False,  # its memory is bounded, and its parent's is large
            )
            return own_end.makefile("rwb")

    def _answer(
        self, stream: BufferedRWPair, decode: Callable[[bytes], Answer], asked: bytes | None = None
    ) -> Answer:
        try:
            if asked is not None:
                _write(stream, asked)
            if (answer := _read(stream, _MAX_ANSWER_BYTES)) is not None:
                return decode(answer)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):
            pass
        assert self._process is not None
        code = self._process.reap()  # in case it has only fallen silent
        self._stream = None
        with contextlib.suppress(OSError):  # from flushing what was not sent
            stream.close()
        raise _Died(code)


def bound_memory() -> None:
    """Bound this process's address space, and have it leave no core file when it dies."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))


def answer_requests(
    fd: int, answer: Callable[[bytes], bytes], max_cpu_s: float, why_not: str = ""
) -> None:
    """Answer until the parent closes its end of the socket. max_cpu_s: of a request, after which
    this process ends. why_not: the reason why it cannot answer any, which the parent is told.
    """
    with socket.socket(fileno=fd) as parent, parent.makefile("rwb") as stream:
        _write(stream, why_not.encode())
        while not why_not and (asked := _read(stream)) is not None:
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF ends the process
            answered = answer(asked)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            _write(stream, answered)


def _write(stream: BufferedIOBase, data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    stream.flush()


def _read(stream: BufferedIOBase, max_bytes: int | None = None) -> bytes | None:
    """None where the other side has ended, or says more than `max_bytes`."""
    head = stream.read(_LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    if len(head) < _LENGTH_BYTES or (max_bytes is not None and size > max_bytes):
        return None
    data = stream.read(size)
    return data if len(data) == size else None
