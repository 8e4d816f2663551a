"""What a child process says to its supervisor; `slipstream_ipc.process` has what it is told."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from slipstream_ipc.telemetry.statistics import Name, Numbers

State = Literal["starting", "ready", "restarting", "silent"]


class Status(Struct, frozen=True, omit_defaults=True):
    """A line a child writes to its supervisor.

    ready: it serves. beat: its loop goes round; loading: it does not, as long as that takes.
    drained: nothing is left of what it had when it was told to drain. detail: what it serves, for
    people. error: why it cannot do what it was told; another one could not either. last_words: what
    it dies of. numbers: what it has counted, with beats. processes: how the ones are that it keeps
    itself, by name, in the words of `slipstream_ipc.process.Condition`, with beats.
    """

    ready: bool = False
    beat: bool = False
    loading: bool = False
    drained: bool = False
    detail: str = ""
    error: str = ""
    last_words: str = ""
    numbers: Numbers | None = None
    processes: Annotated[dict[Name, State], Meta(max_length=16)] = {}
