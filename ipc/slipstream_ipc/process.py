"""What every child process of a stack does the same way: start, log, report, beat, obey, stop.

Owns: the contract between a parent and its child. A parent starts `python -m MODULE` and writes one
JSON config to the child's standard input. Environment variables name the parent's process id and
two descriptors: to one the child writes `Status` lines (JSON), from the other it reads commands.
SIGTERM asks a child to stop; SIGINT is the parent's business. When the parent dies, so does the
child, however early.

Does not know: what the processes do.

Rules:
- A child serves from `Activate` on and not before: it binds no address and takes no memory for a
  model until then, so that it can wait as a spare beside the process that it will replace.
- The loop that does a child's work writes its beats, so their absence says that the loop hangs.
  From the first beat on they are expected, until the child says that it is `loading`, and again
  from when it is ready.
- A child never waits for its parent to read: a beat that finds no room is dropped. It is written
  as a whole or not at all, so it takes at most PIPE_BUF bytes; numbers that do not fit stay away.
- A child's own files in the runtime directory are named `*-PID.sock`: its parent removes them when
  it has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, TypeVar

import msgspec

from slipstream_ipc.messages import State, Status
from slipstream_ipc.telemetry.statistics import Numbers, Statistics
from slipstream_ipc.transport.connections import raise_file_limit

STATUS_FD_VARIABLE = "SLIPSTREAM_STATUS_FD"
CONTROL_FD_VARIABLE = "SLIPSTREAM_CONTROL_FD"
PARENT_PID_VARIABLE = "SLIPSTREAM_PARENT_PID"
BEAT_S = 0.5  # between two beats; a loop that beats turns at least as often
NEWS_S = 0.1  # the same, where there is news
SILENT_S = 4 * BEAT_S  # without a beat, from when on a process is called silent

Config = TypeVar("Config")

_logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 65536
_MAX_LAST_WORDS = 400  # characters


class Activate(msgspec.Struct, frozen=True, tag=True):
    """Serve from now on.

    incarnation: larger than those of all who served in this place before. died_within: whether the
    last of them died of what it did itself: an exception, a fatal signal that nobody sent, a hang
    in which it was busy, want of memory.
    """

    incarnation: int = 0
    died_within: bool = False


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take in nothing new; what still runs after `within_s` is to be ended. Then say `drained`."""

    within_s: float


class Condition(msgspec.Struct, frozen=True, tag=True):
    """How the stack's processes are, by name, for a child that tells others; those that a child
    keeps itself are among them.

    `starting` until one was ready for the first time, `restarting` while a dead one's successor is
    not; `ready`; `silent` where one that beats has not done so for a while.
    """

    processes: dict[str, str]


Command = Activate | Drain | Condition | Statistics


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
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")


class ParentCommands:
    """What the parent commands. A child whose parent cannot command is active at once."""

    def __init__(self) -> None:
        self._rest = b""
        self._waiting: list[Command] = []
        self._decode = msgspec.json.Decoder[Command](Command).decode
        given = os.environ.pop(CONTROL_FD_VARIABLE, None)
        if given is None:
            self._fd, self._held_open = os.pipe2(os.O_CLOEXEC)  # nothing ever comes of it
            self._waiting.append(Activate())
        else:
            self._fd = int(given)
            os.set_inheritable(self._fd, False)
        os.set_blocking(self._fd, False)

    def fileno(self) -> int:
        """Readable when a command has come."""
        return self._fd

    @property
    def any_waiting(self) -> bool:
        """Whether `read` would give some, or end this process."""
        return bool(self._waiting or select.select([self._fd], [], [], 0)[0])

    def read_activation(self) -> Activate | None:
        """The activation, where it has come; what was said after it is read later.

        The parent may tell a child at once that it serves and that the stack drains.
        """
        commands = self.read()
        for number, command in enumerate(commands):
            if isinstance(command, Activate):
                self._waiting = commands[number + 1 :]
                return command
        return None

    def read(self) -> list[Command]:
        """Those that have come since; what is none is a line in the log. Ends this process where
        nobody is left who could command.
        """
        commands, self._waiting = self._waiting, []
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return commands
        if not chunk:
            sys.exit(1)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            try:
                commands.append(self._decode(line))
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                _logger.error("the parent sent %d bytes that are no command: %s", len(line), error)
        return commands


