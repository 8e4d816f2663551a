"""The contract between a parent process and its children: start, log, status, commands, stop.

A parent starts `python -m MODULE` and writes one JSON config to the child's standard input.
Environment variables give the parent's process id and two descriptors: the child writes `Status`
lines (JSON) to one and reads commands from the other. SIGTERM asks a child to stop; SIGINT is left
to the parent. When the parent dies, the child does too, even while it starts.

- A child serves only after `Activate`: until then it binds no address and takes no memory for a
  model, so that it can wait as a spare beside the process that it will replace.
- Beats are written by the loop that does the child's work, so a missing beat means that the loop
  hangs. They are expected from the first beat on, not while the child is `loading`, and again from
  when it is ready.
- A beat never waits for the parent to read: it is dropped if the pipe is full. It is written as a
  whole or not at all, so it has at most PIPE_BUF bytes and leaves out numbers that do not fit.
- Between two versions nothing is promised but the client protocol, so a child that finds another
  version installed than its parent's reports an error.
- `top`, `ps -e` and the kernel's log call a child `slip:NAME`, and `spare:NAME` until it serves.
- A child's files in the runtime directory are named `*-PID.sock`; the parent removes them when the
  child has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, TypeVar

import msgspec

from slipstream_ipc.messages import OwnProcess, Status
from slipstream_ipc.telemetry.logs import configure_logging
from slipstream_ipc.telemetry.spans import Spans
from slipstream_ipc.telemetry.statistics import (
    CoreNumbers,
    Numbers,
    Statistics,
    WorkerNumbers,
    packed_histograms,
)
from slipstream_ipc.transport.connections import raise_file_limit

STATUS_FD_VARIABLE = "SLIPSTREAM_STATUS_FD"
CONTROL_FD_VARIABLE = "SLIPSTREAM_CONTROL_FD"
PARENT_PID_VARIABLE = "SLIPSTREAM_PARENT_PID"
VERSION_VARIABLE = "SLIPSTREAM_PARENT_VERSION"
NAME_VARIABLE = "SLIPSTREAM_PROCESS_NAME"  # of a child, where its role has several processes
BEAT_S = 0.5  # between two beats; a loop that beats turns at least this often
NEWS_S = 0.1  # between two beats when there is news
SILENT_S = 4 * BEAT_S  # without a beat for this long, a process is silent

Config = TypeVar("Config")

_logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_NAME = 1, 15, 16
_SERVING, _SPARE = "slip:", "spare:"  # prefixes of processes' names
_CHUNK_BYTES = 65536
_MAX_LAST_WORDS = 400  # characters


class Activate(msgspec.Struct, frozen=True, tag=True):
    """Serve from now on.

    incarnation: larger than those of all predecessors. died_within: whether the predecessor crashed
    by itself: by an exception, a fatal signal that was not sent from outside, a hang while it was
    busy, or lack of memory. predecessor_ended_s: when it ended, CLOCK_MONOTONIC; 0.0 without one.
    """

    incarnation: int = 0
    died_within: bool = False
    predecessor_ended_s: float = 0.0


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Accept nothing new, end what still runs after `within_s`, then report `drained`."""

    within_s: float


class Condition(msgspec.Struct, frozen=True, tag=True):
    """The states of the stack's processes by name, for a child that reports them to others; those
    that a child runs itself are included.

    `starting` until a process was ready for the first time; `restarting` while the successor of a
    dead one is not ready; `ready`; `silent` if beats are missing for SILENT_S.
    """

    processes: dict[str, str]


class CoreEnded(msgspec.Struct, frozen=True, tag=True):
    """The core that served has ended. died_within: see `Activate`. suspects: ids of the streams in
    the steps that it was computing then; None: unknown.
    """

    died_within: bool
    suspects: tuple[bytes, ...] | None = None


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Read keys and certificates anew, whether their files look changed or not."""


ChildCommand = Activate | Drain | Reload | Condition | CoreEnded | Statistics


class StopSignal:
    """SIGTERM as a descriptor that a poller can wait for."""

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
    """Commands of the parent. Without a command descriptor, the child is active at once."""

    def __init__(self) -> None:
        self._rest = b""
        self._waiting: list[ChildCommand] = []
        self._decode = msgspec.json.Decoder[ChildCommand](ChildCommand).decode
        given = os.environ.pop(CONTROL_FD_VARIABLE, None)
        if given is None:
            self._fd, self._write_end = os.pipe2(os.O_CLOEXEC)  # never readable
            self._waiting.append(Activate())
        else:
            self._fd = int(given)
            os.set_inheritable(self._fd, False)
        os.set_blocking(self._fd, False)

    def fileno(self) -> int:
        """Readable once a command has come."""
        return self._fd

    @property
    def any_waiting(self) -> bool:
        """True if `read` would return commands, or end this process."""
        return bool(self._waiting or select.select([self._fd], [], [], 0)[0])

    def read_activation(self) -> Activate | None:
        """The activation, if it has come; commands after it are left for `read`.

        The parent may send Activate and Drain right after each other.
        """
        commands = self.read()
        for number, command in enumerate(commands):
            if isinstance(command, Activate):
                self._waiting = commands[number + 1 :]
                _note_activation()
                return command
        return None

    def read(self) -> list[ChildCommand]:
        """Commands that have come since the last call; invalid ones are logged.

        Ends this process if the parent has closed its end.
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
                _logger.error(
                    "ignoring an invalid command of %d bytes from the parent: %s", len(line), error
                )
        return commands


