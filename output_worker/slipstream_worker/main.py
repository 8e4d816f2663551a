"""The output worker's process: start-up, waiting as a spare, the serving loop, drain and shutdown.

- The tokenizer's table is loaded and the tokenizer process runs before `Activate`; the sockets,
  which belong to the serving worker, are bound after it. A spare therefore takes over within
  milliseconds.
- Clients are told that the server shuts down only if the parent sent `Drain`. A worker that ends
  for another reason has a successor, which continues its streams.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from slipstream_ipc.messages import Status, TokenizerReady
from slipstream_ipc.process import (
    BEAT_S,
    Activate,
    Beats,
    CoreEnded,
    Drain,
    ParentCommands,
    StopSignal,
    freeze_gc,
    next_multiple,
    process_name,
    report,
    run_child,
    start_child,
)
from slipstream_ipc.telemetry.statistics import Statistics
from slipstream_ipc.transport.connections import Connections, raise_file_limit
from slipstream_ipc.transport.poller import Poller
from slipstream_worker.build import assemble_worker, detokenizers_from
from slipstream_worker.config import WorkerConfig
from slipstream_worker.lifecycle.core_messages import AnswerForm
from slipstream_worker.request_spans import RequestSpans
from slipstream_worker.tokenizer.child import import_tokenizer_process
from slipstream_worker.tokenizer.client import TokenizerClient
from slipstream_worker.worker import Worker

_GOODBYE_MS = 200
_MAX_STARTS = 3  # of a tokenizer process that has never been ready


def main() -> int:
    """Run until SIGTERM. Returns 0, or 1 if the tokenizer or an address cannot be used."""
    config, stop = start_child("worker", WorkerConfig)
    commands, beats = ParentCommands(), Beats()
    context = zmq.Context()
    path = Path(config.runtime_dir) / f"tokenizer-{config.index}-{os.getpid()}.sock"
    try:
        tokenizer = TokenizerClient(
            context,
            f"ipc://{path}",
            {
                "tokenizer": config.tokenizer,
                "cache_dir": config.cache_dir,
                "trust_remote_code": config.trust_remote_code,
                "tool_format": config.tool_format,
                "reasoning_format": config.reasoning_format,
                "chat_template": config.chat_template,
                "default_chat_template_kwargs": config.default_chat_template_kwargs,
            },
            name=_tokenizer_name(config),
            hang_timeout_s=config.hang_timeout_s,
        )
    except (OSError, zmq.ZMQError) as error:
        report(Status(error=f"cannot start in {config.runtime_dir}: {error}"))
        return 1
    poller = Poller()
    poller.register(stop.fileno(), zmq.POLLIN)
    tokenizer.register(poller)
    try:
        ready = _await_tokenizer(tokenizer, poller, stop)
        if ready is not None and ready.error:
            report(Status(error=ready.error))
            return 1
        if ready is not None:
            detokenizers = detokenizers_from(ready)
            endpoint = config.otlp_traces_endpoint
            spans = None if endpoint is None else RequestSpans(endpoint)
            freeze_gc()
            poller.register(commands.fileno(), zmq.POLLIN)
            activation = _await_activation(commands, tokenizer, poller, stop, beats)
            if activation is not None:
                config = msgspec.structs.replace(
                    config,
                    incarnation=activation.incarnation,
                    predecessor_ended_s=activation.predecessor_ended_s,
                )
                try:
                    worker = assemble_worker(
                        config,
                        tokenizer,
                        detokenizers,
                        context,
                        poller,
                        Connections(raise_file_limit()),
                        spans,
                        AnswerForm(
                            ready.answer_format,
                            ready.eos_token_ids if config.ends_at_eos else (),
                            ready.why_no_images,
                        ),
                    )
                except (ValueError, OSError, zmq.ZMQError) as error:  # an address, or keys
                    is_full = getattr(error, "errno", None) == errno.ENOSPC
                    where = f"cannot start in {config.runtime_dir}: " if is_full else ""
                    is_wrong = isinstance(error, ValueError)
                    report(Status(error=f"{where}{error}", is_misconfigured=is_wrong))
                    return 1
                freeze_gc()
                _serve(worker, tokenizer, commands, poller, stop, beats, _tokenizer_name(config))
    finally:
        tokenizer.close()
        path.unlink(missing_ok=True)
    context.term()
    return 0


def preload(_config: bytes) -> None:
    """Import what a worker and its tokenizer process need, in a fork server: without torch where
    no core needs it.
    """
    import_tokenizer_process(with_torch="torch" in sys.modules)


def _tokenizer_name(config: WorkerConfig) -> str:
    return process_name("tokenizer", config.index, config.num_workers)


def _await_tokenizer(
    tokenizer: TokenizerClient, poller: zmq.Poller, stop: StopSignal
) -> TokenizerReady | None:
    """The tokenizer process's first `TokenizerReady`; None if the stop signal comes first."""
    while not stop.is_set:
        poller.poll(int(BEAT_S / 2 * 1e3))
        for answer in tokenizer.receive():
            if isinstance(answer, TokenizerReady):
                return answer
        list(tokenizer.beat(time.monotonic()))
        if tokenizer.num_failed >= _MAX_STARTS:
            why = f"the tokenizer process ended {_MAX_STARTS} times before it loaded its tokenizer"
            return TokenizerReady("", "", error=f"{why}; see the log")
    return None


