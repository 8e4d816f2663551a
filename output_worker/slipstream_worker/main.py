"""The output worker's process: start-up, loop, shutdown."""

from __future__ import annotations

import gc
import logging
import os
import time
from pathlib import Path

import zmq

from slipstream_ipc.accept import Acceptor
from slipstream_ipc.child import StopSignal, report, start_child
from slipstream_ipc.codec import front_codec
from slipstream_ipc.link import WINDOW
from slipstream_ipc.messages import PromptReady, Status
from slipstream_ipc.sockets import bind_router
from slipstream_worker.clients import FrontAcceptor
from slipstream_worker.config import WorkerConfig
from slipstream_worker.core_hop import CoreHop
from slipstream_worker.detokenizer import (
    DetokenizerFactory,
    TableDetokenizerFactory,
    WindowDetokenizerFactory,
)
from slipstream_worker.prompts import Prompts
from slipstream_worker.token_table import load_table
from slipstream_worker.worker import Worker

logger = logging.getLogger(__name__)

_BEAT_S = 0.25


def main() -> int:
    """Run until SIGTERM. Exit code 0, or 1 where the tokenizer could not be loaded."""
    config, stop = start_child(f"worker-{os.environ.get('SLIPSTREAM_WORKER', '0')}", WorkerConfig)
    context = zmq.Context()
    prompt_path = Path(config.runtime_dir) / f"prompts-{config.index}-{config.incarnation}.sock"
    prompts = Prompts(
        context,
        f"ipc://{prompt_path}",
        {
            "tokenizer": config.tokenizer,
            "cache_dir": config.cache_dir,
            "trust_remote_code": config.trust_remote_code,
        },
    )
    try:
        return _serve(config, stop, context, prompts)
    finally:
        prompts.close()
        prompt_path.unlink(missing_ok=True)


def _serve(
    config: WorkerConfig,
    stop: StopSignal,
    context: zmq.Context[zmq.Socket[bytes]],
    prompts: Prompts,
) -> int:
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    poller.register(prompts.socket, zmq.POLLIN)
    ready = _await_prompts(prompts, poller, stop)
    if ready is None:
        return 0
    if ready.error:
        report(Status(error=ready.error))
        return 1
    socket = bind_router(context, config.client_address)
    poller.register(socket, zmq.POLLIN)
    front: FrontAcceptor = Acceptor(
        socket,
        front_codec(),
        window=WINDOW,
        ping_after_s=config.client_timeout_s,
        dead_after_s=config.client_timeout_s,
    )
    core = CoreHop(
        context,
        config.core_address,
        poller,
        identity=b"worker-%d" % config.index,
        incarnation=config.incarnation,
        now=time.monotonic(),
    )
    worker = Worker(
        core,
        front,
        prompts,
        _detokenizers(ready),
        tokenizer=config.tokenizer,
        stream_interval=config.stream_interval,
        grace_s=config.grace_s,
    )
    # what is loaded stays: the collector need not look at it again
    gc.collect()
    gc.freeze()
    is_ready = False
    beat_at = 0.0
    while not stop.is_set:
        now = time.monotonic()
        worker.run_once(now)
        if now >= beat_at:
            worker.beat(now)
            beat_at = now + _BEAT_S
        if not is_ready and worker.card is not None:
            is_ready = True
            report(Status(ready=True, detail=f"serving {worker.card.name}"))
        poller.poll(max(1, int((beat_at - time.monotonic()) * 1e3)))
    core.close()
    socket.close()
    return 0


def _await_prompts(prompts: Prompts, poller: zmq.Poller, stop: StopSignal) -> PromptReady | None:
    """The prompt process' first word; None where the stop signal comes first."""
    while not stop.is_set:
        poller.poll(int(_BEAT_S * 1e3))
        for answer in prompts.receive():
            if isinstance(answer, PromptReady):
                return answer
        list(prompts.beat())
    return None


def _detokenizers(ready: PromptReady) -> DetokenizerFactory:
    if ready.table_path:
        return TableDetokenizerFactory(load_table(Path(ready.table_path)))
    logger.warning("text is decoded the slow way: %s", ready.why_not)
    return WindowDetokenizerFactory(Path(ready.tokenizer_path).read_bytes())


if __name__ == "__main__":
    raise SystemExit(main())
