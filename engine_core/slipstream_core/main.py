"""The engine core's process: start-up, loop, shutdown."""

from __future__ import annotations

import gc
import logging

import numpy as np
import zmq

from slipstream_core.config import CoreConfig
from slipstream_core.desk import Desk
from slipstream_core.engine import Engine
from slipstream_core.logprob_log import LogprobLog
from slipstream_core.port import CoreAcceptor
from slipstream_core.runner.load import load_runner
from slipstream_core.scheduler import Scheduler
from slipstream_ipc.accept import Acceptor
from slipstream_ipc.child import report, start_child
from slipstream_ipc.codec import core_codec
from slipstream_ipc.link import WINDOW
from slipstream_ipc.log import PagedLog
from slipstream_ipc.messages import ModelCard, Status
from slipstream_ipc.sockets import bind_router

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM. Exit code 0, or 1 where the model could not be loaded."""
    config, stop = start_child("core", CoreConfig)
    try:
        runner = load_runner(config)
    except ValueError as error:
        report(Status(error=str(error)))
        return 1
    info = runner.info
    context = zmq.Context()
    socket = bind_router(context, config.address)
    acceptor: CoreAcceptor = Acceptor(socket, core_codec(), window=WINDOW)
    tokens = PagedLog(np.uint32)
    logprobs = LogprobLog()
    scheduler = Scheduler(
        tokens=tokens,
        num_blocks=runner.num_blocks,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
    )
    card = ModelCard(
        info.name, config.model, info.vocab_size, info.max_model_len, info.eos_token_ids
    )
    desk = Desk(
        acceptor,
        card,
        scheduler,
        tokens,
        logprobs,
        max_waiting=config.max_waiting,
        fits=lambda num_tokens: -(-num_tokens // info.block_size) < runner.num_blocks,
    )
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(stop.fileno(), zmq.POLLIN)
    engine = Engine(runner, scheduler, tokens, logprobs, desk, poller)
    # what is loaded stays: the collector need not look at it again
    gc.collect()
    gc.freeze()
    report(Status(ready=True, detail=f"{info.name}, {runner.num_blocks} cache blocks"))
    while not stop.is_set:
        engine.run_once()
    runner.close()
    socket.close()
    context.term()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
