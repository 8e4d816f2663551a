"""What a supervisor says about its stack, to the terminal or to the `Stack` that started it.

Types alone. They cross one pipe, as lines of JSON.
"""

from __future__ import annotations

import msgspec

from slipstream.processes import ChildSpec


class SupervisorConfig(msgspec.Struct, frozen=True):
    """Everything a supervisor needs: the first line on its standard input."""

    children: tuple[ChildSpec, ...]
    address: str  # where clients connect
    runtime_dir: str
    parent_pid: int | None = None  # whose death ends the stack


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    """A child is ready."""

    name: str
    pid: int
    detail: str
    seconds: float


class StackReady(msgspec.Struct, frozen=True, tag=True):
    """Every child is ready."""

    address: str


class StackFailed(msgspec.Struct, frozen=True, tag=True):
    """The stack ends, not because it was asked to."""

    error: str


Event = ProcessReady | StackReady | StackFailed
