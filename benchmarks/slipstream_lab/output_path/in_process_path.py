"""The output path in one thread: a real core (without a device), worker and client.

- The product's own functions assemble the components; a workload replaces the device and memory
  replaces the connections between processes (`memory_wire`).
- A step's CPU time is counted from when the sampled ids are on the host. Planning the step and
  making up what the device would have computed are excluded.
- The stages, in order:
  collect      ids and logprobs go into the core's histories
  publish      the core builds and encodes its message
  check        the worker, until its report to the core has left: decoding, stop checks, and
               everything else before that
  emit         the worker, from there until the deltas have left: detokenising, building, encoding
  settle       the rest of the worker's turn
  client       decoding, checking, deltas in their streams' queues; the acknowledgement
  read         the reader takes the deltas, see `delta_readers`
  reports      the core reads the worker's report
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy as np
import zmq
from msgspec import structs

from slipstream.client.base import new_state
from slipstream.client.connection.cluster import Cluster
from slipstream.client.connection.thread_io import ThreadIO
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core
from slipstream_core.step.plan import Logprobs, ModelInfo, Runner
from slipstream_ipc.history.pages import spans
from slipstream_ipc.messages import ModelCard, Render, Rendered, SamplingParams
from slipstream_ipc.worker_deal import worker_address
from slipstream_lab.common.memory_wire import MemoryConnection, MemoryNetwork
from slipstream_lab.output_path.floor import Hop, Sent
from slipstream_lab.output_path.stopwatch import BETWEEN, Stopwatch
from slipstream_lab.output_path.workload import Workload
from slipstream_worker.build import assemble_worker
from slipstream_worker.config import WorkerConfig
from slipstream_worker.detokenizer.factory import DetokenizerFactory

STAGES = ("collect", "publish", "check", "emit", "settle", "client", "read", "reports")

PROCESSES = {  # stages by process; planning, which is not timed, is the core's
    "core": ("collect", "publish", "reports", BETWEEN),
    "worker": ("check", "emit", "settle"),
    "client": ("client", "read"),
}

_BLOCK_SIZE = 16
_CORE, _CLIENTS = "ipc:///memory/core", "ipc:///memory/clients"
_SETUP_TURNS = 1000
_HOPS: dict[tuple[bool, bool], tuple[str, Hop]] = {  # is it the core's, sent by the listener?
    (True, True): ("core", "step"),
    (True, False): ("worker", "report"),
    (False, True): ("worker", "deltas"),
    (False, False): ("client", "receipt"),
}


class OutputPath:
    """`batch` requests of a workload, admitted and ready to run."""

    def __init__(
        self,
        workload: Workload,
        batch: int,
        params: SamplingParams,
        detokenizers: DetokenizerFactory,
        vocab_size: int,
        watch: Stopwatch,
        *,
        is_together: bool = False,
        num_workers: int = 1,
        tokens_per_row: tuple[int, int] = (1, 1),
    ) -> None:
        """params: of every request except for its seed. watch: collects the CPU time of each stage.
        is_together: one reader reads all streams, through `group`. num_workers: that make text.
        tokens_per_row: the least and the most that a step gives to each request, drawn evenly.
        """
        prompt_len = workload.prompts.shape[1]
        self._num_tokens: int = workload.outputs.shape[1]
        self._tokens_per_row = tokens_per_row
        self._random = np.random.default_rng(0)
        assert params.max_tokens == self._num_tokens
        self._outputs = workload.outputs[:batch]
        self._values, self._candidates = workload.logprobs[:batch], workload.candidates[:batch]
        self._wants_logprobs = params.logprobs is not None
        self._watch = watch
        self._at = np.zeros(batch, np.int64)  # tokens that each request has
        self._sent: list[tuple[MemoryConnection, bytes]] = []  # by whom, and what
        self._awake: set[int] = set()  # workers to which something was sent since their last turn
        # containers that each stage leaves to the collector while all requests run: without the
        # first step, in which streams begin, and the last, in which they end
        self.num_tracked: Counter[str] = Counter()
        network = MemoryNetwork()
        poller = zmq.Poller()  # never polled
        with network.in_use() as context:
            self._core = assemble_core(
                _core_config(batch, prompt_len),
                _no_device(vocab_size, prompt_len + self._num_tokens),
                context,
                poller,
            )
            self._workers = [
                assemble_worker(
                    _worker_config(index, num_workers), _NoPrompts(), detokenizers, context, poller
                )
                for index in range(num_workers)
            ]
            self._cluster = Cluster(context, _CLIENTS, 60.0, zmq.Poller(), time.monotonic())
            self._until(lambda: bool(self._cluster.models) and self._cluster.is_attached)
        self.io = cast(ThreadIO, _SessionIO(self._cluster))
        self.states: list[StreamState] = []
        for index, prompt in enumerate(workload.prompts[:batch]):
            # a step's plan holds the seeds of its rows, so the seed identifies the request
            seeded = structs.replace(params, seed=index)
            self.states.append(new_state(self._cluster.models[0], prompt, seeded, kind="delta"))
        self.group = StreamGroup(self.states) if is_together else None
        for state in self.states:
            self._cluster.submit(state, time.monotonic())
        self._until(lambda: all(state.prompt_ids is not None for state in self.states))
        self._until(lambda: self._core.scheduler.num_waiting == batch)
        # in the engine a step is in flight when a report comes, whose message acknowledges it
        self._core.handler.launching(0, np.empty(0, np.int64))
        network.tap = self._note_sent
        self._network, self._arrived = network, network.arrived

    @property
    def is_done(self) -> bool:
        """Whether every token has been generated."""
        return bool((self._at >= self._num_tokens).all())

    @property
    def messages(self) -> list[Sent]:
        """What was sent so far."""
        return [Sent(_hop_of(by)[1], data) for by, data in self._sent]

    @property
    def num_bytes(self) -> Counter[str]:
        """The bytes that each process has sent."""
        found: Counter[str] = Counter()
        for by, data in self._sent:
            found[_hop_of(by)[0]] += len(data)
        return found

    def step(self) -> None:
        """Generate a step's tokens of every request and deliver them to its stream's queue."""
        core, watch = self._core, self._watch
        plan = core.scheduler.schedule(core.handler.acked)
        assert plan is not None
        assert plan.samples.all()
        requests = plan.seeds
        ids, counts = self._next_ids(requests)
        logprobs = None
        if self._wants_logprobs:
            of_token = requests if counts is None else np.repeat(requests, counts)
            logprobs = self._made_up(of_token, ids)
        now = time.monotonic()

        watch.start()
        sampled = core.scheduler.complete(plan, ids, counts)
        if logprobs is not None and sampled.counts is not None:
            core.logprobs.append_several(sampled.rows, sampled.counts, logprobs, sampled.index)
        elif logprobs is not None:
            core.logprobs.append(sampled.rows, logprobs, sampled.index)
        core.manager.mark_dirty(sampled.rows)
        watch.lap("collect")
        core.handler.publish(plan.step)
        watch.lap("publish")
        for worker in sorted(self._awake):
            self._workers[worker].run_once(now, self._arrived)
            watch.lap("settle")
        self._awake.clear()
        self._cluster.turn(now, self._arrived)
        watch.lap("client")

    def take_reports(self) -> None:
        """Finish a step after its deltas have been read: the core receives the worker's report."""
        self._core.handler.receive(time.monotonic(), self._arrived)
        self._watch.lap("reports")
        self._network.clear_arrived()
        most = self._tokens_per_row[1]
        if (self._at <= most).all():
            self._watch.num_tracked.clear()
        elif (self._at < self._num_tokens - most).all():
            self.num_tracked = self._watch.num_tracked.copy()

    def check_whole(self) -> None:
        """Assert that every stream received all of its tokens and ended once."""
        for state in self.states:
            assert state.error is None, state.error
            assert state.is_over
            assert state.num_tokens == self._num_tokens
            assert state.end is not None
            assert state.end.reason == "length"

    def close(self) -> None:
        """Close client, worker and core."""
        self._cluster.close()
        for worker in self._workers:
            worker.close()
        self._core.close()

    def _next_ids(
        self, requests: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Draw a step's tokens for these requests: ids row by row, and how
        many of each; None: one.
        """
        least, most = self._tokens_per_row
        begins = self._at[requests]
        if most == 1:
            self._at[requests] += 1
            return self._outputs[requests, begins], None
        counts = self._random.integers(least, most + 1, len(requests))
        counts = np.minimum(counts, self._num_tokens - begins)
        self._at[requests] += counts
        return self._outputs[np.repeat(requests, counts), spans(begins, counts)], counts

    def _made_up(self, requests: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> Logprobs:
        candidates = self._candidates[requests]
        candidates[:, 0] = ids
        return Logprobs(self._values[requests], candidates, np.ones(len(ids), np.uint32))

    def _note_sent(self, connection: MemoryConnection, data: bytes) -> None:
        """A message left its sender, which ends a stage of a worker's turn."""
        is_core = connection.address == _CORE
        if is_core and connection.is_accepted:
            self._awake.add(connection.number)
        elif is_core or connection.is_accepted:
            self._watch.lap("check" if is_core else "emit")
        self._sent.append((connection, data))

    def _until(self, condition: Callable[[], bool]) -> None:
        """Turn all components until `condition` holds; no tokens are generated yet."""
        for _ in range(_SETUP_TURNS):
            now = time.monotonic()
            self._cluster.turn(now)
            for worker in self._workers:
                worker.run_once(now)
            self._core.handler.receive(now)
            self._core.handler.publish(0)
            if condition():
                return
        raise AssertionError("the parts did not come together")


class _NoPrompts:
    """Replaces the tokenizer process: every prompt here consists of token ids."""

    def ask(self, request: Render, tenant: bytes = b"") -> NoReturn:
        raise AssertionError(f"a prompt to be tokenised: {request}")

    def withdraw(self, key: int) -> bool:
        return True

    def is_among(self, arrived: object) -> bool:
        return False

    def receive(self) -> tuple[Rendered, ...]:
        return ()

    def beat(self, now: float) -> tuple[Rendered, ...]:
        return ()


class _NoDevice:
    """Replaces a runner: its info configures the core, and it never runs a step."""

    def __init__(self, info: ModelInfo, num_blocks: int) -> None:
        self.info = info
        self.num_blocks = num_blocks

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        pass


class _SessionIO:
    """Replaces a client's I/O thread: every call acts at once, in this thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def models(self) -> tuple[ModelCard, ...]:
        return self._cluster.models

    def abort(self, state: StreamState) -> None:
        self._cluster.abort(state)

    def abandon(self, state: StreamState) -> None:
        self._cluster.abandon(state)


def _no_device(vocab_size: int, max_model_len: int) -> Runner:
    info = ModelInfo(
        name="none",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(0,),
        block_bytes=0,
        block_size=_BLOCK_SIZE,
    )
    # blocks are only numbers here, so a large pool costs nothing
    return cast(Runner, _NoDevice(info, num_blocks=2**20))


def _core_config(batch: int, prompt_len: int) -> CoreConfig:
    return CoreConfig(
        model="none",
        address=_CORE,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * prompt_len,  # all prompts in the first step
        block_size=_BLOCK_SIZE,
    )


def _hop_of(sender: MemoryConnection) -> tuple[str, Hop]:
    return _HOPS[sender.address == _CORE, sender.is_accepted]


def _worker_config(index: int, num_workers: int) -> WorkerConfig:
    return WorkerConfig(
        tokenizer="none",
        client_address=worker_address(_CLIENTS, index),
        core_address=_CORE,
        runtime_dir="/memory",
        cache_dir="/memory",
        index=index,
        num_workers=num_workers,
    )
