"""The engine core's process: start-up, loop, shutdown.

- Imports take most of a start and happen before `Activate`, while another core may still be
  running. The model is loaded after it, as memory may not hold it twice.
- A device that has worked on one step for `step_timeout_s` is stuck: the process exits. If a signal
  has stopped ranks of this machine, they are killed instead, and the core ends as after the death
  of any rank.
- A rank of this machine that a signal has stopped for `hang_timeout_s` is killed in the same way,
  once the core serves. One that is stopped while it imports or loads is waited for.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any

import msgspec
import zmq

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import (
    CoreEngine,
    ServingCore,
    assemble_core,
    engine_of,
)
from slipstream_core.load_error import load_status
from slipstream_core.pooling.runner_choice import pooling_task
from slipstream_core.ranks.processes import Ranks, import_ranks
from slipstream_core.step.plan import TurnRunner
from slipstream_ipc.messages import Status
from slipstream_ipc.process import (
    Beats,
    ParentCommands,
    StopSignal,
    freeze_gc,
    prepare,
    report,
    run_child,
    start_child,
    wait_for_activation,
)
from slipstream_ipc.transport.poller import Poller
from slipstream_ipc.validation.simulated_model import SIMULATED

logger = logging.getLogger(__name__)

_END_S = 60.0  # within which the kernel has ended a process that it kills


def main() -> int:
    """Run until SIGTERM. Exit code 0, or 1 where the model cannot be served."""
    config, stop = start_child("core", CoreConfig)
    engine = engine_of(config)
    commands, beats = ParentCommands(), Beats()
    ranks = None
    if config.tensor_parallel_size > 1 and not config.model.startswith(SIMULATED):
        ranks = Ranks(config)  # on this thread, and they import while this process does
    prepare(partial(engine.import_modules, config, is_awaited=commands.any_waiting), commands)
    freeze_gc()
    activation = wait_for_activation(commands, stop, beats)
    if activation is None:
        return 0
    report(Status(loading=True))
    config = msgspec.structs.replace(
        config,
        incarnation=activation.incarnation,
        died_within=activation.died_within,
        predecessor_ended_s=activation.predecessor_ended_s,
    )
    context = zmq.Context()
    poller = Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    try:
        core = _open_core(config, engine, ranks, context, poller)
    except (ValueError, MemoryError) as error:
        report(load_status(config.model, error))
        return 1
    except (OSError, zmq.ZMQError) as error:  # the socket's address, or the crash note
        report(Status(error=f"cannot start in {config.runtime_dir}: {error}"))
        return 1
    freeze_gc()
    report(Status(ready=True, detail=core.detail))
    _serve(core, stop, beats, config.step_timeout_s, ranks)
    core.close()
    context.term()
    return 0


def preload(config: bytes) -> None:
    """Import what a core needs, in a fork server. config: a `CoreConfig` in JSON."""
    decoded = msgspec.json.decode(config, type=CoreConfig)
    engine_of(decoded).import_modules(decoded)
    if decoded.num_local_ranks > 1:
        import_ranks()


def _open_core(
    config: CoreConfig,
    engine: CoreEngine,
    ranks: Ranks | None,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
) -> ServingCore:
    """Load the model and open its socket. Raises ValueError, MemoryError, OSError, zmq.ZMQError."""
    task = pooling_task(config)
    if task is not None:
        from slipstream_core.pooling.pooling_core import open_pooling_core  # imports torch

        return open_pooling_core(config, task, context, poller)
    config = engine.with_defaults(config)
    return assemble_core(config, _load(config, ranks), context, poller)


def _load(config: CoreConfig, ranks: Ranks | None) -> TurnRunner[Any]:
    if ranks is None:
        return engine_of(config).load(config)
    from slipstream_core.ranks.leader import load_lead  # imports torch, which not every core needs

    return load_lead(config, ranks)


def _serve(
    core: ServingCore, stop: StopSignal, beats: Beats, step_timeout_s: float, ranks: Ranks | None
) -> None:
    processes = None if ranks is None else ranks.states()
    while not stop.is_set:
        core.run_once()
        now = time.monotonic()
        if not beats.beat(now, core.numbers, processes, news=core.load):
            continue
        if core.running_s(now) > step_timeout_s:
            words = f"a step did not finish within {step_timeout_s:g} s (step_timeout_s)"
            logger.error("%s; the core exits", words)
            if ranks is not None and ranks.kill_stopped():
                ranks.wait_for_end(_END_S)  # this process is killed as well: no request's fault
            report(Status(last_words=words))
            os._exit(1)  # the device's thread would block a normal exit


if __name__ == "__main__":
    run_child(main)
