"""The process of the overlap benchmark without a worker process: core and worker in one thread.

`python -m slipstream_lab.overlap.in_loop`, started like every child (`slipstream_ipc.process`).
Core and worker are the product's and exchange the same messages over the same socket; only the loop
around them differs:
- `in_loop`: a step's end, collect, publish, the worker's turn, its deltas sent; only then is the
  next step planned and launched, so the device idles meanwhile. Engines worked this way before
  asynchronous output processing (vLLM RFC #6913).
- `in_loop_async`: the product's engine with its step launched ahead, followed by the worker's turn
  in the same thread. The device idles when both together take longer than a step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import zmq
from msgspec import Struct

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import Core, assemble_core
from slipstream_core.runner.factory import import_runner, load_runner
from slipstream_ipc.messages import Status, TokenizerReady
from slipstream_ipc.process import StopSignal, report, start_child
from slipstream_worker.build import assemble_worker, detokenizers_from
from slipstream_worker.config import WorkerConfig
from slipstream_worker.tokenizer.client import TokenizerClient
from slipstream_worker.worker import Worker

Mode = Literal["in_loop", "in_loop_async"]

_BEAT_S = 0.25
_BEAT_MS = 250


class LoopConfig(Struct, frozen=True):
    """The configs of core and worker, and the mode of the loop."""

    core: CoreConfig
    worker: WorkerConfig
    mode: Mode


def main() -> int:
    """Run until SIGTERM; exit code 1 if the tokenizer could not be loaded."""
    config, stop = start_child("in_loop", LoopConfig)
    context = zmq.Context()
    poller = zmq.Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    wanted = config.worker
    path = Path(wanted.runtime_dir) / "prompts.sock"
    options = {"tokenizer": wanted.tokenizer, "cache_dir": wanted.cache_dir}
    prompts = TokenizerClient(context, f"ipc://{path}", dict(options))
    poller.register(prompts.socket, zmq.POLLIN)
    try:
        ready = _first_word(prompts, poller, stop)
        if ready is None:
            return 0
        if ready.error:
            report(Status(error=ready.error))
            return 1
        import_runner(config.core)
        core = assemble_core(config.core, load_runner(config.core), context, poller)
        worker = assemble_worker(wanted, prompts, detokenizers_from(ready), context, poller)
        gc.collect()
        gc.freeze()  # as the product's core and worker do
        turn = _turn_of(config.mode, core, worker, poller)
        _run(turn, worker, stop)
        worker.close()
        core.close()
    finally:
        prompts.close()
        path.unlink(missing_ok=True)
    context.destroy(linger=0)
    return 0


def _first_word(
    prompts: TokenizerClient, poller: zmq.Poller, stop: StopSignal
) -> TokenizerReady | None:
    """Wait for the tokenizer process's TokenizerReady; None if the process is to stop."""
    while not stop.is_set:
        poller.poll(_BEAT_MS)
        for answer in prompts.receive():
            if isinstance(answer, TokenizerReady):
                return answer
    return None


def _run(turn: Callable[[], None], worker: Worker, stop: StopSignal) -> None:
    is_ready = False
    beat_at = 0.0
    while not stop.is_set:
        turn()
        now = time.monotonic()
        if now >= beat_at:
            worker.beat(now)
            beat_at = now + _BEAT_S
        if not is_ready and worker.card is not None:
            is_ready = True
            report(Status(ready=True, detail=f"serving {worker.card.name}"))


def _turn_of(mode: Mode, core: Core, worker: Worker, poller: zmq.Poller) -> Callable[[], None]:
    if mode == "in_loop":
        return _Lockstep(core, worker, poller).turn

    def turn() -> None:
        core.engine.run_once()  # its wait ends for messages to the worker, too
        worker.run_once(time.monotonic())

    return turn


class _Lockstep:
    """Strictly sequential: no step is launched before all deltas of the last one are sent."""

    def __init__(self, core: Core, worker: Worker, poller: zmq.Poller) -> None:
        self._core = core
        self._worker = worker
        self._poller = poller
        self._step = 0
        self._beat_at = 0.0

    def turn(self) -> None:
        """Run one step, or handle messages while no request runs."""
        core, handler = self._core, self._core.handler
        now = time.monotonic()
        handler.receive(now)
        if now >= self._beat_at:
            handler.beat(now)
            self._beat_at = now + _BEAT_S
        plan = core.scheduler.schedule(handler.acked) if core.scheduler.has_work else None
        if plan is not None:
            core.runner.launch(plan)
            result = core.runner.collect()
            sampled = core.scheduler.complete(plan, result.token_ids)
            if result.logprobs is not None:
                core.logprobs.append(sampled.rows, result.logprobs, sampled.index)
            core.manager.mark_dirty(sampled.rows)
            self._step = plan.step
        while handler.publish(self._step):
            pass
        self._worker.run_once(time.monotonic())
        while handler.num_unchecked and not self._poller_is_silent():
            self._worker.run_once(time.monotonic())
            handler.receive(time.monotonic())
        if plan is None:
            self._poller.poll(_BEAT_MS)

    def _poller_is_silent(self) -> bool:
        """Whether nothing arrived within one heartbeat interval, so that the loop goes around."""
        return not self._poller.poll(_BEAT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
