"""The output worker's process: start-up, loop, shutdown."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import zmq

from slipstream_ipc.child import StopSignal, report, start_child
from slipstream_ipc.messages import PromptReady, Status
from slipstream_worker.assembly import assemble_worker, detokenizers_from
from slipstream_worker.config import WorkerConfig
from slipstream_worker.prompts import Prompts

_BEAT_S = 0.25
_GOODBYE_MS = 200


def main() -> int:
    """Run until SIGTERM. Exit code 0, or 1 where the tokenizer could not be loaded."""
    config, stop = start_child("worker", WorkerConfig)
    context = zmq.Context()
    path = Path(config.runtime_dir) / f"prompts-{config.index}-{config.incarnation}.sock"
    prompts = Prompts(
        context,
        f"ipc://{path}",
        {
            "tokenizer": config.tokenizer,
            "cache_dir": config.cache_dir,
            "trust_remote_code": config.trust_remote_code,
        },
    )
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    poller.register(prompts.socket, zmq.POLLIN)
    try:
        ready = _await_prompts(prompts, poller, stop)
        if ready is not None and ready.error:
            report(Status(error=ready.error))
            return 1
        if ready is not None:
            _serve(config, ready, prompts, context, poller, stop)
    finally:
        prompts.close()
        path.unlink(missing_ok=True)
    context.term()
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


def _serve(
    config: WorkerConfig,
    ready: PromptReady,
    prompts: Prompts,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
    stop: StopSignal,
) -> None:
    worker = assemble_worker(config, prompts, detokenizers_from(ready), context, poller)
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
    worker.say_goodbye()
    worker.close(linger_ms=_GOODBYE_MS)


if __name__ == "__main__":
    raise SystemExit(main())
