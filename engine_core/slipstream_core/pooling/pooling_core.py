"""The loop of a core that is served for pooling: receive, launch, collect, answer, wait.

- What workers ask are queries. A worker that attaches asks all of them again, so nothing is kept
  for it: an answer that was on its way is computed anew.
- One step runs, in a thread; the next one is made when it is done, of all that has come until then.
- A step that fails is repeated sequence by sequence, and the one that fails alone is named.
- The queries of the running step are noted for the next core (`workers/crash_note_writer.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Container
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zmq

from slipstream_core.config import CoreConfig
from slipstream_core.kernels.cpu.cpu_threads import num_cores
from slipstream_core.model.fingerprint import fingerprint_of
from slipstream_core.pooling.flat_model import FlatModel, load_flat_model
from slipstream_core.pooling.pooling_queue import PoolingQuery, PoolingQueue, PoolingStep
from slipstream_core.step.device_thread import DeviceThread
from slipstream_core.step.plan import ModelInfo
from slipstream_core.workers.crash_note_writer import CrashNote, begin_note
from slipstream_ipc.arrays import Float32s
from slipstream_ipc.columns import u32, u64
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    WANTS_LOAD,
    AdapterChange,
    AdapterOutcome,
    AdmissionRefused,
    Admit,
    CoreToWorker,
    DropPool,
    Fault,
    Gauge,
    Hello,
    ModelCard,
    NamedPrompt,
    Pool,
    Pooled,
    PoolingCard,
    PoolingTask,
    Positions,
    SyncDone,
    WorkerToCore,
)
from slipstream_ipc.process import BEAT_S, next_multiple
from slipstream_ipc.telemetry.histogram import HistogramBuilder
from slipstream_ipc.telemetry.statistics import CoreCounters, CoreGauges, CoreNumbers
from slipstream_ipc.telemetry.timeline import RecentSpans
from slipstream_ipc.transport.codec import core_codec
from slipstream_ipc.transport.link import WINDOW
from slipstream_ipc.transport.router import Router, Session
from slipstream_ipc.transport.shared_prompts import registrations_of
from slipstream_ipc.transport.sockets import listen
from slipstream_ipc.validation.pooling import pooling_detail

logger = logging.getLogger(__name__)

_GAUGE_S = 0.05  # between two looks at the load
_NO_STREAMS = Fault("bad_request", "this model is served for pooling: it generates no text")
_NO_ADAPTERS = Fault("bad_request", "this server serves no adapters (--enable-lora)")


class _Outbox:
    """Everything that is to be sent to one worker in its current attach."""

    def __init__(self, session: Session[None]) -> None:
        self.session = session
        self.messages: deque[CoreToWorker] = deque()


class PoolingCore:
    """A core that computes embeddings or classes."""

    def __init__(
        self,
        config: CoreConfig,
        model: FlatModel,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
    ) -> None:
        """`poller` has the stop signal registered. Raises OSError or zmq.ZMQError where the address
        cannot be bound.
        """
        self._model = model
        self._card = _card(config, model)
        codec = core_codec()
        self._sockets = listen(context, config.address, max_message_bytes=codec.max_message_bytes)
        self._acceptor: Router[CoreToWorker, WorkerToCore, None] = Router(
            self._sockets.router, codec, window=WINDOW, local=self._sockets.local
        )
        self._acceptor.register(poller)
        self._poller = poller
        self._queue = PoolingQueue(config.max_num_batched_tokens, config.max_num_seqs)
        self._outboxes: dict[bytes, _Outbox] = {}  # by identity of the worker
        self._note: CrashNote | None = None
        if config.runtime_dir is not None:
            self._note = begin_note(Path(config.runtime_dir), config.max_num_seqs)
        threads = config.threads or num_cores()
        prepare = partial(torch.set_num_threads, threads)
        self._device: DeviceThread[Float32s] = DeviceThread("device", prepare)
        poller.register(self._device.fileno(), zmq.POLLIN)
        self._retried: deque[PoolingStep] = deque()
        self._running: PoolingStep | None = None
        self._step = 0
        self._step_began_at = 0.0
        self._step_s = 0.0
        self._max_num_seqs = config.max_num_seqs
        self._beat_at = self._gauge_at = 0.0
        self._gauge: Gauge | None = None  # the one sent last
        self._gauge_epochs: list[int] = []
        self._arrived: Container[object] | None = None
        self._num_computed_tokens = 0
        self._busy_s = 0.0
        self._durations = HistogramBuilder()
        self._recent = RecentSpans(has_nums=True)

    @property
    def detail(self) -> str:
        """The served model, for the log."""
        assert self._card.pooling is not None
        return pooling_detail(self._card.name, self._card.pooling)

    @property
    def load(self) -> tuple[int, int]:
        """Number of queries in the running step, and of waiting ones."""
        num_running = 0
        if self._running is not None:
            num_running = len({id(query) for query, _ in self._running.entries})
        return num_running, max(0, self._queue.num_queries - num_running)

    def running_s(self, now: float) -> float:
        """Seconds that the running step has taken; 0 where there is none."""
        return 0.0 if self._running is None else now - self._step_began_at

    def numbers(self) -> CoreNumbers:
        """Counters and gauges, as of now."""
        num_running, num_waiting = self.load
        return CoreNumbers(
            CoreGauges(num_running=num_running, num_waiting=num_waiting),
            CoreCounters(
                num_steps=self._step,
                num_computed_tokens=self._num_computed_tokens,
                device_busy_s=self._busy_s,
                step_s=self._durations.histogram(),
            ),
            self._recent.spans(time.monotonic()),
        )

    def run_once(self, *, wait: bool = True) -> None:
        """One turn of the loop."""
        now = time.monotonic()
        if self._arrived is None or self._acceptor.is_among(self._arrived):
            self._receive(now)
        self._arrived = None
        if self._running is not None and self._device.done():
            self._collect()
        if self._running is None:
            self._launch()
        self._flush()
        if now >= self._beat_at:
            self._acceptor.beat(now)
            for session in self._acceptor.take_lost():
                logger.warning("worker %r is gone", session.identity)
                self._queue.drop_of(session.identity)
            self._beat_at = next_multiple(now, BEAT_S)
        if now >= self._gauge_at:
            self._gauge_at = now + _GAUGE_S
            self._send_gauge()
        if wait:
            wait_ms = max(0, math.ceil((self._beat_at - time.monotonic()) * 1e3))
            self._arrived = dict(self._poller.poll(wait_ms))

    def close(self) -> None:
        """Close sockets and thread."""
        self._device.close()
        self._sockets.close()
        if self._note is not None:
            self._note.close()

    def _receive(self, now: float) -> None:
        for session, body in self._acceptor.receive(now):
            try:
                self._handle(session, body)
            except ProtocolError:
                logger.exception("worker %r broke the protocol", session.identity)
                self._acceptor.reattach(session)

    def _handle(self, session: Session[None], body: WorkerToCore) -> None:
        worker = session.identity
        match body:
            case Hello():
                self._queue.drop_of(worker)
                self._outboxes[worker] = _Outbox(session)
                self._acceptor.welcome(session, self._card)
                if session.fresh:
                    self._answer(worker, SyncDone())
            case Positions():
                if body.last:
                    self._answer(worker, SyncDone())
            case Pool():
                _check(body, self._card.vocab_size)
                self._queue.add(PoolingQuery(worker, body))
            case DropPool():
                for number in u64(body.numbers, "numbers").tolist():
                    self._queue.drop_number(worker, number)
            case Admit():
                for admit in registrations_of(body):
                    moves = admit.begun.moves
                    refusal = AdmissionRefused(admit.stream_id, _NO_STREAMS, moves)
                    self._answer(worker, refusal)
            case AdapterChange():
                self._answer(worker, AdapterOutcome(body.number, _NO_ADAPTERS, "missing"))
            case _:
                pass  # about streams, of which there are none

    def _answer(self, worker: bytes, body: CoreToWorker) -> None:
        outbox = self._outboxes.get(worker)
        if outbox is not None:
            outbox.messages.append(body)

    def _flush(self) -> None:
        for outbox in self._outboxes.values():
            session, messages = outbox.session, outbox.messages
            if not session.is_open:
                messages.clear()
                continue
            if session.link.has_receipts:
                session.link.take_receipts()
            while messages and self._acceptor.send(session, messages[0], None):
                messages.popleft()

    def _send_gauge(self) -> None:
        """Send the load to the workers that want it, if it has changed."""
        sessions = [each for each in self._acceptor.sessions if each.wants & WANTS_LOAD]
        if not sessions:
            return
        num_running, num_waiting = self.load
        gauge = Gauge(
            running=num_running,
            waiting=num_waiting,
            queued_tokens=self._queue.num_tokens,
            free_blocks=1,
            blocks=1,
            kept_since_s=0.0,
            step_s=self._step_s,
            max_seqs=self._max_num_seqs,
        )
        epochs = [session.link.epoch for session in sessions]
        if gauge == self._gauge and epochs == self._gauge_epochs:
            return
        self._gauge, self._gauge_epochs = gauge, epochs
        for session in sessions:
            self._acceptor.send_unnumbered(session, gauge)

    def _launch(self) -> None:
        step = self._retried.popleft() if self._retried else self._queue.next_step()
        if step is None:
            return
        self._running, self._step_began_at = step, time.monotonic()
        self._step += 1
        if self._note is not None:
            ids = list({query.pool.query_id.ljust(16, b"\0") for query, _ in step.entries})
            words = np.frombuffer(b"".join(ids), np.uint64).reshape(-1, 2)
            self._note.launch(self._step, words, np.arange(len(ids)))
        self._device.submit(partial(self._model.embed, step.sequences, step.first_lens))

    def _collect(self) -> None:
        step, now = self._running, time.monotonic()
        assert step is not None
        self._running = None
        if self._note is not None:
            self._note.collect(self._step)
        took_s = now - self._step_began_at
        self._step_s = took_s if not self._step_s else 0.8 * self._step_s + 0.2 * took_s
        self._busy_s += took_s
        self._durations.add(took_s)
        self._num_computed_tokens += step.num_tokens
        self._recent.add(now - took_s, now, len(step.entries))
        try:
            vectors = self._device.collect()
        except Exception as error:
            self._failed(step, error)
            return
        for (query, index), vector in zip(step.entries, vectors, strict=True):
            if query.is_over:
                continue
            if not np.isfinite(vector).all():
                fault = Fault("engine", "the model computes no finite vector of it", "input")
                self._end(query, Pooled(query.pool.number, fault=fault, index=index))
                continue
            if query.vectors is None:
                num = len(query.sequences)
                query.vectors = np.empty((num, self._model.dimensions), np.float32)
            query.vectors[index] = vector
            query.num_left -= 1
            if not query.num_left:
                self._end(query, self._pooled(query.pool, query.vectors))

    def _pooled(self, pool: Pool, vectors: Float32s) -> Pooled:
        final = self._model.finished(vectors, pool.dimensions, pool.normalizes)
        return Pooled(pool.number, final.astype("<f4", copy=False).tobytes())

    def _failed(self, step: PoolingStep, error: Exception) -> None:
        """Repeat a step that failed, sequence by sequence."""
        if len(step.entries) > 1:
            logger.error("a step failed; its sequences are computed one by one: %r", error)
            self._retried.extend(PoolingStep([entry]) for entry in step.entries)
            return
        [(query, index)] = step.entries
        logger.error("a sequence failed", exc_info=error)
        if not query.is_over:
            fault = Fault("engine", f"the model failed: {type(error).__name__}", "input")
            self._end(query, Pooled(query.pool.number, fault=fault, index=index))

    def _end(self, query: PoolingQuery, answer: Pooled) -> None:
        self._queue.drop(query)
        self._answer(query.worker, answer)


def open_pooling_core(
    config: CoreConfig,
    task: PoolingTask,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
) -> PoolingCore:
    """Load `config.model` and serve it for a task. Raises ModelLoadError; OSError or zmq.ZMQError
    where the address cannot be bound.
    """
    torch.set_num_threads(1)  # of this thread: a second team would spin beside the device's
    return PoolingCore(config, load_flat_model(config, task), context, poller)


def _check(pool: Pool, vocab_size: int) -> None:
    """Raises ProtocolError for ids that a worker may not send."""
    counts, ids = u32(pool.counts, "counts"), u32(pool.token_ids, "token_ids")
    if not len(counts) or not counts.all() or int(counts.sum(dtype=np.int64)) != len(ids):
        raise ProtocolError("the counts of a Pool do not match its ids")
    if pool.first_lens and len(u32(pool.first_lens, "first_lens")) != len(counts):
        raise ProtocolError("the first_lens of a Pool do not match its counts")
    if int(ids.max()) >= vocab_size:
        raise ProtocolError("a Pool with ids that are not in the vocabulary")


def _card(config: CoreConfig, model: FlatModel) -> ModelCard:
    recipe = model.recipe
    prompts = tuple([NamedPrompt(*each) for each in (recipe.prompts or {}).items()])
    info = ModelInfo(model.name, model.vocab_size, model.max_model_len, model.eos_token_ids, 0, 1)
    return ModelCard(
        config.served_model_name or model.name,
        config.model,
        model.vocab_size,
        model.max_model_len,
        model.eos_token_ids,
        fingerprint=fingerprint_of(config, info),
        aliases=config.aliases,
        pooling=PoolingCard(
            model.dimensions,
            model.matryoshka,
            prompts,
            recipe.default_prompt,
            "embed" if model.head is None else "classify",
            () if model.head is None else model.head.labels,
            model.needs_template,
        ),
    )
