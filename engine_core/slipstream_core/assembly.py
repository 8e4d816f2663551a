"""Puts the parts of an engine core together.

Owns: which part is given which. Does not know: processes, signals; so benchmarks and tests build
the same core inside their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zmq

from slipstream_core.config import CoreConfig
from slipstream_core.desk import Desk
from slipstream_core.engine import Engine
from slipstream_core.logprob_log import LogprobLog
from slipstream_core.port import CoreAcceptor
from slipstream_core.runner.plan import Runner
from slipstream_core.scheduler import Scheduler
from slipstream_ipc.accept import Acceptor
from slipstream_ipc.codec import core_codec
from slipstream_ipc.link import WINDOW
from slipstream_ipc.log import PagedLog
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.sockets import bind_router


@dataclass(frozen=True, slots=True)
class Core:
    """An assembled core. `close` frees the socket and the runner."""

    engine: Engine
    desk: Desk
    scheduler: Scheduler
    tokens: PagedLog
    runner: Runner
    socket: zmq.Socket[bytes]

    def close(self) -> None:
        """Stop the device, leave the address."""
        self.runner.close()
        self.socket.close()


def assemble_core(
    config: CoreConfig,
    runner: Runner,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
) -> Core:
    """A core at `config.address` that runs `runner`; its descriptors are in `poller`.

    Raises ValueError where settings and model do not go together.
    """
    info = runner.info
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
    socket = bind_router(context, config.address)
    poller.register(socket, zmq.POLLIN)
    acceptor: CoreAcceptor = Acceptor(socket, core_codec(), window=WINDOW)
    name = info.name if config.served_model_name is None else config.served_model_name
    card = ModelCard(
        name,
        config.model,
        info.vocab_size,
        info.max_model_len,
        info.eos_token_ids,
        info.default_sampling,
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
    engine = Engine(runner, scheduler, logprobs, desk, poller)
    return Core(engine, desk, scheduler, tokens, runner, socket)
