"""The status lines of a child process; `slipstream_ipc.process` has the supervisor's commands."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.telemetry.statistics import Numbers, StatisticName

State = Literal["starting", "ready", "restarting", "silent"]
Pid = Annotated[int, Meta(ge=0, le=2**22)]  # the kernel's own limit


class OwnProcess(Struct, frozen=True, omit_defaults=True):
    """A process that a child runs itself. state: in the words of
    `slipstream_ipc.process.Condition`. pid: 0 if there is no process.
    """

    state: State
    pid: Pid = 0


class Status(Struct, frozen=True, omit_defaults=True):
    """A line that a child writes to its supervisor.

    ready: it serves.
    beat: its loop is turning.
    loading: no beats are to be expected while it loads.
    drained: everything that it had when it was told to drain has ended.
    num_running: the requests that it had when it was told to drain; None before that.
    num_cut: those of them that the drain's end cut off, with `drained`.
    detail: what it serves, for people.
    error: why it cannot do what it was told; a replacement could not either.
    is_misconfigured: of an error: an option, the model or a file that an option names is at fault,
    so a later start would fail the same way.
    last_words: the exception that ends it.
    numbers: its statistics, sent with beats.
    processes: the processes that it runs itself, by name, sent with beats.
    wants_statistics: it asks for the statistics of the whole stack, once.
    """

    ready: bool = False
    beat: bool = False
    loading: bool = False
    drained: bool = False
    detail: str = ""
    error: str = ""
    is_misconfigured: bool = False
    last_words: str = ""
    numbers: Numbers | None = None
    processes: Annotated[dict[StatisticName, OwnProcess], Meta(max_length=64)] = {}
    num_running: int | None = None
    num_cut: int = 0
    wants_statistics: bool = False
