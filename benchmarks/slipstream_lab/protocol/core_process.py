"""The core process of the protocol benchmark: the product's core with another codec.

`python -m slipstream_lab.protocol.core_process`, started like every child. It writes a record of
what it sent to a file on SIGTERM.
"""

from __future__ import annotations

from typing import Literal
from unittest.mock import patch

import zmq
from msgspec import Struct

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import Core, assemble_core
from slipstream_core.runner.factory import import_runner, load_runner
from slipstream_core.workers.sender import WorkerSender
from slipstream_ipc.process import start_child
from slipstream_lab.common.bench_core import run_core
from slipstream_lab.protocol.cumulative import Counted, WholeHistories

Transport = Literal["delta", "cumulative"]


class TransportConfig(Struct, frozen=True):
    """A core's config, its transport, and the file of its record."""

    core: CoreConfig
    transport: Transport
    record: str


def main() -> int:
    """Run until SIGTERM; exit code 0."""
    config, stop = start_child("core", TransportConfig)
    import_runner(config.core)
    codec = WholeHistories() if config.transport == "cumulative" else Counted()

    def assemble(context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> Core:
        with patch("slipstream_core.engine.build.core_codec", lambda: codec):
            core = assemble_core(config.core, load_runner(config.core), context, poller)
        if isinstance(codec, WholeHistories):
            codec.histories = core.tokens, core.logprobs
        return core

    # steps pass the codec, which writes them in its own way and counts them
    with patch.object(WorkerSender, "_send_step", lambda *_: False):
        return run_core(stop, assemble, lambda: codec.sent, config.record)


if __name__ == "__main__":
    raise SystemExit(main())
