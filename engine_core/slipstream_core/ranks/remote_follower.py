"""A rank on another machine than the core: `python -m slipstream_core.ranks.remote_follower`,
started by the supervisor of its machine.

It imports, waits for the core (`leader_link`), loads its slice of the model, and computes the plans
that the core sends, as a rank on the core's machine does. It is ready when it waits: a core may
come at any time, and end. It ends with its core, and the supervisor has another one wait for the
next. A model that cannot be loaded here, and a core that refuses this rank, end the supervisor,
too.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from functools import partial

import msgspec
from msgspec.structs import replace

from slipstream_core.config import CoreConfig, RemoteRankConfig
from slipstream_core.load_error import load_status
from slipstream_core.model.fingerprint import fingerprint_of_files
from slipstream_core.ranks.follower import follow, import_libraries
from slipstream_core.ranks.leader_link import LeaderLink, RankRefusedError
from slipstream_core.ranks.rank_messages import Assign, Join, RankFailed
from slipstream_core.runner.factory import import_runner
from slipstream_core.sharding.rank import Rank
from slipstream_core.step.plan import Runner
from slipstream_ipc.messages import Status
from slipstream_ipc.process import (
    Beats,
    ParentCommands,
    freeze_gc,
    installed_version,
    prepare,
    report,
    run_child,
    start_child,
    wait_for_activation,
    words_of,
)

logger = logging.getLogger(__name__)

_END_S = 5.0  # within which a core that has lost a rank has ended


def main() -> int:
    """Compute until the core ends, which ends this. Exit code 1 if it cannot take part."""
    config, stop = start_child("rank", RemoteRankConfig)
    own, nodes = config.core, config.core.nodes
    assert nodes is not None
    commands, beats = ParentCommands(), Beats()
    prepare(partial(import_runner, own, is_awaited=commands.any_waiting), commands)
    freeze_gc()
    if wait_for_activation(commands, stop, beats) is None:
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever this computes then is lost anyway
    join = Join(
        installed_version(),
        config.index,
        own.tensor_parallel_size,
        own.num_nodes,
        os.getpid(),
        fingerprint_of_files(own.model),
    )
    try:
        link = LeaderLink(nodes)
        report(Status(ready=True, detail=f"waits for the core at {nodes.address}"))
        assign = link.join(join, lambda: beats.beat(time.monotonic()))
    except (ValueError, OSError, RankRefusedError) as error:
        report(Status(error=f"rank {config.index}: {error}"))
        return 1
    link.watch()
    core = as_own(assign.core, own)
    try:
        runner = _load(core, config.index, assign)
    except (ValueError, MemoryError) as error:
        status = load_status(core.model, error)
        link.fail(RankFailed(error=status.error, is_misconfigured=status.is_misconfigured))
        report(status)
        return 1
    except Exception as error:
        _end_with_core(link, error)
        raise
    freeze_gc()
    try:
        follow(runner, link)
    except Exception as error:
        _end_with_core(link, error)
        raise


def preload(config: bytes) -> None:
    """Import what such a rank needs, in a fork server. config: a `RemoteRankConfig` in JSON."""
    import_runner(msgspec.json.decode(config, type=RemoteRankConfig).core)
    import_libraries()


def _load(core: CoreConfig, index: int, assign: Assign) -> Runner:
    """Join the ranks' group, and load this one's slice. Raises ModelLoadError."""
    from slipstream_core.ranks.group import JOIN_S, device_type, join_group
    from slipstream_core.ranks.meeting import NetworkMeeting
    from slipstream_core.runner.torch_factory import load_runner

    rank = Rank(index, core.tensor_parallel_size, core.num_nodes)
    meeting, symm_mem = NetworkMeeting(*assign.meeting), core.enable_torch_symm_mem
    join_group(rank, device_type(core), meeting, JOIN_S, symm_mem=symm_mem)
    return load_runner(core, rank)


def _end_with_core(link: LeaderLink, error: Exception) -> None:
    """Tell the core of an error, unless another rank has taken no part in an exchange: then the
    core ends for the sake of that one, and this process with it.
    """
    from slipstream_core.sharding.collectives import ExchangeFailed

    if isinstance(error, ExchangeFailed):
        link.wait_for_end(_END_S)
    link.fail(RankFailed(words=words_of(error)))


def as_own(shared: CoreConfig, own: CoreConfig) -> CoreConfig:
    """The core's settings with what is a matter of this machine: where the model is, how many
    threads compute, and what may be run.
    """
    return replace(
        shared,
        model=own.model,
        threads=own.threads,
        trust_remote_code=own.trust_remote_code,
        nodes=own.nodes,
    )


if __name__ == "__main__":
    run_child(main)