class Awaited(Protocol):
    """An event that a spare waits for."""

    def fileno(self) -> int:
        """Readable once it has come."""

    @property
    def any_waiting(self) -> bool:
        """True if the event has come."""


class Beats:
    """Writes the beats of the loop that calls `beat` in each of its turns."""

    def __init__(self) -> None:
        self._due = self._news_due = 0.0
        self._last_news: object = None

    def beat(
        self,
        now: float,
        numbers: Callable[[], Numbers] | None = None,
        processes: dict[str, OwnProcess] | None = None,
        news: object = None,
    ) -> bool:
        """Write a beat if one is due, with the current `numbers`; returns whether one was due.

        processes: those that this one runs itself. news: a value that differs from the previous
        beat's makes the next beat due after NEWS_S, so that a change is visible soon.
        """
        if now < (self._due if news == self._last_news else self._news_due):
            return False
        self._due = now + BEAT_S / 2  # so that a loop that sleeps for BEAT_S never skips one
        self._news_due = now + NEWS_S
        self._last_news = news
        counted = None if numbers is None else numbers()
        report(Status(beat=True, numbers=counted, processes=processes or {}))
        return True


def next_multiple(now: float, period_s: float) -> float:
    """The first multiple of `period_s` after `now`: timers set to it are due at one moment, so an
    idle process wakes once for all of them.
    """
    return (now // period_s + 1) * period_s  # decision 014


def start_child(name: str, config_type: type[Config]) -> tuple[Config, StopSignal]:
    """The first call of a child: sets up its logging, name, death with the parent, status
    descriptor, limit of open files and stop signal, and reads its config.

    name: of its role; a parent that runs several such processes names each in NAME_VARIABLE.

    Exits with a status line and code 2 if the config is invalid, 1 if the installed version is not
    the parent's.
    """
    name = os.environ.pop(NAME_VARIABLE, name)
    configure_logging(name)
    name_process(f"{_SPARE if CONTROL_FD_VARIABLE in os.environ else _SERVING}{name}")
    parent = int(os.environ.pop(PARENT_PID_VARIABLE, os.getppid()))
    die_with_parent(parent)
    status_fd = os.environ.get(STATUS_FD_VARIABLE)
    if status_fd is not None:
        os.set_inheritable(int(status_fd), False)
        os.set_blocking(int(status_fd), False)
        sys.excepthook = _report_and_exit
    raise_file_limit()
    _check_version(os.environ.pop(VERSION_VARIABLE, None))
    stop = StopSignal()
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=config_type), stop
    except msgspec.DecodeError as error:
        report(Status(error=f"configuration of {name}: {error}", is_misconfigured=True))
        sys.exit(2)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends; exit
    where that has happened already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def go_on_after_parent() -> None:
    """Have the kernel continue this process, where it is stopped, when the thread that started it
    ends: it cannot notice its parent's death otherwise.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def freeze_gc(*, collects: bool = True) -> None:
    """Exempt what is loaded by now from garbage collection, as it lives as long as the process, and
    return free memory to the system.

    collects: look for garbage at first, which takes 0.1 s after large imports.
    """
    if collects:
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()


def installed_version() -> str:
    """The version that a process started now would be of; "" where nothing says so."""
    try:
        return version("slipstream")
    except PackageNotFoundError:
        return ""


def _check_version(parents: str | None) -> None:
    if parents is not None and (installed := installed_version()) != parents:
        why = f"the stack runs version {parents}, and version {installed} is installed by now"
        report(Status(error=f"{why}; start it again"))
        sys.exit(1)


def process_name(role: str, index: int, num: int) -> str:
    """The name of a role's process; of several, each has its index in it."""
    return role if num == 1 else f"{role}-{index}"


def role_of(process: str) -> str:
    """The role of the process of this name; the inverse of `process_name`."""
    role, _, index = process.rpartition("-")
    return role if role and index.isdigit() else process


