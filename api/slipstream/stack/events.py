"""What a supervisor is told, and what it says about its stack, to the terminal or to the `Stack`
that started it.

Types alone. They cross two pipes, as lines of JSON.
"""

from __future__ import annotations

import msgspec

from slipstream.stack.children.process import ChildSpec


class SupervisorConfig(msgspec.Struct, frozen=True):
    """Everything a supervisor needs: the first line on its standard input. Settings: `settings`."""

    children: tuple[ChildSpec, ...]
    address: str  # where clients connect
    runtime_dir: str
    parent_pid: int | None = None  # whose death ends the stack
    hang_timeout_s: float = 10.0
    max_restarts: int = 10
    restart_window_s: float = 300.0
    drain_s: float = 0.0
    listen: tuple[str, int] | None = None  # host and port, for the children that listen
    uds: str | None = None  # a unix socket's path, in place of them


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """A process has the place of this name from now on, and gets ready."""

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
    """A process waits to take over this name from another."""

    name: str
    pid: int
    seconds: float  # from its start


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """A process has died, and another is to take its place."""

    name: str
    pid: int
    how: str


class ProcessRestarted(msgspec.Struct, frozen=True, tag=True):
    """A process that took the place of a dead one is ready."""

    name: str
    pid: int
    how: str  # the other one died
    seconds: float  # from the other one's end, or from when it was found to hang
    detail: str = ""


class StackDraining(msgspec.Struct, frozen=True, tag=True):
    """The stack was asked to end, and lets what runs go on for so long."""

    within_s: float


class StackFailed(msgspec.Struct, frozen=True, tag=True):
    """The stack ends, not because it was asked to."""

    error: str


Event = (
    ProcessStarted
    | ProcessReady
    | StackReady
    | SpareReady
    | ProcessEnded
    | ProcessRestarted
    | StackDraining
    | StackFailed
)
