"""A core in the test's process, and fake workers attached to it over real sockets."""

from __future__ import annotations

import secrets
import select
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import zmq
from tests.helpers.admits import admit_of, with_fields
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import Core, assemble_core
from slipstream_core.runner.factory import load_runner
from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
from slipstream_core.step.plan import Runner, StepFailed, StepPlan, StepResult
from slipstream_ipc.columns import check_step, f32, pack_f32, pack_u32, pack_u64, u32
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import (
    AdapterOutcome,
    AdmissionRefused,
    Admit,
    Admitted,
    AreAdaptersKnown,
    CoreToWorker,
    End,
    Fault,
    Forget,
    Forgotten,
    Kept,
    KeptEntry,
    LogprobColumns,
    Positions,
    Registered,
    Report,
    SamplingParams,
    ServedAdapters,
    Step,
    Suspects,
    SyncDone,
    UnknownKept,
    UnknownToCore,
    Welcome,
    WorkerToCore,
)
from slipstream_ipc.transport.codec import worker_codec
from slipstream_ipc.transport.dealer import Dealer, LinkOptions

VOCAB_SIZE = 997
_GRAMMAR_S = 0.01  # at most, as a worker may have something to say meanwhile


MODEL = f"simulated:step_ms=0,prefill_us=0,vocab_size={VOCAB_SIZE},mode=chain"


Entry = tuple[list[float], list[int], int]  # a token's log-probabilities, their ids, its rank


class Died(Exception):  # noqa: N818  (what befalls a core, not an error of the test)
    """The device is lost, and the core's process dies with it."""


class WatchedRunner:
    """A simulated runner that records the streams of each step, and fails or dies on demand.

    ids_of: the stream ids of a plan. fails, dies: whether a step of these streams fails alone, or
    kills the core.
    """

    def __init__(self, inner: SimulatedRunner) -> None:
        self._inner = inner
        self._order: deque[StepFailed | BaseException | None] = deque()  # None: of `inner`
        self.info, self.num_blocks = inner.info, inner.num_blocks
        self.ids_of: Callable[[StepPlan], list[bytes]] = lambda _plan: []
        self.fails: Callable[[list[bytes]], bool] = lambda _ids: False
        self.dies: Callable[[list[bytes]], bool] = lambda _ids: False
        self.launched: list[list[bytes]] = []
        self.num_in_flight: list[int] = []  # steps in flight at each of `launched`, inclusive

    def launch(self, plan: StepPlan) -> None:
        ids = self.ids_of(plan)
        self.launched.append(ids)
        outcome: BaseException | None = None
        if self.dies(ids):
            outcome = Died()
        elif self.fails(ids):
            outcome = StepFailed(plan.step, RuntimeError("no such luck"))
        self._order.append(outcome)
        self.num_in_flight.append(len(self._order))
        if outcome is None:
            self._inner.launch(plan)

    def sample(self, plan: StepPlan, masks: npt.NDArray[np.int32]) -> None:
        if self._order[-1] is None:  # a step that fails or dies was not launched
            self._inner.sample(plan, masks)

    def collect(self) -> StepResult:
        outcome = self._order.popleft()
        if outcome is not None:
            raise outcome
        return self._inner.collect()

    def done(self) -> bool:
        return bool(self._order) and (self._order[0] is not None or self._inner.done())

    def done_at(self) -> float | None:
        if not self._order or self._order[0] is not None:
            return 0.0 if self._order else None
        return self._inner.done_at()

    def fileno(self) -> None:
        return

    def close(self) -> None:
        self._inner.close()


@dataclass
class Held:
    """A worker's copy of one stream."""

    admit: Admit
    row: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)
    fault: Fault | None = None
    end: End | None = None  # from its registration
    strikes: int = 0
    num_at_strike: int = 0  # tokens at the last strike
    num_admitted: int = 0
    was_admitted: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.token_ids) == self.admit.derived.max_tokens

    @property
    def is_over(self) -> bool:
        return self.is_whole or self.fault is not None or self.end is not None


