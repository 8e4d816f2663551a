"""The core's process of the protocol benchmark: the product's core, its codec another one.

`python -m slipstream_bench.protocol.core_process`, started as every child. What it sent is written
to a file when it is told to stop.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import msgspec
import zmq
from msgspec import Struct

from slipstream_bench.protocol.cumulative import Counted, WholeHistories
from slipstream_core.assembly import assemble_core
from slipstream_core.config import CoreConfig
from slipstream_core.runner.load import load_runner
from slipstream_ipc.child import report, start_child
from slipstream_ipc.messages import Status

Transport = Literal["delta", "cumulative"]


class TransportConfig(Struct, frozen=True):
    """A core's config, how it sends, and where the record of that goes."""

    core: CoreConfig
    transport: Transport
    record: str


def main() -> int:
    """Run until SIGTERM; exit code 0."""
    config, stop = start_child("core", TransportConfig)
    context = zmq.Context()
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    codec = WholeHistories() if config.transport == "cumulative" else Counted()
    with patch("slipstream_core.assembly.core_codec", lambda: codec):
        core = assemble_core(config.core, load_runner(config.core), context, poller)
    if isinstance(codec, WholeHistories):
        codec.histories = core.tokens, core.logprobs
    gc.collect()
    gc.freeze()
    report(Status(ready=True))
    while not stop.is_set:
        core.engine.run_once()
    Path(config.record).write_bytes(msgspec.json.encode(codec.sent))
    core.close()
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
