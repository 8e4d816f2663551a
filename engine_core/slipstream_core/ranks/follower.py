"""A rank on the core's machine, which the core forks or, where it is no fork itself, starts as
`python -m slipstream_core.ranks.follower`.

It imports, waits until the core is activated, loads its slice of the model, and computes the plans
that the core writes, at most one ahead. It knows no stream and no worker. It dies with the core,
and the core with it (`ranks.watch`); an exception ends it.
"""

from __future__ import annotations

import importlib
import select
from functools import partial
from typing import NoReturn, Protocol

from slipstream_core.config import RankConfig
from slipstream_core.load_error import load_status
from slipstream_core.ranks.bus import PlanReader
from slipstream_core.runner.factory import import_runner, with_device_defaults
from slipstream_core.step.plan import Runner, StepPlan
from slipstream_ipc.process import freeze_gc, prepare, report, run_child, start_child

_MOST_LAUNCHED = 2  # one that runs, and the next


class Plans(Protocol):
    """The source of the first rank's plans."""

    def fileno(self) -> int:
        """Readable when a plan has come since `any_waiting` was False."""

    @property
    def any_waiting(self) -> bool:
        """True if `take` would return at once."""

    def take(self) -> StepPlan:
        """Wait for the next plan, whose arrays are good until it is released."""

    def release(self) -> None:
        """Give back the oldest plan taken."""


def import_libraries() -> None:
    """Import what the process needs besides `import_runner`, so that it may be forked."""
    importlib.import_module("slipstream_core.ranks.group")


def main() -> int:
    """Compute until the core ends, which ends this. Exit code 1 if the model cannot be loaded."""
    config, _ = start_child("rank", RankConfig)
    core = config.core
    reader = PlanReader(config.index - 1, config.memory_fd, config.doorbell, config.room_fd)
    prepare(partial(import_runner, core), reader)
    freeze_gc()
    reader.wait()
    from slipstream_core.ranks.group import JOIN_S, device_type, join_group
    from slipstream_core.ranks.meeting import LocalMeeting, Meeting, NetworkMeeting
    from slipstream_core.runner.torch_factory import load_runner
    from slipstream_core.sharding.rank import Rank

    core = with_device_defaults(core)  # as the core's own settings are
    rank = Rank(config.index, core.tensor_parallel_size, core.num_nodes)
    exchange_fd = config.exchange_fd if core.native else None
    meeting: Meeting = LocalMeeting(config.meeting_fd, exchange_fd)
    if core.nodes is not None:
        meeting = NetworkMeeting.told(config.meeting_fd)
    symm_mem = core.enable_torch_symm_mem
    join_group(rank, device_type(core), meeting, JOIN_S, symm_mem=symm_mem)
    try:
        runner = load_runner(core, rank)
    except (ValueError, MemoryError) as error:
        report(load_status(core.model, error))
        return 1
    freeze_gc()
    return follow(runner, reader)


def follow(runner: Runner, reader: Plans) -> NoReturn:
    """Compute plans for ever. Raises what a step raises, and PlanBytesError."""
    num_launched = 0
    fd = runner.fileno()
    assert fd is not None
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    ready.register(reader, select.POLLIN)
    while True:
        if num_launched and (num_launched == _MOST_LAUNCHED or runner.done()):
            runner.collect()
            reader.release()
            num_launched -= 1
        elif reader.any_waiting:
            runner.launch(reader.take())
            num_launched += 1
        else:
            ready.poll()


if __name__ == "__main__":
    run_child(main)
