"""Runs an assembled engine core in a benchmark's own process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from slipstream_core.build import Core
from slipstream_ipc.messages import Status
from slipstream_ipc.process import StopSignal, report

Assemble = Callable[["zmq.Context[zmq.Socket[bytes]]", zmq.Poller], Core]


def run_core(
    stop: StopSignal, assemble: Assemble, record: Callable[[], object], record_file: str
) -> int:
    """Serve until SIGTERM, then write `record()` to `record_file` as JSON. Returns exit code 0."""
    context = zmq.Context()
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    core = assemble(context, poller)
    gc.collect()
    gc.freeze()
    report(Status(ready=True))
    while not stop.is_set:
        core.engine.run_once()
    Path(record_file).write_bytes(msgspec.json.encode(record()))
    core.close()
    context.destroy(linger=0)
    return 0