def name_process(name: str) -> None:
    """Name this process as `top`, `ps -e` and the kernel's log show it, in at most 15 bytes. Called
    on the main thread.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _note_activation() -> None:
    name = ctypes.create_string_buffer(16)
    ctypes.CDLL(None).prctl(_PR_GET_NAME, name, 0, 0, 0)
    named = name.value.decode(errors="replace")
    if named.startswith(_SPARE):
        name_process(named.replace(_SPARE, _SERVING))


def run_child(main: Callable[[], int]) -> NoReturn:
    """Run a child's `main` and exit with its code, without the interpreter's tear-down.

    Everything is closed by then. Tear-down takes a core 0.1 to 0.3 s, and torch 2.15 prints 25
    lines about leaks that nanobind reports.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as ending:
        code = ending.code
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or the reader is gone
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def wait_for_activation(
    commands: ParentCommands, stop: StopSignal, beats: Beats
) -> Activate | None:
    """Wait as a spare, with beats, for the activation; None if the stop signal comes first."""
    while not stop.is_set:
        if (activation := commands.read_activation()) is not None:
            return activation
        beats.beat(time.monotonic())
        select.select([commands.fileno(), stop.fileno()], [], [], BEAT_S)
    return None


def prepare(work: Callable[[], None], commands: Awaited) -> None:
    """Do `work` before the activation: at low priority, unless a command is already waiting.

    A spare's imports take seconds of CPU time that the serving processes need. Niceness applies to
    a thread and most users cannot lower it again, so `work` runs on a separate thread. If the spare
    is activated meanwhile, `work` goes on at the usual priority where the system allows that.
    """
    if commands.any_waiting:
        work()
        return
    raised: list[BaseException] = []
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    has_begun = threading.Event()  # at low priority
    done_fd, end_fd = os.pipe2(os.O_CLOEXEC)

    def run_at_low_priority() -> None:
        try:
            with contextlib.suppress(OSError):  # some systems do not allow niceness per thread
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _niceness_of_spares())
            has_begun.set()
            work()
        except BaseException as error:  # raised again on the main thread
            raised.append(error)
        finally:
            os.close(end_fd)

    thread = threading.Thread(target=run_at_low_priority, name="prepare")
    thread.start()
    has_begun.wait()
    select.select([commands.fileno(), done_fd], [], [])
    with contextlib.suppress(OSError):  # it has ended, or this user may not
        os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, usual)
    thread.join()
    os.close(done_fd)
    if raised:
        raise raised[0]


def _niceness_of_spares() -> int:
    return min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)


def report(status: Status) -> None:
    """Write a status line to the parent, if there is a status descriptor."""
    given = os.environ.get(STATUS_FD_VARIABLE)
    if given is None:
        return
    fd = int(given)
    line = msgspec.json.encode(status) + b"\n"
    if status.beat and len(line) > select.PIPE_BUF:
        line = msgspec.json.encode(_packed(status)) + b"\n"
    if status.beat and len(line) > select.PIPE_BUF:
        line = msgspec.json.encode(_shortened(_packed(status))) + b"\n"
    with contextlib.suppress(BrokenPipeError):  # the parent has closed its end, or is dying
        while line:
            try:
                line = line[os.write(fd, line) :]
            except BlockingIOError:
                if status.beat:
                    return  # the unread beats before it say the same
                select.select([], [fd], [])


def _packed(beat: Status) -> Status:
    """A beat whose histograms take fewer bytes."""
    numbers = beat.numbers
    if not isinstance(numbers, CoreNumbers | WorkerNumbers):
        return beat
    counters = packed_histograms(numbers.counters)
    return msgspec.structs.replace(
        beat,
        numbers=msgspec.structs.replace(numbers, counters=counters),
    )


def _shortened(beat: Status) -> Status:
    """A beat of many processes without its latest spans; without numbers, if that is not enough."""
    numbers = beat.numbers
    if isinstance(numbers, CoreNumbers | WorkerNumbers):
        short = msgspec.structs.replace(
            beat, numbers=msgspec.structs.replace(numbers, recent=Spans())
        )
        if len(msgspec.json.encode(short)) < select.PIPE_BUF:
            return short
    return msgspec.structs.replace(beat, numbers=None)


def words_of(error: BaseException) -> str:
    """An error's type and message in one line, as last words."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_LAST_WORDS]


def _report_and_exit(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """The excepthook: report the exception and exit at once, as tear-down might hang."""
    words = words_of(error)
    report(Status(last_words=words))
    _logger.critical("%s", words, exc_info=(kind, error, traceback))
    os._exit(1)