class Beats:
    """The signs of life of the loop that calls `beat` in each of its turns."""

    def __init__(self) -> None:
        self._due = self._news_due = 0.0
        self._told: object = None

    def beat(
        self,
        now: float,
        numbers: Callable[[], Numbers] | None = None,
        processes: dict[str, State] | None = None,
        news: object = None,
    ) -> bool:
        """Write a beat if one is due, with what was counted by then; whether it was.

        processes: how those are that this one keeps itself. news: where it is another than in the
        beat before, the next one is due sooner: else the first instant of what has just begun
        would be told for as long as half of it may take.
        """
        if now < (self._due if news == self._told else self._news_due):
            return False
        self._due = now + BEAT_S / 2  # so that a loop that sleeps for BEAT_S never skips one
        self._news_due = now + NEWS_S
        self._told = news
        counted = None if numbers is None else numbers()
        report(Status(beat=True, numbers=counted, processes=processes or {}))
        return True


def start_child(name: str, config_type: type[Config]) -> tuple[Config, StopSignal]:
    """The first thing a child does: its logging, its config, its stop signal, its parent's death,
    as many files as it may have.

    Exits with a status line and code 2 where the config is wrong.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("SLIPSTREAM_LOG_LEVEL", "INFO").upper(),
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
    )
    parent = int(os.environ.pop(PARENT_PID_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to be told
        sys.exit(1)
    status_fd = os.environ.get(STATUS_FD_VARIABLE)
    if status_fd is not None:
        os.set_inheritable(int(status_fd), False)
        os.set_blocking(int(status_fd), False)
        sys.excepthook = _die_of
    raise_file_limit()
    stop = StopSignal()
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=config_type), stop
    except msgspec.DecodeError as error:
        report(Status(error=f"configuration of {name}: {error}"))
        sys.exit(2)


def run_child(main: Callable[[], int]) -> NoReturn:
    """Run a child's `main` and end the process with its code, without the interpreter's tear-down.

    By then everything is closed. Tear-down takes a core 0.1 to 0.3 s, and libraries use it to talk
    about themselves: torch 2.15 fills 25 lines of a terminal with what nanobind believes leaked.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as ending:
        code = ending.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nothing reads it any more
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def wait_for_activation(
    commands: ParentCommands, stop: StopSignal, beats: Beats
) -> Activate | None:
    """What a spare does, with beats; None where the stop signal comes first."""
    while not stop.is_set:
        if (activation := commands.read_activation()) is not None:
            return activation
        beats.beat(time.monotonic())
        select.select([commands.fileno(), stop.fileno()], [], [], BEAT_S)
    return None


def prepare(work: Callable[[], None], commands: ParentCommands) -> None:
    """Do `work` before `Activate`, or beside another who serves: then with less of the processors.

    A spare's imports take seconds of a core that those who serve have a use for. Niceness is a
    thread's own and cannot be taken back, so they are a thread's of their own. Where their place
    falls free meanwhile they go on like that: who died needs no processor any more.
    """
    if commands.any_waiting:
        work()
        return
    raised: list[BaseException] = []

    def gently() -> None:
        try:
            with contextlib.suppress(OSError):  # not everywhere may a thread be nice alone
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _niceness_of_spares())
            work()
        except BaseException as error:  # the main thread's to raise
            raised.append(error)

    thread = threading.Thread(target=gently, name="prepare")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _niceness_of_spares() -> int:
    return min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)


def report(status: Status) -> None:
    """Tell the parent, if one listens."""
    given = os.environ.get(STATUS_FD_VARIABLE)
    if given is None:
        return
    fd = int(given)
    line = msgspec.json.encode(status) + b"\n"
    if status.beat and len(line) > select.PIPE_BUF:
        line = msgspec.json.encode(msgspec.structs.replace(status, numbers=None)) + b"\n"
    with contextlib.suppress(BrokenPipeError):  # it has heard enough, or is dying
        while line:
            try:
                line = line[os.write(fd, line) :]
            except BlockingIOError:
                if status.beat:
                    return  # it says nothing that the beats before it do not say
                select.select([], [fd], [])


def _die_of(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """What nobody caught ends the process here: to tear down what is broken may take for ever."""
    words = " ".join(f"{kind.__name__}: {error}".split())
    report(Status(last_words=words[:_MAX_LAST_WORDS]))
    sys.__excepthook__(kind, error, traceback)
    sys.stderr.flush()
    os._exit(1)