class StateWorker:
    """A worker that keeps what a core sends; asserts that nothing is duplicated, lost or reordered.

    It admits a stream again if the core does not know it, counts strikes, and ends no stream by
    itself.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes = b"the worker",
        **hop: int,
    ) -> None:
        self._poller = zmq.Poller()
        self._waiting: deque[WorkerToCore] = deque()
        self.streams: dict[bytes, Held] = {}
        self.rows: dict[int, Held] = {}
        self.received: list[CoreToWorker] = []
        self.is_reading = True
        self.is_reporting = True
        self.is_synced = False
        self.kept: tuple[KeptEntry, ...] = ()
        self._last_incarnation = -1
        self.hop: Dealer[WorkerToCore, CoreToWorker, None] = Dealer(
            context,
            address,
            worker_codec(),
            self._poller,
            identity=identity,
            now=time.monotonic(),
            options=LinkOptions(welcome_within_s=0.2),
            **hop,
        )

    def admit(self, prompt: list[int], max_tokens: int = 20, **fields: object) -> Held:
        params = {"temperature": 0.0, "logprobs": fields.pop("logprobs", None)}
        admit = admit_of(
            stream_id=secrets.token_bytes(16),
            prompt_ids=pack_u32(prompt),
            params=SamplingParams(**params),  # type: ignore[arg-type]
            stop_token_ids=(),
            seed=0,
            max_tokens=max_tokens,
        )
        return self.send_admit(with_fields(admit, **fields))

    def send_admit(self, admit: Admit) -> Held:
        held = Held(admit, token_ids=u32(admit.begun.output_ids).tolist())
        self.streams[admit.stream_id] = held
        self._waiting.append(admit)
        return held

    def send(self, body: WorkerToCore) -> None:
        self._waiting.append(body)

    def forget(self, held: Held) -> None:
        self._waiting.append(Forget((held.admit.stream_id,)))

    def step(self) -> None:
        if not self.is_reading:
            return
        for body in self.hop.receive(time.monotonic()):
            self.received.append(body)
            self._take(body)
        self.hop.take_receipts()
        while self._waiting and self.hop.send(self._waiting[0], None):
            self._waiting.popleft()
        self.hop.beat(time.monotonic())

    def heard(self, kind: type[CoreToWorker]) -> list[CoreToWorker]:
        return [body for body in self.received if isinstance(body, kind)]

    def _take(self, body: CoreToWorker) -> None:
        match body:
            case Welcome():
                self._attached()
            case Admitted():
                held = self.streams[body.stream_id]
                held.row = body.row
                held.num_admitted += 1
                held.was_admitted = True
                self.rows[body.row] = held
            case Registered():
                held = Held(body.registration, body.row, end=body.end, was_admitted=True)
                held.token_ids = u32(body.registration.begun.output_ids).tolist()
                if body.registration.begun.logprobs is not None:
                    held.logprobs = entries(body.registration.begun.logprobs)
                assert body.registration.stream_id not in self.streams
                self.streams[body.registration.stream_id] = self.rows[body.row] = held
            case AdmissionRefused():
                self.streams[body.stream_id].fault = body.fault
            case Step():
                self._take_step(body)
            case Suspects():
                self._strike(body)
            case UnknownToCore():
                for stream_id in body.stream_ids:
                    self._admit_again(self.streams[stream_id])
            case SyncDone():
                self.is_synced = True
            case Kept():
                self.kept += body.entries
            case ServedAdapters():
                self._waiting.append(AreAdaptersKnown(body.number))
            case UnknownKept() | Forgotten() | AdapterOutcome():
                pass
            case other:
                raise AssertionError(f"unexpected {other}")

    def _attached(self) -> None:
        self.rows.clear()
        self._waiting.clear()
        going_on = [held for held in self.streams.values() if not held.is_over]
        here = [held for held in going_on if held.was_admitted]
        for held in going_on:
            if not held.was_admitted:
                if len(held.token_ids) == len(held.admit.begun.output_ids) // 4:
                    self._waiting.append(held.admit)
                else:
                    self._admit_again(held)
        if self.is_synced:
            self._waiting.append(
                Positions(
                    tuple(held.admit.stream_id for held in here),
                    pack_u32([len(held.token_ids) for held in here]),
                    pack_u64([history_digest(np.array(h.token_ids, np.uint32)) for h in here]),
                    last=True,
                )
            )

    def _admit_again(self, held: Held) -> None:
        held.row = None
        if held.strikes >= 3:
            held.fault = Fault("engine", "it died alone")
            return
        outputs = np.array(held.token_ids, np.uint32)
        self._waiting.append(
            with_fields(
                held.admit,
                output_ids=pack_u32(outputs),
                logprobs=columns(held.logprobs) if held.logprobs else None,
                was_accepted=held.was_admitted or held.admit.begun.was_accepted,
                strikes=held.strikes,
            )
        )

    def _strike(self, suspects: Suspects) -> None:
        assert suspects.incarnation > self._last_incarnation
        self._last_incarnation = suspects.incarnation
        for stream_id in suspects.stream_ids:
            held = self.streams.get(stream_id)
            if held is not None:
                has_progressed = len(held.token_ids) > held.num_at_strike
                held.strikes = 1 if has_progressed else held.strikes + 1
                held.num_at_strike = len(held.token_ids)

    def _take_step(self, step: Step) -> None:
        check_step(step)
        rows = u32(step.rows).tolist()
        counts = u32(step.counts).tolist() if step.counts else [1] * len(rows)
        token_ids = u32(step.token_ids).tolist()
        logprobs = split(step.logprobs, counts)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            held = self.rows[row]
            if step.starts:
                at = len(held.admit.prompt_ids) // 4 + len(held.token_ids)
                assert int(u32(step.starts)[i]) == at
            assert held.fault is None or held.fault.code == "conflict"  # of a second admission
            held.token_ids += token_ids[:count]
            del token_ids[:count]
            held.logprobs += logprobs[i]
            assert len(held.token_ids) <= held.admit.derived.max_tokens
        assert not token_ids
        if self.is_reporting and step.is_awaited:
            self._waiting = deque(b for b in self._waiting if not isinstance(b, Report))
            self._waiting.appendleft(Report(step.step))


def await_grammar(core: Core) -> None:
    """Leave the processor to a grammar that is being compiled, where there is nothing but that."""
    scheduler = core.scheduler
    if core.compiler.num_jobs and not (scheduler.num_running or scheduler.num_waiting):
        select.select([core.compiler], [], [], _GRAMMAR_S)


class CoreBox:
    """One core and any number of workers."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.address = f"ipc://{directory}/core"
        self.workers: list[StateWorker] = []
        self._settings: dict[str, object] = {
            "model": MODEL,
            "max_num_seqs": 16,
            "max_model_len": 256,
            "runtime_dir": str(directory),
            "address": self.address,
            **settings,
        }
        self._incarnation = 0
        self.core: Core | None = None
        self.start()

    def start(self, **settings: object) -> None:
        self._incarnation += 1
        config = CoreConfig(**{**self._settings, "incarnation": self._incarnation, **settings})  # type: ignore[arg-type]
        inner = load_runner(config)
        assert isinstance(inner, SimulatedRunner)
        self.runner = WatchedRunner(inner)
        runner: Runner = self.runner
        core = assemble_core(config, runner, self.context, self.poller)
        self.core = core
        self.runner.ids_of = lambda plan: [
            core.handler.stream_id(row) for row in core.scheduler.rows_of(plan).tolist()
        ]

    def kill(self) -> None:
        """Drop the core, as kill -9 does."""
        assert self.core is not None
        self.core.close()
        self.core = None

    def worker(self, identity: bytes = b"the worker") -> StateWorker:
        incarnation = len(self.workers) + 1
        worker = StateWorker(self.context, self.address, identity, incarnation=incarnation)
        self.workers.append(worker)
        return worker

    def kill_worker(self, worker: StateWorker) -> None:
        """Disconnect a worker, as kill -9 does."""
        worker.hop.close()
        worker.is_reading = False

    def step(self) -> None:
        if self.core is not None:
            await_grammar(self.core)
            self.core.engine.run_once(wait=False)
        for worker in self.workers:
            worker.step()

    def until(self, condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Step until `condition`, with a deadline."""
        patience = Patience(within_s)
        while not condition():
            patience.check()
            self.step()

    def take_in(self, num: int) -> None:
        """Let the core receive `num` streams, in any number of messages, before it computes."""
        core = self.core
        assert core is not None
        self.hear_until(lambda: core.handler.num_streams == num)

    def hear_until(self, condition: Callable[[], bool]) -> None:
        """Step until `condition`; the core receives and answers, but launches no step."""
        assert self.core is not None
        with patch.object(self.core.engine, "_may_launch", return_value=False):
            self.until(condition)

    def survives_until(self, condition: Callable[[], bool]) -> bool:
        """Step until `condition`. If the device dies first, kill the core and return False."""
        try:
            self.until(condition)
        except Died:
            self.kill()
            return False
        return True

    def close(self) -> None:
        for worker in self.workers:
            worker.hop.close()
        if self.core is not None:
            self.core.close()
        self.context.destroy(linger=0)


def entries(columns: LogprobColumns) -> list[Entry]:
    """The entries of columns with a single width."""
    width = columns.width
    values, ids = f32(columns.values).tolist(), u32(columns.ids).tolist()
    return [
        (values[at : at + width], ids[at : at + width], rank)
        for at, rank in zip(range(0, len(ids), width), u32(columns.ranks).tolist(), strict=True)
    ]


def columns(of: list[Entry]) -> LogprobColumns:
    """Columns of entries that all have the same number of candidates."""
    return LogprobColumns(
        len(of[0][0]),
        pack_f32([value for values, _, _ in of for value in values]),
        pack_u32([i for _, ids, _ in of for i in ids]),
        pack_u32([rank for _, _, rank in of]),
    )


def split(columns: LogprobColumns | None, counts: list[int]) -> list[list[Entry]]:
    """The log-probabilities of a Step, per row: one entry per token, none for rows without any."""
    if columns is None:
        return [[] for _ in counts]
    widths = u32(columns.widths).tolist() if columns.widths else [columns.width] * len(counts)
    values, ids = f32(columns.values).tolist(), u32(columns.ids).tolist()
    ranks = u32(columns.ranks).tolist()
    found: list[list[Entry]] = []
    for width, count in zip(widths, counts, strict=True):
        found.append([])
        for _ in range(count if width else 0):
            found[-1].append((values[:width], ids[:width], ranks.pop(0)))
            del values[:width], ids[:width]
    return found


BoxT = TypeVar("BoxT", bound=CoreBox)


@contextmanager
def boxes_of(kind: type[BoxT]) -> Iterator[Callable[..., BoxT]]:
    """A factory of boxes with a folder each, which are closed behind the block."""
    directory = Path(tempfile.mkdtemp(prefix="core-"))
    boxes: list[BoxT] = []

    def make(**settings: object) -> BoxT:
        folder = directory / str(len(boxes))
        folder.mkdir(mode=0o700)
        boxes.append(kind(folder, **settings))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()
    shutil.rmtree(directory)
