"""The config of a supervisor, and the events it reports to the terminal or to its `Stack`.

Between a `Stack` and its supervisor they cross two pipes, as lines of JSON.
"""

from __future__ import annotations

import msgspec

from slipstream.stack.children.process import ChildSpec


class SupervisorConfig(msgspec.Struct, frozen=True):
    """Everything a supervisor needs, sent as the first line on its standard input. The values are
    explained in `settings`.
    """

    children: tuple[ChildSpec, ...]
    address: str  # where clients connect
    runtime_dir: str
    parent_pid: int | None = None  # whose death ends the stack
    hang_timeout_s: float = 10.0
    max_restarts: int = 10
    restart_window_s: float = 300.0
    drain_s: float = 0.0
    listen: tuple[str, int] | None = None  # host and port of the HTTP fronts
    uds: str | None = None  # a unix socket's path, in place of host and port
    log_stats_interval_s: float = 0.0
    environment: dict[str, str] = {}  # of all children, beside ours
    beats: bool = False  # whether it reports `SupervisorBeat`, for a fleet's supervisor


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """A process of this name serves from now on, or will once it is ready."""

    name: str
    pid: int


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    """The first process of this name is ready."""

    name: str
    pid: int
    detail: str
    seconds: float  # from its start


class StackReady(msgspec.Struct, frozen=True, tag=True):
    """Every process is ready."""

    address: str


class SpareReady(msgspec.Struct, frozen=True, tag=True):
    """A spare of this name is waiting."""

    name: str
    pid: int
    seconds: float  # from its start


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """A process has died; another one replaces it."""

    name: str
    pid: int
    how: str


class ProcessRestarted(msgspec.Struct, frozen=True, tag=True):
    """The successor of a dead process is ready."""

    name: str
    pid: int
    how: str  # how the predecessor died
    seconds: float  # since the end of the predecessor
    detail: str = ""


class StackDraining(msgspec.Struct, frozen=True, tag=True):
    """The stack was asked to end; running requests continue for `within_s` seconds at most."""

    within_s: float


class RequestsRunning(msgspec.Struct, frozen=True, tag=True):
    """The drain waits for `num` requests, for `within_s` seconds at most. Left out where none ran
    when it began.
    """

    num: int
    within_s: float


class SupervisorBeat(msgspec.Struct, frozen=True, tag=True):
    """The supervisor's loop turns. Left out while what was reported before is unread."""


class StackFailed(msgspec.Struct, frozen=True, tag=True):
    """The stack has failed and ends."""

    error: str


StackEvent = (
    ProcessStarted
    | ProcessReady
    | StackReady
    | SpareReady
    | ProcessEnded
    | ProcessRestarted
    | StackDraining
    | RequestsRunning
    | StackFailed
    | SupervisorBeat
)
