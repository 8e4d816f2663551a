"""The engine core's process: start-up, loop, shutdown."""

from __future__ import annotations

import gc

import zmq

from slipstream_core.assembly import assemble_core
from slipstream_core.config import CoreConfig
from slipstream_core.runner.load import load_runner
from slipstream_ipc.child import report, start_child
from slipstream_ipc.messages import Status


def main() -> int:
    """Run until SIGTERM. Exit code 0, or 1 where the model cannot be served as asked."""
    config, stop = start_child("core", CoreConfig)
    context = zmq.Context()
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    try:
        core = assemble_core(config, load_runner(config), context, poller)
    except ValueError as error:
        report(Status(error=str(error)))
        return 1
    # what is loaded stays: the collector need not look at it again
    gc.collect()
    gc.freeze()
    name = config.served_model_name or config.model
    report(Status(ready=True, detail=f"{name}, {core.runner.num_blocks} cache blocks"))
    while not stop.is_set:
        core.engine.run_once()
    core.close()
    context.term()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