def _await_activation(
    commands: ParentCommands,
    tokenizer: TokenizerClient,
    poller: zmq.Poller,
    stop: StopSignal,
    beats: Beats,
) -> Activate | None:
    """Wait as a spare, with everything loaded; None if the stop signal comes first."""
    while not stop.is_set:
        if (activation := commands.read_activation()) is not None:
            return activation
        list(tokenizer.receive())
        list(tokenizer.beat(time.monotonic()))
        beats.beat(time.monotonic())
        poller.poll(int(BEAT_S * 1e3))
    return None


def _serve(
    worker: Worker,
    tokenizer: TokenizerClient,
    commands: ParentCommands,
    poller: zmq.Poller,
    stop: StopSignal,
    beats: Beats,
    tokenizer_name: str,
) -> None:
    is_ready = False
    draining = _run_commands(worker, commands)
    beat_at = 0.0
    events: dict[object, int] | None = None
    while not stop.is_set:
        now = time.monotonic()
        worker.run_once(now, events)
        if now >= beat_at:
            worker.beat(now)
            condition = tokenizer.condition(now)
            beats.beat(now, worker.numbers, {tokenizer_name: condition}, news=condition)
            beat_at = next_multiple(now, BEAT_S)
        if not is_ready and worker.card is not None:
            is_ready = True
            report(Status(ready=True, detail=f"serving {worker.card.name}"))
        if worker.take_inspection():
            report(Status(wants_statistics=True))
        if draining is not None:
            draining.turn(now)
        events = dict(poller.poll(max(1, math.ceil((beat_at - time.monotonic()) * 1e3))))
        if tokenizer.exits in events:
            beat_at = 0.0
        if commands.fileno() in events:
            draining = _run_commands(worker, commands) or draining
    if draining is not None or any(isinstance(command, Drain) for command in commands.read()):
        worker.say_goodbye()
    worker.close(linger_ms=_GOODBYE_MS)


def _run_commands(worker: Worker, commands: ParentCommands) -> _Draining | None:
    """Tell the worker what the parent has said since the last read; the drain that it has begun, if
    any.
    """
    draining = None
    for command in commands.read():
        if isinstance(command, Drain):
            draining = _Draining(worker, time.monotonic() + command.within_s)
        elif isinstance(command, CoreEnded):
            worker.core_ended(died_within=command.died_within, suspects=command.suspects)
        elif isinstance(command, Statistics):
            worker.inspected(command)
    return draining


class _Draining:
    """A worker that accepts no new requests and ends the running ones at `end_at`. Reports how many
    there are, and how many were cut off.
    """

    def __init__(self, worker: Worker, end_at: float) -> None:
        worker.begin_drain(end_at)
        self._worker = worker
        self._end_at = end_at
        self._is_over = False
        self._is_reported = False
        self._num_cut = 0
        report(Status(num_running=worker.num_running))

    def turn(self, now: float) -> None:
        """End the streams that are due; report `drained` once nothing is left to run or send."""
        if now >= self._end_at and not self._is_over:
            self._is_over = True
            self._num_cut = self._worker.num_running
            self._worker.end_drain()
        is_empty = self._worker.num_running == 0 and not self._worker.has_unsent
        if is_empty and not self._is_reported:
            self._is_reported = True
            report(Status(drained=True, num_cut=self._num_cut))


if __name__ == "__main__":
    run_child(main)
